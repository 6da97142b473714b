#include "server/device/bytes.h"

#include <algorithm>
#include <map>
#include <vector>

// A copy is: pack at the source (its device's kernel, or the host's), carry the packed elements,
// which have the target's kind by then, and unpack at the target. Within one device it is one
// kernel.
namespace weightwire::device {
namespace {

using kernels::Element;
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
  Device::BorrowedLane source_lane, target_lane;
  const bool source_first =
      target.device == nullptr ||
      (source.device != nullptr && source.device->uuid() < target.device->uuid());
  if (source_first) source_lane = source.device->Borrow();
  if (target.device != nullptr) target_lane = target.device->Borrow();
  if (!source_first && source.device != nullptr) source_lane = source.device->Borrow();
  const size_t bytes_max = std::min(source_lane ? source_lane->bytes() : SIZE_MAX,
                                    target_lane ? target_lane->bytes() : SIZE_MAX);
  return CarryAll({target, source, box, from, to, source_lane.get(), target_lane.get()}, bytes_max);
}

Result<uint64_t> CopyAndSumTarget(Bytes target, ConstBytes source, const StridedBox& box,
                                  Element from, Element to) {
  if (target.device == nullptr && source.device == nullptr) {
    return kernels::CopyAndSumTarget(target.at, source.at, box, from, to);
  }
  WW_FAIL_IF_ERROR(Copy(target, source, box, from, to));
  return SumTarget(target, box, to);
}

Status CopyRun(Bytes target, ConstBytes source, uint64_t bytes) {
  if (bytes == 0) return OkStatus();
  const StridedBox box{1, {static_cast<int64_t>(bytes)}, {1}, {1}};
  return Copy(target, source, box, Element::kOpaque1, Element::kOpaque1);
}

}  // namespace weightwire::device
