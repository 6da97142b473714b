#include "server/device/bytes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

// A copy is: pack at the source (its device's kernel, or the host's), carry the packed elements,
// which have the target's kind by then, and unpack at the target. Within one device it is one
// kernel.
namespace weightwire::device {
namespace {

using kernels::Element;
using kernels::FourBitKind;
using kernels::QuantizeBox;
using kernels::StridedBox;

int32_t Number(Element element) { return static_cast<int32_t>(element); }

ww_cuda_box ToC(const StridedBox& box) {
  ww_cuda_box c{};
  c.ndim = box.ndim;
  std::copy_n(box.extent, box.ndim, c.extent);
  std::copy_n(box.source_stride, box.ndim, c.source_stride);
  std::copy_n(box.target_stride, box.ndim, c.target_stride);
  return c;
}

/// `box.source_stride` counts.
ww_cuda_sum_job SumJob(const std::byte* at, const StridedBox& box, Element from, Element to) {
  return {nullptr, at, ToC(box), Number(from), Number(to)};
}

int64_t Elements(const StridedBox& box) {
  int64_t count = 1;
  for (int d = 0; d < box.ndim; ++d) count *= box.extent[d];
  return count;
}

Status Finish(Lane& lane) {
  auto done = lane.Wait();
  return done ? OkStatus() : done.error();
}

/// A box between two memories that are not both the host's, nor both of one device.
struct Carried {
  Bytes target;
  ConstBytes source;
  StridedBox box;
  Element from;
  Element to;
  Lane* source_lane;  ///< null: host
  Lane* target_lane;
  size_t bytes() const { return static_cast<size_t>(Elements(box) * kernels::ElementBytes(to)); }
};

Status Pack(const Carried& c) {
  const StridedBox packed = WithPackedTarget(c.box);
  if (c.source_lane == nullptr) {
    kernels::Copy(c.target_lane->bounce(), c.source.at, packed, c.from, c.to);
    return OkStatus();
  }
  return c.source_lane->Copy(
      {c.source_lane->scratch(), c.source.at, ToC(packed), Number(c.from), Number(c.to)});
}

/// To the target lane's scratch, or to the source lane's bounce.
Status Carry(const Carried& c) {
  if (c.target_lane == nullptr) {
    WW_RETURN_IF_ERROR(
        c.source_lane->CopyBytes(c.source_lane->bounce(), c.source_lane->scratch(), c.bytes()));
    return Finish(*c.source_lane);
  }
  const std::byte* from = c.target_lane->bounce();
  if (c.source_lane != nullptr) {
    WW_RETURN_IF_ERROR(Finish(*c.source_lane));
    from = c.source_lane->scratch();
  }
  return c.target_lane->CopyBytes(c.target_lane->scratch(), from, c.bytes());
}

Status Unpack(const Carried& c) {
  const StridedBox packed = WithPackedSource(c.box);
  if (c.target_lane == nullptr) {
    kernels::Copy(c.target.at, c.source_lane->bounce(), packed, c.to, c.to);
    return OkStatus();
  }
  WW_RETURN_IF_ERROR(c.target_lane->Copy(
      {c.target.at, c.target_lane->scratch(), ToC(packed), Number(c.to), Number(c.to)}));
  return Finish(*c.target_lane);
}

/// In parts that a lane has room for: halves along the first dimension that has any.
Status CarryAll(const Carried& c, size_t bytes_max) {
  if (c.bytes() <= bytes_max) {
    WW_RETURN_IF_ERROR(Pack(c));
    WW_RETURN_IF_ERROR(Carry(c));
    return Unpack(c);
  }
  int d = 0;
  while (c.box.extent[d] == 1) ++d;
  const int64_t half = c.box.extent[d] / 2;
  Carried first = c, second = c;
  first.box.extent[d] = half;
  second.box.extent[d] -= half;
  const auto skipped = [half](int64_t stride, Element element) {
    return static_cast<uint64_t>(half * stride * kernels::ElementBytes(element));
  };
  second.source = c.source + skipped(c.box.source_stride[d], c.from);
  second.target = c.target + skipped(c.box.target_stride[d], c.to);
  WW_RETURN_IF_ERROR(CarryAll(first, bytes_max));
  return CarryAll(second, bytes_max);
}

/// The GPU on which all of the job lies.
Device* WhollyOn(const CopyJob& job) {
  return job.target.device == job.source.device ? job.source.device : nullptr;
}

Status CopyAndSumOnOne(Device& device, std::span<const CopyJob> jobs, std::span<const size_t> batch,
                       std::span<uint64_t> sums) {
  std::vector<ww_cuda_copy_job> copied;
  std::vector<ww_cuda_sum_job> summed;
  for (size_t i : batch) {
    const CopyJob& job = jobs[i];
    copied.push_back(
        {job.target.at, job.source.at, ToC(job.box), Number(job.from), Number(job.to)});
    summed.push_back(SumJob(job.target.at, WithTargetOnBothSides(job.box), job.to, job.to));
  }
  const auto lane = device.Borrow();
  WW_RETURN_IF_ERROR(lane->Copy(copied));
  WW_RETURN_IF_ERROR(lane->Sum(summed));
  WW_RETURN_IF_ERROR(Finish(*lane));
  for (size_t k = 0; k < batch.size(); ++k) sums[batch[k]] = lane->sums()[k];
  return OkStatus();
}

/// `run` gets a device, null for none, and indices of its jobs, as many as a lane takes at once.
template <typename DeviceOf, typename Run>
Status ForEachBatch(std::span<const CopyJob> jobs, DeviceOf&& device_of, Run&& run) {
  std::map<Device*, std::vector<size_t>> by_device;
  for (size_t i = 0; i < jobs.size(); ++i) by_device[device_of(jobs[i])].push_back(i);
  for (const auto& [device, indices] : by_device) {
    for (size_t begin = 0; begin < indices.size(); begin += Lane::kSumsMax) {
      const size_t count = std::min(Lane::kSumsMax, indices.size() - begin);
      WW_RETURN_IF_ERROR(run(device, std::span(indices).subspan(begin, count)));
    }
  }
  return OkStatus();
}

/// The lanes of two memories that are not both the host's, nor both of one device.
struct Lanes {
  Device::BorrowedLane source, target;  ///< null: host
  size_t bytes() const {
    return std::min(source ? source->bytes() : SIZE_MAX, target ? target->bytes() : SIZE_MAX);
  }
};
Lanes BorrowFor(Device* source, Device* target) {
  Lanes lanes;
  const bool source_first =
      target == nullptr || (source != nullptr && source->uuid() < target->uuid());
  if (source_first) lanes.source = source->Borrow();
  if (target != nullptr) lanes.target = target->Borrow();
  if (!source_first && source != nullptr) lanes.source = source->Borrow();
  return lanes;
}

/// Codes or scales of a matrix, and where they go.
struct Quantizing {
  Bytes target;
  ConstBytes source;
  QuantizeBox box;
  Element from;
  bool codes;
  std::optional<FourBitKind> four_bits = std::nullopt;
  int code_bytes = 1;

  /// Elements whose codes lie in one of `code_bytes`.
  int64_t Packed() const { return four_bits ? 2 * code_bytes : 1; }
  Element made() const {
    const int bytes = codes       ? code_bytes
                      : four_bits ? kernels::FourBitScaleBytes(*four_bits, from)
                                  : kernels::ScaleBytes(box.scale, from);
    return bytes == 1 ? Element::kOpaque1 : bytes == 2 ? Element::kOpaque2 : Element::kOpaque4;
  }
  int64_t Down() const { return (box.rows - 1) / box.block_rows + 1; }
  int64_t Across() const { return (box.columns - 1) / box.block_columns + 1; }
  /// What is made, packed at its source.
  StridedBox MadeBox() const {
    const int64_t* stride = codes ? box.target_stride : box.scale_stride;
    const int64_t rows = codes ? box.rows : Down();
    const int64_t columns = codes ? box.columns / Packed() : Across();
    return {2, {rows, columns}, {columns, 1}, {stride[0], stride[1]}};
  }
  size_t bytes() const {
    return static_cast<size_t>(Elements(MadeBox()) * kernels::ElementBytes(made()));
  }
};

/// Row by row, unless the rows lie together on both sides, as the kernel takes them.
void QuantizeFourBitsOnHost(std::byte* target, const Quantizing& q, const QuantizeBox& box) {
  const int64_t* stride = q.codes ? box.target_stride : box.scale_stride;
  const int64_t columns = q.MadeBox().extent[1];
  const auto make = [&](std::byte* made, const std::byte* from, int64_t rows) {
    kernels::QuantizeFourBit(q.codes ? made : nullptr, q.codes ? nullptr : made, from, rows,
                             box.columns, box.block_columns, q.from, *q.four_bits);
  };
  const bool source_packed = box.source_stride[1] == 1;
  if (source_packed && box.source_stride[0] == box.columns && stride[1] == 1 &&
      stride[0] == columns) {
    return make(target, q.source.at, box.rows);
  }
  const StridedBox gather{1, {box.columns}, {box.source_stride[1]}, {1}};
  const StridedBox scatter{1, {columns}, {1}, {stride[1]}};
  const int item = kernels::ElementBytes(q.from), made_item = kernels::ElementBytes(q.made());
  std::vector<std::byte> row(static_cast<size_t>(box.columns * item));
  std::vector<std::byte> made(static_cast<size_t>(columns * made_item));
  for (int64_t r = 0; r < box.rows; ++r) {
    const std::byte* from = q.source.at + r * box.source_stride[0] * item;
    if (!source_packed) {
      kernels::Copy(row.data(), from, gather, q.from, q.from);
      from = row.data();
    }
    make(made.data(), from, 1);
    kernels::Copy(target + r * stride[0] * made_item, made.data(), scatter, q.made(), q.made());
  }
}

void QuantizeOnHost(std::byte* target, const Quantizing& q, const QuantizeBox& box) {
  if (q.four_bits) return QuantizeFourBitsOnHost(target, q, box);
  if (q.codes) return kernels::QuantizeE4M3(target, nullptr, q.source.at, box, q.from);
  QuantizeBox read = box;
  read.target_stride[1] = read.source_stride[1];  // of no codes: rows are read where they lie
  kernels::QuantizeE4M3(nullptr, target, q.source.at, read, q.from);
}

Status QuantizeOn(Lane& lane, std::byte* target, const Quantizing& q, const QuantizeBox& box) {
  if (q.four_bits) {
    return lane.QuantizeFourBit({q.codes ? target : nullptr,
                                 q.codes ? nullptr : target,
                                 q.source.at,
                                 box.rows,
                                 box.columns,
                                 box.block_columns,
                                 {box.source_stride[0], box.source_stride[1]},
                                 {box.target_stride[0], box.target_stride[1]},
                                 {box.scale_stride[0], box.scale_stride[1]},
                                 q.code_bytes,
                                 Number(q.from),
                                 static_cast<int32_t>(*q.four_bits),
                                 1.0f});
  }
  return lane.Quantize({q.codes ? target : nullptr,
                        q.codes ? nullptr : target,
                        q.source.at,
                        box.rows,
                        box.columns,
                        box.block_rows,
                        box.block_columns,
                        {box.source_stride[0], box.source_stride[1]},
                        {box.target_stride[0], box.target_stride[1]},
                        {box.scale_stride[0], box.scale_stride[1]},
                        Number(q.from),
                        static_cast<int32_t>(box.scale)});
}

/// What is made fits the lanes: made packed at the source, carried, unpacked.
Status QuantizeAndCarry(const Quantizing& q, Lane* source_lane, Lane* target_lane) {
  const StridedBox made = q.MadeBox();
  QuantizeBox packed = q.box;
  std::copy_n(made.source_stride, 2, q.codes ? packed.target_stride : packed.scale_stride);
  const Carried carried{q.target, q.source, made, q.made(), q.made(), source_lane, target_lane};
  if (source_lane == nullptr) {
    QuantizeOnHost(target_lane->bounce(), q, packed);
  } else {
    WW_RETURN_IF_ERROR(QuantizeOn(*source_lane, source_lane->scratch(), q, packed));
  }
  WW_RETURN_IF_ERROR(Carry(carried));
  return Unpack(carried);
}

/// In parts that a lane has room for: halves of its rows of blocks, then of a row's blocks.
Status QuantizeParts(const Quantizing& q, const Lanes& lanes) {
  if (q.bytes() <= lanes.bytes()) {
    return QuantizeAndCarry(q, lanes.source.get(), lanes.target.get());
  }
  const int d = q.Down() > 1 ? 0 : 1;
  const int64_t blocks = (d == 0 ? q.Down() : q.Across()) / 2;
  if (blocks == 0) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "a block of " + std::to_string(q.bytes()) + " fp8 codes does not fit a lane of " +
                      std::to_string(lanes.bytes()) + " bytes");
  }
  const int64_t elements = blocks * (d == 0 ? q.box.block_rows : q.box.block_columns);
  Quantizing first = q, second = q;
  (d == 0 ? first.box.rows : first.box.columns) = elements;
  (d == 0 ? second.box.rows : second.box.columns) -= elements;
  const auto skipped = [](int64_t count, int64_t stride, Element element) {
    return static_cast<uint64_t>(count * stride * kernels::ElementBytes(element));
  };
  second.source = q.source + skipped(elements, q.box.source_stride[d], q.from);
  const int64_t codes = d == 0 ? elements : elements / q.Packed();
  second.target = q.target + (q.codes ? skipped(codes, q.box.target_stride[d], q.made())
                                      : skipped(blocks, q.box.scale_stride[d], q.made()));
  WW_RETURN_IF_ERROR(QuantizeParts(first, lanes));
  return QuantizeParts(second, lanes);
}

Status Quantize(const Quantizing& q) {
  if (q.target.device == nullptr && q.source.device == nullptr) {
    QuantizeOnHost(q.target.at, q, q.box);
    return OkStatus();
  }
  if (q.target.device == q.source.device) {
    const auto lane = q.target.device->Borrow();
    WW_RETURN_IF_ERROR(QuantizeOn(*lane, q.target.at, q, q.box));
    return Finish(*lane);
  }
  return QuantizeParts(q, BorrowFor(q.source.device, q.target.device));
}

uint8_t* U8(std::byte* at) { return reinterpret_cast<uint8_t*>(at); }

/// Where the scratch memory and the streams of a delta lie in a lane: offsets.
struct DeltaRoom {
  DeltaRoom(const Lane& lane, kernels::DeltaOrder order, size_t elements, size_t gap_bytes,
            size_t changes, size_t escape_count)
      : width(static_cast<size_t>(kernels::DeltaElementBytes(order))),
        escapes((lane.DeltaScratchBytes(static_cast<int32_t>(order), elements) + 15) / 16 * 16),
        gaps(escapes + escape_count * width),
        steps(gaps + gap_bytes),
        end(steps + changes) {}

  struct Stream {
    uint8_t* host;
    size_t offset, bytes;
  };
  std::array<Stream, 3> Streams(const kernels::DeltaStreams& delta) const {
    return {Stream{delta.escapes, escapes, delta.escape_count * width},
            Stream{delta.gaps, gaps, delta.gap_bytes}, Stream{delta.steps, steps, delta.changes}};
  }

  size_t width, escapes, gaps, steps, end;
};

Status DoesNotFit(const Lane& lane, const DeltaRoom& room) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                "the streams of a delta take " + std::to_string(room.end) + " bytes of a lane of " +
                    std::to_string(lane.bytes()));
}

}  // namespace

Status SumSources(std::span<const CopyJob> jobs, std::span<uint64_t> sums) {
  return ForEachBatch(
      jobs, [](const CopyJob& job) { return job.source.device; },
      [&](Device* device, std::span<const size_t> batch) -> Status {
        std::vector<ww_cuda_sum_job> summed;
        for (size_t i : batch) {
          const CopyJob& job = jobs[i];
          if (device == nullptr) {
            sums[i] = kernels::SumSource(job.source.at, job.box, job.from, job.to);
          } else {
            summed.push_back(SumJob(job.source.at, job.box, job.from, job.to));
          }
        }
        if (device == nullptr) return OkStatus();
        const auto lane = device->Borrow();
        WW_RETURN_IF_ERROR(lane->Sum(summed));
        WW_RETURN_IF_ERROR(Finish(*lane));
        for (size_t k = 0; k < batch.size(); ++k) sums[batch[k]] = lane->sums()[k];
        return OkStatus();
      });
}

Status CopyAndSumTargets(std::span<const CopyJob> jobs, std::span<uint64_t> sums) {
  return ForEachBatch(jobs, WhollyOn, [&](Device* device, std::span<const size_t> batch) -> Status {
    if (device != nullptr) return CopyAndSumOnOne(*device, jobs, batch, sums);
    for (size_t i : batch) {
      const CopyJob& job = jobs[i];
      WW_ASSIGN_OR_STATUS(sums[i],
                          CopyAndSumTarget(job.target, job.source, job.box, job.from, job.to));
    }
    return OkStatus();
  });
}

Result<uint64_t> SumSource(ConstBytes source, const StridedBox& box, Element from, Element to) {
  if (source.device == nullptr) return kernels::SumSource(source.at, box, from, to);
  const auto lane = source.device->Borrow();
  WW_FAIL_IF_ERROR(lane->Sum(SumJob(source.at, box, from, to)));
  return lane->Wait();
}

Result<uint64_t> SumTarget(ConstBytes target, const StridedBox& box, Element element) {
  if (target.device == nullptr) return kernels::SumTarget(target.at, box, element);
  return SumSource(target, WithTargetOnBothSides(box), element, element);
}

Status Copy(Bytes target, ConstBytes source, const StridedBox& box, Element from, Element to) {
  if (target.device == nullptr && source.device == nullptr) {
    kernels::Copy(target.at, source.at, box, from, to);
    return OkStatus();
  }
  if (target.device == source.device) {
    const auto lane = target.device->Borrow();
    WW_RETURN_IF_ERROR(lane->Copy({target.at, source.at, ToC(box), Number(from), Number(to)}));
    return Finish(*lane);
  }
  const Lanes lanes = BorrowFor(source.device, target.device);
  return CarryAll({target, source, box, from, to, lanes.source.get(), lanes.target.get()},
                  lanes.bytes());
}

Result<uint64_t> CopyAndSumTarget(Bytes target, ConstBytes source, const StridedBox& box,
                                  Element from, Element to) {
  if (target.device == nullptr && source.device == nullptr) {
    return kernels::CopyAndSumTarget(target.at, source.at, box, from, to);
  }
  WW_FAIL_IF_ERROR(Copy(target, source, box, from, to));
  return SumTarget(target, box, to);
}

Status QuantizeCodes(Bytes codes, ConstBytes source, const QuantizeBox& box, Element from) {
  return Quantize({codes, source, box, from, true});
}

Status QuantizeScales(Bytes scale_inv, ConstBytes source, const QuantizeBox& box, Element from) {
  return Quantize({scale_inv, source, box, from, false});
}

Status QuantizeFourBitCodes(Bytes codes, ConstBytes source, const QuantizeBox& box, Element from,
                            FourBitKind kind, int code_bytes) {
  return Quantize({codes, source, box, from, true, kind, code_bytes});
}

Status QuantizeFourBitScales(Bytes scales, ConstBytes source, const QuantizeBox& box, Element from,
                             FourBitKind kind) {
  return Quantize({scales, source, box, from, false, kind});
}

Result<bool> DeltaScan(kernels::DeltaOrder order, Bytes base, ConstBytes now, size_t elements,
                       size_t changes_max, kernels::DeltaStreams& out, bool copy) {
  WW_CHECK(base.device == now.device);
  if (base.device == nullptr) {
    return kernels::DeltaScan(order, base.at, now.at, elements, changes_max, out,
                              copy ? base.at : nullptr);
  }
  const auto lane = base.device->Borrow();
  const DeltaRoom room(*lane, order, elements, kernels::DeltaGapBytesMax(elements, changes_max),
                       changes_max + kernels::kDeltaSlack, changes_max + kernels::kDeltaSlack);
  if (room.end > lane->bytes()) return Fail(DoesNotFit(*lane, room));
  std::byte* const at = lane->scratch();
  ww_cuda_delta_scan_job job{};
  job.order = static_cast<int32_t>(order);
  job.base = base.at;
  job.now = now.at;
  job.copy = copy ? base.at : nullptr;
  job.elements = static_cast<int64_t>(elements);
  job.changes_max = static_cast<int64_t>(changes_max);
  job.gaps = U8(at + room.gaps);
  job.steps = U8(at + room.steps);
  job.escapes = U8(at + room.escapes);
  job.scratch = at;
  WW_FAIL_IF_ERROR(lane->DeltaScan(job));
  WW_FAIL_IF_ERROR(Finish(*lane));
  out.gap_bytes = lane->sums()[0];
  out.changes = lane->sums()[1];
  out.escape_count = lane->sums()[2];
  if (out.changes > changes_max) return false;
  for (const auto& [into, offset, bytes] : room.Streams(out)) {
    if (bytes > 0) {
      WW_FAIL_IF_ERROR(lane->CopyBytes(lane->bounce() + offset, at + offset, bytes));
    }
  }
  WW_FAIL_IF_ERROR(Finish(*lane));
  for (const auto& [into, offset, bytes] : room.Streams(out)) {
    if (bytes > 0) std::memcpy(into, lane->bounce() + offset, bytes);
  }
  return true;
}

Result<bool> DeltaApply(kernels::DeltaOrder order, Bytes target, size_t elements,
                        const kernels::DeltaStreams& delta) {
  if (target.device == nullptr) return kernels::DeltaApply(order, target.at, elements, delta);
  // More than that ends nowhere within the array, and has no room in the scratch memory.
  if (delta.changes > elements || delta.escape_count > delta.changes ||
      delta.gap_bytes > delta.changes + elements / kernels::kDeltaGapMax) {
    return false;
  }
  const auto lane = target.device->Borrow();
  const DeltaRoom room(*lane, order, elements, delta.gap_bytes, delta.changes, delta.escape_count);
  if (room.end > lane->bytes()) return Fail(DoesNotFit(*lane, room));
  std::byte* const at = lane->scratch();
  for (const auto& [from, offset, bytes] : room.Streams(delta)) {
    if (bytes == 0) continue;
    std::memcpy(lane->bounce() + offset, from, bytes);
    WW_FAIL_IF_ERROR(lane->CopyBytes(at + offset, lane->bounce() + offset, bytes));
  }
  ww_cuda_delta_apply_job job{};
  job.order = static_cast<int32_t>(order);
  job.target = target.at;
  job.elements = static_cast<int64_t>(elements);
  job.gaps = U8(at + room.gaps);
  job.steps = U8(at + room.steps);
  job.escapes = U8(at + room.escapes);
  job.counts = {static_cast<int64_t>(delta.gap_bytes), static_cast<int64_t>(delta.changes),
                static_cast<int64_t>(delta.escape_count)};
  job.scratch = at;
  WW_FAIL_IF_ERROR(lane->DeltaApply(job));
  WW_ASSIGN(const uint64_t applied, lane->Wait());
  return static_cast<uint32_t>(applied) != 0;
}

Status CopyRun(Bytes target, ConstBytes source, uint64_t bytes) {
  if (bytes == 0) return OkStatus();
  const StridedBox box{1, {static_cast<int64_t>(bytes)}, {1}, {1}};
  return Copy(target, source, box, Element::kOpaque1, Element::kOpaque1);
}

}  // namespace weightwire::device
