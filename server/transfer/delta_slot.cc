#include "server/transfer/delta_slot.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <string>

#include "server/base/checked.h"
#include "server/delta/coder.h"
#include "server/transfer/segment_copy.h"

namespace weightwire::transfer {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as in memory");

constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeadBytes = 16;

template <typename T>
void Put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}
template <typename T>
T Get(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

/// Where things lie in a SlotDelta of so many segments and links.
struct Layout {
  uint64_t segments = 0, links = 0;
  uint64_t link_bytes() const { return 8 * segments + RoundUp(4 * segments, 8); }
  uint64_t sum(uint64_t i) const { return kHeadBytes + 8 * i; }
  uint64_t from(uint64_t link, uint64_t i) const {
    return sum(segments) + link * link_bytes() + 8 * i;
  }
  uint64_t size(uint64_t link, uint64_t i) const { return from(link, segments) + 4 * i; }
  uint64_t codes() const { return from(links, 0); }
};

/// A SlotDelta of which the first bytes were read; nothing about it is trusted but that.
class Read {
 public:
  static Result<Read> Of(std::span<const std::byte> bytes, uint32_t segments) {
    const auto malformed = [](const char* what) {
      return Fail(Code::kDataLoss, Reason::kInvalidRequest,
                  std::string("what changed in a slot cannot be read: ") + what);
    };
    if (bytes.size() < kHeadBytes) return malformed("it is shorter than its head");
    if (Get<uint32_t>(bytes.data()) != kVersion) return malformed("it has another version");
    if (Get<uint32_t>(bytes.data() + 4) != segments) return malformed("it is of another slot");
    Read read;
    read.bytes_ = bytes;
    read.layout_ = {segments, Get<uint32_t>(bytes.data() + 8)};
    if (Get<uint32_t>(bytes.data() + 12) != 0) return malformed("reserved bits are set");
    if (read.layout_.links > bytes.size() || read.layout_.codes() > bytes.size()) {
      return malformed("its tables are longer than it is");
    }
    // Each code begins where the one before it ends.
    read.begin_.resize(read.layout_.links * segments);
    uint64_t at = read.layout_.codes();
    for (uint64_t link = 0; link < read.layout_.links; ++link) {
      for (uint32_t i = 0; i < segments; ++i) {
        read.begin_[link * segments + i] = at;
        at += read.SizeOf(link, i);
      }
    }
    return read;
  }
  uint64_t links() const { return layout_.links; }
  uint64_t SumOf(uint32_t i) const { return Get<uint64_t>(bytes_.data() + layout_.sum(i)); }
  uint64_t FromOf(uint64_t link, uint32_t i) const {
    return Get<uint64_t>(bytes_.data() + layout_.from(link, i));
  }
  uint32_t SizeOf(uint64_t link, uint32_t i) const {
    return Get<uint32_t>(bytes_.data() + layout_.size(link, i));
  }
  /// Empty where it was not read.
  std::span<const std::byte> CodeOf(uint64_t link, uint32_t i) const {
    const uint64_t begin = begin_[link * layout_.segments + i];
    const uint64_t size = SizeOf(link, i);
    if (begin > bytes_.size() || size > bytes_.size() - begin) return {};
    return bytes_.subspan(begin, size);
  }

 private:
  std::span<const std::byte> bytes_;
  Layout layout_;
  std::vector<uint64_t> begin_;
};

/// The link from which on a segment can be made, of what is here or served.
struct Start {
  uint64_t link = 0;
  bool served = false;
};
std::optional<Start> StartOf(const Read& read, uint32_t i, const KeptSums& kept) {
  for (uint64_t link = 0; link < read.links() && read.SizeOf(link, i) > 0; ++link) {
    const uint64_t from = read.FromOf(link, i);
    if (from == Kept::kUnknown) continue;
    if (!kept.here.empty() && kept.here[i] == from) return Start{link, false};
    if (!kept.served.empty() && kept.served[i] == from) return Start{link, true};
  }
  return std::nullopt;
}

/// All of a segment's bytes at the target, where they lie together in the host's memory.
std::optional<std::span<std::byte>> WholeOf(const SegmentCopy& copy, device::Bytes target,
                                            uint64_t bytes) {
  if (target.device != nullptr) return std::nullopt;
  const kernels::StridedBox box = kernels::Normalize(kernels::WithPackedSource(copy.box));
  const int64_t run = kernels::TargetRunBytes(box, kernels::ElementBytes(copy.to));
  if (run != static_cast<int64_t>(bytes)) return std::nullopt;
  return std::span(target.at, bytes);
}

/// The sums of what is served where a slot's segments belong.
KeptSums ServedSumsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      const plan::SlotSpan& span, const Binding& served,
                      const std::atomic<bool>& stop) {
  KeptSums sums;
  sums.served.resize(span.segment_count, Kept::kUnknown);
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    if (stop.load(std::memory_order_relaxed)) break;
    const auto [op, segment, copy] = PartsOf(stream, schedule, span.first_segment + i);
    const device::Bytes at = served[op.target_tensor].at() + copy.target_offset;
    sums.served[i] = device::SumTarget(at, copy.box, copy.to).value_or(Kept::kUnknown);
  }
  return sums;
}

/// Makes segment `i`, of the bytes at `from` and the codes from `link` on, at the target; the sum
/// of what lies there then.
Result<uint64_t> Make(const Read& read, uint32_t i, uint64_t link, kernels::DeltaOrder order,
                      const SegmentCopy& copy, uint64_t size, device::Bytes target,
                      device::Bytes from, delta::Coder& coder, std::vector<std::byte>& scratch) {
  const auto whole = WholeOf(copy, target, size);
  const bool moves = from.at != target.at;
  if (whole && moves && link == 0 && from.device == nullptr) {
    return coder.ApplyTo(order, read.CodeOf(0, i), std::span(from.at, size), *whole);
  }
  if (!whole && scratch.size() < size) scratch.resize(size);
  const std::span<std::byte> made = whole ? *whole : std::span(scratch).first(size);
  if (!whole) {
    const kernels::StridedBox box =
        kernels::WithPackedTarget(kernels::WithTargetOnBothSides(copy.box));
    WW_FAIL_IF_ERROR(device::Copy({made.data()}, from, box, copy.to, copy.to));
  } else if (moves) {
    WW_FAIL_IF_ERROR(device::CopyRun({made.data()}, from, size));
  }
  for (uint64_t next = link + 1; next-- > 0;) {
    WW_FAIL_IF_ERROR(coder.Apply(order, read.CodeOf(next, i), made));
  }
  if (whole) return device::SumTarget(target, copy.box, copy.to);
  return device::CopyAndSumTarget(target, {made.data()}, kernels::WithPackedSource(copy.box),
                                  copy.to, copy.to);
}

}  // namespace

// ---- source ------------------------------------------------------------------------------------

uint64_t SlotDeltaMaker::Add(uint32_t i, std::span<const std::byte> packed,
                             std::optional<uint64_t> sum) {
  const uint32_t segment = span_.first_segment + i;
  const plan::CopyOp& op = stream_.ops[schedule_.segments[segment].op_index];
  return base_.Update(segment, delta::OrderOf(op.target_dtype), packed, sum, *coder_);
}

std::span<std::byte> SlotDeltaMaker::Scratch(uint64_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return std::span(scratch_).first(bytes);
}

std::optional<SlotDelta> SlotDeltaMaker::Finish(std::span<const uint64_t> sums) const {
  Layout layout{span_.segment_count, 0};
  for (uint32_t i = 0; i < span_.segment_count; ++i) {
    layout.links = std::max<uint64_t>(layout.links, base_.links(span_.first_segment + i).size());
  }
  if (layout.links == 0) return std::nullopt;
  // As many links as there is room for.
  std::vector<uint64_t> code_bytes(layout.links);
  for (uint32_t i = 0; i < span_.segment_count; ++i) {
    const auto& links = base_.links(span_.first_segment + i);
    for (size_t link = 0; link < links.size(); ++link) code_bytes[link] += links[link].code->size();
  }
  const auto bytes_with = [&](uint64_t links) {
    return std::accumulate(code_bytes.begin(), code_bytes.begin() + static_cast<ptrdiff_t>(links),
                           Layout{layout.segments, links}.codes());
  };
  const auto most = SlotDeltaBytesMax(span_);
  while (layout.links > 1 && bytes_with(layout.links) > most) --layout.links;
  const uint64_t bytes = bytes_with(layout.links);
  const uint64_t newest = layout.codes() + code_bytes[0];
  if (newest >= static_cast<uint64_t>(span_.bytes) || bytes > most) return std::nullopt;
  auto region = coders_.Region(bytes);
  if (!region) return std::nullopt;  // the slot is there as it is
  std::byte* const to = region->data();
  Put(to, kVersion);
  Put(to + 4, span_.segment_count);
  Put(to + 8, static_cast<uint32_t>(layout.links));
  Put(to + 12, uint32_t{0});
  std::memcpy(to + layout.sum(0), sums.data(), sums.size_bytes());
  std::memset(to + layout.from(0, 0), 0, layout.codes() - layout.from(0, 0));
  uint64_t at = layout.codes();
  for (uint64_t link = 0; link < layout.links; ++link) {
    for (uint32_t i = 0; i < span_.segment_count; ++i) {
      const auto& links = base_.links(span_.first_segment + i);
      if (link >= links.size()) continue;
      const std::vector<std::byte>& code = *links[link].code;
      Put(to + layout.from(link, i), links[link].from);
      Put(to + layout.size(link, i), static_cast<uint32_t>(code.size()));
      std::memcpy(to + at, code.data(), code.size());
      at += code.size();
    }
  }
  return SlotDelta{std::move(region), static_cast<uint32_t>(newest), static_cast<uint32_t>(bytes)};
}

// ---- target ------------------------------------------------------------------------------------

bool DeltaTaken::wants_older() const {
  return std::ranges::find(segments, Segment::kOlder) != segments.end();
}

DeltaTaken TakeDelta(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                     uint32_t slot, std::span<const std::byte> bytes, KeptSums& kept,
                     const Binding& served, const Binding& binding, DeltaCoders& coders,
                     const std::atomic<bool>& stop, DeltaTaken taken) {
  using Segment = DeltaTaken::Segment;
  const plan::SlotSpan& span = schedule.slots[slot];
  const auto read = Read::Of(bytes, span.segment_count);
  if (!read) {
    taken.status = read.error();
    return taken;
  }
  taken.mismatches = 0;
  if (kept.empty() && !served.empty()) {
    kept = ServedSumsOf(stream, schedule, span, served, stop);
  }
  if (taken.segments.empty()) {
    taken.segments.resize(span.segment_count, Segment::kOlder);
    taken.expected.resize(span.segment_count);
    for (uint32_t i = 0; i < span.segment_count; ++i) taken.expected[i] = read->SumOf(i);
    const std::vector<bool> here =
        TakeKept(stream, schedule, slot, kept, taken.expected, served, binding, stop);
    for (uint32_t i = 0; i < here.size(); ++i) {
      if (here[i]) taken.segments[i] = Segment::kKept;
    }
  }
  const DeltaCoders::Lease coder = coders.Take();
  std::vector<std::byte> scratch;
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    // Not what came out wrong in an earlier call: what it could be made of may be gone.
    if (taken.segments[i] != Segment::kOlder) continue;
    taken.segments[i] = Segment::kUnread;
    if (stop.load(std::memory_order_relaxed)) continue;
    const auto start = StartOf(*read, i, kept);
    if (!start) continue;
    if (read->CodeOf(start->link, i).empty()) {
      taken.segments[i] = Segment::kOlder;
      continue;
    }
    const auto [op, segment, copy] = PartsOf(stream, schedule, span.first_segment + i);
    const kernels::DeltaOrder order = delta::OrderOf(op.target_dtype);
    const auto size = static_cast<uint64_t>(segment.bytes);
    const device::Bytes target = binding[op.target_tensor].at() + copy.target_offset;
    const device::Bytes from =
        start->served ? served[op.target_tensor].at() + copy.target_offset : target;
    const auto sum = Make(*read, i, start->link, order, copy, size, target, from, *coder, scratch);
    if (!sum || *sum != taken.expected[i]) {
      ++taken.mismatches;
      continue;
    }
    taken.segments[i] = Segment::kMade;
    taken.changes += delta::ChangesOf(read->CodeOf(0, i));
    taken.elements += segment.bytes / kernels::DeltaElementBytes(order);
  }
  return taken;
}

}  // namespace weightwire::transfer
