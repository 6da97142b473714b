#include "server/wire/slice.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/base/checked.h"
#include "server/plan/quantization.h"
#include "server/wire/checks.h"
#include "server/wire/layout.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

/// More than one entry adds to its part beyond its own bytes (tag and length, twice for an op whose
/// stream grows with it).
constexpr size_t kEntryOverhead = 16;
/// More than a stream adds besides its ops, or a header.
constexpr size_t kStreamOverhead = 96;

template <typename Repeated>
void SetList(const std::vector<int64_t>& list, Repeated* out) {
  out->Assign(list.begin(), list.end());
}

void SetOp(const plan::CopyOp& op, v1::CopyOp* out) {
  out->set_canonical(op.canonical);
  out->set_source_tensor(op.source_tensor);
  out->set_target_tensor(op.target_tensor);
  out->set_source_dtype(ToProto(op.source_dtype));
  out->set_target_dtype(ToProto(op.target_dtype));
  SetList(op.extent, out->mutable_extent());
  out->set_source_offset(op.source_offset);
  SetList(op.source_stride, out->mutable_source_stride());
  out->set_target_offset(op.target_offset);
  SetList(op.target_stride, out->mutable_target_stride());
  out->set_makes(static_cast<v1::Makes>(plan::MakesNumber(op)));
  SetList(op.block, out->mutable_block());
  SetList(op.source_extent, out->mutable_source_extent());
}

/// The farthest element of a strided block must have an index.
Status CheckReach(std::string_view field, const std::vector<int64_t>& extent, int64_t offset,
                  const std::vector<int64_t>& stride) {
  if (offset < 0) return Bad(field, "negative offset");
  int64_t reach = offset;
  for (size_t d = 0; d < extent.size(); ++d) {
    int64_t span;
    if (stride[d] < 1) return Bad(field, "a stride is below 1");
    if (__builtin_mul_overflow(extent[d] - 1, stride[d], &span) ||
        __builtin_add_overflow(reach, span, &reach)) {
      return Bad(field, "the block reaches beyond 2^63 elements");
    }
  }
  return OkStatus();
}

Result<plan::CopyOp> OpFromProto(const v1::CopyOp& op, size_t name_count) {
  plan::CopyOp out;
  if (op.canonical() >= name_count) return Fail(Bad("op.canonical", "names no tensor"));
  out.canonical = op.canonical();
  out.source_tensor = op.source_tensor();
  out.target_tensor = op.target_tensor();
  WW_ASSIGN(out.source_dtype, FromProto("op.source_dtype", op.source_dtype()));
  WW_ASSIGN(out.target_dtype, FromProto("op.target_dtype", op.target_dtype()));
  WW_FAIL_IF_ERROR(CheckCount("op.extent", op.extent_size(), layout::kMaxDims));
  if (op.source_stride_size() != op.extent_size() || op.target_stride_size() != op.extent_size()) {
    return Fail(Bad("op", "extent and strides must be equally long"));
  }
  out.extent.assign(op.extent().begin(), op.extent().end());
  out.source_offset = op.source_offset();
  out.source_stride.assign(op.source_stride().begin(), op.source_stride().end());
  out.target_offset = op.target_offset();
  out.target_stride.assign(op.target_stride().begin(), op.target_stride().end());
  for (int64_t extent : out.extent) {
    if (extent < 1) return Fail(Bad("op.extent", "below 1"));
  }
  if (!plan::SetMakes(op.makes(), out)) return Fail(UnknownEnum("op.makes", op.makes()));
  WW_FAIL_IF_ERROR(CheckCount("op.block", op.block_size(), layout::kMaxDims));
  WW_FAIL_IF_ERROR(CheckCount("op.source_extent", op.source_extent_size(), layout::kMaxDims));
  out.block.assign(op.block().begin(), op.block().end());
  out.source_extent.assign(op.source_extent().begin(), op.source_extent().end());
  if (const auto defect = plan::QuantizationDefect(out)) return Fail(Bad("op", *defect));
  WW_FAIL_IF_ERROR(
      CheckReach("op.source", plan::SourceExtent(out), out.source_offset, out.source_stride));
  WW_FAIL_IF_ERROR(CheckReach("op.target", out.extent, out.target_offset, out.target_stride));
  return out;
}

/// Whether a text may be cut before this byte: UTF-8 goes on with 10xxxxxx.
bool BeginsCharacter(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

/// Bytes that `name` may leave off because `before` begins with them, too.
size_t SharedBytes(std::string_view before, std::string_view name) {
  const auto differ = std::ranges::mismatch(before, name);
  auto shared = static_cast<size_t>(differ.in2 - name.begin());
  const auto cuts = [&](std::string_view text) {
    return shared == text.size() || BeginsCharacter(text[shared]);
  };
  while (shared > 0 && !(cuts(before) && cuts(name))) --shared;
  return shared;
}

/// Bytes of a checked op on the wire; nullopt when they do not fit.
std::optional<int64_t> BytesOf(const plan::CopyOp& op) {
  auto elements = CheckedProduct(op.extent);
  int64_t bytes;
  if (!elements ||
      __builtin_mul_overflow(*elements, layout::ElementBytes(op.target_dtype), &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

}  // namespace

v1::PlanId ToProto(const PlanId& id) {
  v1::PlanId out;
  out.set_high(id.high);
  out.set_low(id.low);
  return out;
}

PlanId FromProto(const v1::PlanId& id) { return {id.high(), id.low()}; }

Result<plan::Side> FromProto(std::string_view field, v1::Side side) {
  if (side == v1::SIDE_SOURCE) return plan::Side::kSource;
  if (side == v1::SIDE_TARGET) return plan::Side::kTarget;
  return Fail(UnknownEnum(field, side));
}

SliceWriter::SliceWriter(std::shared_ptr<const plan::RankSlice> slice, size_t part_bytes_max,
                         bool names_shared)
    : slice_(std::move(slice)), part_bytes_max_(part_bytes_max), names_shared_(names_shared) {
  WW_CHECK(part_bytes_max_ >= 4096);
}

bool SliceWriter::done() const {
  return started_ && name_ == slice_->tensor_names.size() && stream_ == slice_->streams.size() &&
         made_ == slice_->gathered.made.size();
}

bool SliceWriter::Next(v1::SlicePart* part) {
  if (done()) return false;
  part->Clear();
  size_t bytes = kStreamOverhead;
  if (!started_) {
    v1::SlicePart::Header* header = part->mutable_header();
    *header->mutable_plan() = ToProto(slice_->plan);
    header->set_side(static_cast<v1::Side>(slice_->side));
    header->set_rank(slice_->rank);
    header->set_stream_count(static_cast<uint32_t>(slice_->streams.size()));
    header->set_name_count(static_cast<uint32_t>(slice_->tensor_names.size()));
    if (const plan::GatherBuffer& gathered = slice_->gathered; gathered.elements > 0) {
      header->set_gathered_dtype(ToProto(gathered.dtype));
      header->set_gathered_elements(gathered.elements);
      header->set_made_count(gathered.made.size());
    }
    started_ = true;
  }
  AddNames(part, &bytes);
  if (name_ == slice_->tensor_names.size()) AddOps(part, &bytes);
  if (name_ == slice_->tensor_names.size() && stream_ == slice_->streams.size()) {
    AddMade(part, &bytes);
  }
  return true;
}

void SliceWriter::AddNames(v1::SlicePart* part, size_t* bytes) {
  for (; name_ < slice_->tensor_names.size(); ++name_) {
    const std::string& name = slice_->tensor_names[name_];
    const size_t shared =
        names_shared_ && name_ > 0 ? SharedBytes(slice_->tensor_names[name_ - 1], name) : 0;
    *bytes += name.size() - shared + kEntryOverhead;
    if (*bytes > part_bytes_max_ && part->tensor_names_size() > 0) return;
    part->add_tensor_names(name.substr(shared));
    if (names_shared_) part->add_names_shared(static_cast<uint32_t>(shared));
  }
}

void SliceWriter::AddOps(v1::SlicePart* part, size_t* bytes) {
  v1::CopyOp op;
  for (; stream_ < slice_->streams.size(); ++stream_, op_ = 0) {
    const plan::Stream& stream = slice_->streams[stream_];
    *bytes += kStreamOverhead;
    if (*bytes > part_bytes_max_) return;
    v1::SlicePart::Stream* out = part->add_streams();
    out->set_id(stream.id);
    out->set_source_rank(stream.source_rank);
    out->set_target_rank(stream.target_rank);
    out->set_bytes(stream.bytes);
    out->set_op_count(stream.ops.size());
    for (; op_ < stream.ops.size(); ++op_) {
      op.Clear();
      SetOp(stream.ops[op_], &op);
      *bytes += op.ByteSizeLong() + kEntryOverhead;
      if (*bytes > part_bytes_max_) return;
      *out->add_ops() = op;
    }
  }
}

void SliceWriter::AddMade(v1::SlicePart* part, size_t* bytes) {
  v1::CopyOp op;
  for (; made_ < slice_->gathered.made.size(); ++made_) {
    op.Clear();
    SetOp(slice_->gathered.made[made_], &op);
    *bytes += op.ByteSizeLong() + kEntryOverhead;
    if (*bytes > part_bytes_max_) return;
    *part->add_made() = op;
  }
}

Status SliceReader::Add(const v1::SlicePart& part) {
  if (failed_.ok()) failed_ = AddChecked(part);
  return failed_;
}

Status SliceReader::AddChecked(const v1::SlicePart& part) {
  if (part.has_header()) {
    WW_RETURN_IF_ERROR(AddHeader(part.header()));
  } else if (!header_) {
    return Bad("slice", "the first part has no header");
  }
  WW_RETURN_IF_ERROR(AddNames(part));
  for (const v1::SlicePart::Stream& stream : part.streams()) {
    if (!slice_.gathered.made.empty()) return Bad("slice.streams", "come before what is made");
    WW_RETURN_IF_ERROR(AddStream(stream));
  }
  for (const v1::CopyOp& op : part.made()) WW_RETURN_IF_ERROR(AddMade(op));
  return OkStatus();
}

Status SliceReader::AddNames(const v1::SlicePart& part) {
  const bool whole = part.names_shared_size() == 0;
  if (!whole && part.names_shared_size() != part.tensor_names_size()) {
    return Bad("slice.names_shared", "must be as many as names");
  }
  for (int i = 0; i < part.tensor_names_size(); ++i) {
    if (!slice_.streams.empty()) return Bad("slice.tensor_names", "come before the streams");
    if (slice_.tensor_names.size() == header_->name_count()) {
      return Bad("slice.tensor_names", "more than announced");
    }
    std::string name;
    if (const uint32_t shared = whole ? 0 : part.names_shared(i); shared > 0) {
      const std::string_view before =
          slice_.tensor_names.empty() ? std::string_view() : slice_.tensor_names.back();
      if (shared > before.size() || (shared < before.size() && !BeginsCharacter(before[shared]))) {
        return Bad("slice.names_shared", "is no beginning of the name before");
      }
      name = before.substr(0, shared);
    }
    name += part.tensor_names(i);
    WW_RETURN_IF_ERROR(CheckText("slice.tensor_names", name, kNameBytesMax));
    // What was left off need not have been sent, and takes memory all the same.
    WW_RETURN_IF_ERROR(
        CheckCount("slice.tensor_names", name_bytes_ += name.size(), kSliceNameBytesMax));
    slice_.tensor_names.push_back(std::move(name));
  }
  return OkStatus();
}

Status SliceReader::AddHeader(const v1::SlicePart::Header& header) {
  if (header_) return Bad("slice.header", "came twice");
  WW_RETURN_IF_ERROR(CheckCount("slice.stream_count", header.stream_count(), kSliceStreamsMax));
  WW_RETURN_IF_ERROR(CheckCount("slice.name_count", header.name_count(), kTensorsMax));
  WW_ASSIGN_OR_STATUS(slice_.side, FromProto("slice.side", header.side()));
  slice_.plan = FromProto(header.plan());
  slice_.rank = header.rank();
  header_ = header;
  if (header.gathered_elements() == 0) {
    if (header.made_count() == 0) return OkStatus();
    return Bad("slice.made_count", "something is made of nothing");
  }
  if (header.gathered_elements() < 0) return Bad("slice.gathered_elements", "below 0");
  if (slice_.side != plan::Side::kTarget) return Bad("slice.gathered_elements", "at a source");
  if (header.made_count() == 0) return Bad("slice.made_count", "nothing is made");
  slice_.gathered.elements = header.gathered_elements();
  WW_ASSIGN_OR_STATUS(slice_.gathered.dtype,
                      FromProto("slice.gathered_dtype", header.gathered_dtype()));
  return OkStatus();
}

Status SliceReader::AddMade(const v1::CopyOp& op) {
  if (slice_.streams.size() != header_->stream_count()) {
    return Bad("slice.made", "comes behind the last stream");
  }
  if (slice_.gathered.made.empty()) WW_RETURN_IF_ERROR(EndStream());
  if (slice_.gathered.made.size() == header_->made_count()) {
    return Bad("slice.made", "more than announced");
  }
  WW_RETURN_IF_ERROR(CheckCount("slice.made", ++ops_total_, kSliceOpsMax));
  WW_ASSIGN_OR_STATUS(plan::CopyOp made, OpFromProto(op, slice_.tensor_names.size()));
  if (made.transform == plan::Transform::kElements) return Bad("slice.made", "makes nothing");
  if (!BytesOf(made)) return Bad("slice.made", "bytes do not fit");
  slice_.gathered.made.push_back(std::move(made));
  return OkStatus();
}

Status SliceReader::AddStream(const v1::SlicePart::Stream& stream) {
  if (slice_.tensor_names.size() != header_->name_count()) {
    return Bad("slice.tensor_names", "fewer than announced");
  }
  const bool goes_on = !slice_.streams.empty() && slice_.streams.back().id == stream.id();
  if (!goes_on) {
    WW_RETURN_IF_ERROR(EndStream());
    if (!slice_.streams.empty() && stream.id() < slice_.streams.back().id) {
      return Bad("slice.streams.id", "not in rising order");
    }
    if (slice_.streams.size() == header_->stream_count()) {
      return Bad("slice.streams", "more than announced");
    }
    const uint32_t own =
        slice_.side == plan::Side::kSource ? stream.source_rank() : stream.target_rank();
    if (own != slice_.rank) return Bad("slice.streams", "a stream of another rank");
    slice_.streams.push_back(
        {stream.id(), stream.source_rank(), stream.target_rank(), stream.bytes(), {}});
    ops_announced_ = stream.op_count();
    bytes_seen_ = 0;
  }
  plan::Stream& out = slice_.streams.back();
  if (out.source_rank != stream.source_rank() || out.target_rank != stream.target_rank() ||
      out.bytes != stream.bytes() || ops_announced_ != stream.op_count()) {
    return Bad("slice.streams", "parts of one stream disagree");
  }
  ops_total_ += stream.ops_size();
  WW_RETURN_IF_ERROR(CheckCount("slice.streams.ops", ops_total_, kSliceOpsMax));
  for (const v1::CopyOp& op : stream.ops()) {
    if (out.ops.size() == ops_announced_) return Bad("slice.streams.ops", "more than announced");
    WW_ASSIGN_OR_STATUS(plan::CopyOp copy, OpFromProto(op, slice_.tensor_names.size()));
    const auto bytes = BytesOf(copy);
    if (!bytes || __builtin_add_overflow(bytes_seen_, *bytes, &bytes_seen_)) {
      return Bad("slice.streams.ops", "bytes do not fit");
    }
    out.ops.push_back(std::move(copy));
  }
  return OkStatus();
}

Status SliceReader::EndStream() const {
  if (slice_.streams.empty()) return OkStatus();
  const plan::Stream& last = slice_.streams.back();
  if (last.ops.empty() || last.ops.size() != ops_announced_) {
    return Bad("slice.streams.ops", "fewer than announced, or none");
  }
  if (last.bytes != bytes_seen_) return Bad("slice.streams.bytes", "not the sum of its ops");
  return OkStatus();
}

Result<plan::RankSlice> SliceReader::Finish() {
  WW_FAIL_IF_ERROR(Status(failed_));
  if (!header_) return Fail(Bad("slice", "empty"));
  WW_FAIL_IF_ERROR(EndStream());
  if (slice_.streams.size() != header_->stream_count() ||
      slice_.tensor_names.size() != header_->name_count() ||
      slice_.gathered.made.size() != header_->made_count()) {
    return Fail(Bad("slice", "streams, names or what is made are missing"));
  }
  failed_ = Bad("slice", "was finished");
  return std::move(slice_);
}

}  // namespace weightwire::wire
