#include "server/delta/coder.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "server/base/checked.h"

namespace weightwire::delta {
namespace {

using kernels::DeltaOrder;
using kernels::DeltaStreams;

constexpr uint8_t kVersion = 1;
/// Its Huffman stage does the work. The streams have no repetitions but by chance, and to refer
/// back to one takes more bits than its bytes: so hardly any is looked for.
constexpr std::pair<ZSTD_cParameter, int> kParameters[] = {
    {ZSTD_c_compressionLevel, 1}, {ZSTD_c_hashLog, 6}, {ZSTD_c_minMatch, 7}};
constexpr size_t kStreams = 3;

struct Header {
  uint8_t version = kVersion;
  uint8_t order = 0;
  uint8_t plain = 0;
  uint8_t zero = 0;
  uint32_t elements = 0;
  uint32_t changes = 0;
  uint32_t gap_bytes = 0;
  uint32_t escapes = 0;
  std::array<uint32_t, kStreams> stored{};
};

void PutU32(std::byte* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}
uint32_t TakeU32(const std::byte* at) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(at[i]) << (8 * i);
  return value;
}

void Write(const Header& header, std::byte* at) {
  at[0] = static_cast<std::byte>(header.version);
  at[1] = static_cast<std::byte>(header.order);
  at[2] = static_cast<std::byte>(header.plain);
  at[3] = static_cast<std::byte>(header.zero);
  PutU32(at + 4, header.elements);
  PutU32(at + 8, header.changes);
  PutU32(at + 12, header.gap_bytes);
  PutU32(at + 16, header.escapes);
  for (size_t i = 0; i < kStreams; ++i) PutU32(at + 20 + 4 * i, header.stored[i]);
}

Header Read(const std::byte* at) {
  Header header;
  header.version = static_cast<uint8_t>(at[0]);
  header.order = static_cast<uint8_t>(at[1]);
  header.plain = static_cast<uint8_t>(at[2]);
  header.zero = static_cast<uint8_t>(at[3]);
  header.elements = TakeU32(at + 4);
  header.changes = TakeU32(at + 8);
  header.gap_bytes = TakeU32(at + 12);
  header.escapes = TakeU32(at + 16);
  for (size_t i = 0; i < kStreams; ++i) header.stored[i] = TakeU32(at + 20 + 4 * i);
  return header;
}

Status Malformed(const char* what) {
  return Status(Code::kDataLoss, Reason::kInvalidRequest,
                std::string("the code of a delta is damaged: ") + what)
      .Remedy("send the block as it is");
}

Status DoNotFit() { return Malformed("its streams do not end within the block"); }

/// Items of `width` bytes ↔ all their first bytes, then all their second ones …
void ToPlanes(const uint8_t* items, size_t count, size_t width, uint8_t* planes) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < width; ++byte) planes[byte * count + i] = items[i * width + byte];
  }
}
void FromPlanes(const uint8_t* planes, size_t count, size_t width, uint8_t* items) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < width; ++byte) items[i * width + byte] = planes[byte * count + i];
  }
}

/// Most steps are ±1. A pair has some four bits of content where a single one has less than two,
/// which a code of whole bits cannot follow.
size_t PairsOf(size_t steps) { return (steps + 1) / 2; }
void ToPairs(const uint8_t* steps, size_t count, uint8_t* pairs) {
  for (size_t i = 0; i + 1 < count; i += 2) {
    pairs[i / 2] = static_cast<uint8_t>(steps[i] | steps[i + 1] << 4);
  }
  if (count % 2 != 0) pairs[count / 2] = steps[count - 1];
}
void FromPairs(const uint8_t* pairs, size_t count, uint8_t* steps) {
  for (size_t i = 0; i < count / 2; ++i) {
    steps[2 * i] = pairs[i] & 15;
    steps[2 * i + 1] = static_cast<uint8_t>(pairs[i] >> 4);
  }
  if (count % 2 != 0) steps[count - 1] = pairs[count / 2] & 15;
}

}  // namespace

struct Coder::Scratch {
  explicit Scratch(size_t block_bytes)
      // One byte each of gaps and steps for an element of one byte; wider ones take less.
      : gaps(kernels::DeltaGapBytesMax(block_bytes, block_bytes)),
        steps(block_bytes + kernels::kDeltaSlack),
        escapes(block_bytes + kernels::kDeltaSlack * sizeof(uint64_t)),
        pairs(PairsOf(steps.size())),
        planes(escapes.size()),
        code(kHeaderBytes + block_bytes) {
    WW_CHECK(compressor != nullptr && decompressor != nullptr);
    for (const auto& [parameter, value] : kParameters) {
      WW_CHECK(ZSTD_isError(ZSTD_CCtx_setParameter(compressor.get(), parameter, value)) == 0);
    }
  }

  DeltaStreams Empty() { return {gaps.data(), steps.data(), escapes.data(), 0, 0, 0}; }

  std::vector<uint8_t> gaps, steps, escapes, pairs, planes;
  std::vector<std::byte> code;
  std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> compressor{ZSTD_createCCtx(), ZSTD_freeCCtx};
  std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> decompressor{ZSTD_createDCtx(), ZSTD_freeDCtx};
};

DeltaOrder OrderOf(layout::DType dtype) {
  switch (dtype) {
    case layout::DType::kBF16:
    case layout::DType::kF16:
      return DeltaOrder::kFloat16;
    case layout::DType::kF32:
      return DeltaOrder::kFloat32;
    case layout::DType::kF8E4M3:
    case layout::DType::kF8E5M2:
      return DeltaOrder::kFloat8;
    case layout::DType::kI8:
    case layout::DType::kU8:
    case layout::DType::kF8E8M0:
    case layout::DType::kBool:
      return DeltaOrder::kBits8;
    case layout::DType::kI16:
    case layout::DType::kU16:
      return DeltaOrder::kBits16;
    case layout::DType::kI32:
    case layout::DType::kU32:
      return DeltaOrder::kBits32;
    case layout::DType::kF64:
    case layout::DType::kI64:
      return DeltaOrder::kBits64;
  }
  WW_CHECK(false);
}

uint32_t ChangesOf(std::span<const std::byte> code) {
  return code.size() < kHeaderBytes ? 0 : Read(code.data()).changes;
}

Coder::Coder(size_t block_bytes_max)
    : block_bytes_max_(block_bytes_max), scratch_(std::make_unique<Scratch>(block_bytes_max)) {
  WW_CHECK(block_bytes_max < uint64_t{1} << 32);
}
Coder::~Coder() = default;

Coder::Code Coder::Encode(DeltaOrder order, std::span<const std::byte> base,
                          std::span<const std::byte> now, size_t code_bytes_max) {
  return EncodeWith(order, base, now, code_bytes_max, nullptr, nullptr);
}

Coder::Code Coder::EncodeAndCopy(DeltaOrder order, std::span<std::byte> base,
                                 std::span<const std::byte> now, size_t code_bytes_max,
                                 uint64_t* sum) {
  return EncodeWith(order, base, now, code_bytes_max, base.data(), sum);
}

Coder::Code Coder::EncodeWith(DeltaOrder order, std::span<const std::byte> base,
                              std::span<const std::byte> now, size_t code_bytes_max,
                              std::byte* copy, uint64_t* sum) {
  const auto width = static_cast<size_t>(kernels::DeltaElementBytes(order));
  WW_CHECK(base.size() == now.size() && base.size() <= block_bytes_max_ &&
           base.size() % width == 0);
  const size_t elements = base.size() / width;
  Scratch& scratch = *scratch_;
  DeltaStreams streams = scratch.Empty();
  WW_CHECK(
      kernels::DeltaScan(order, base.data(), now.data(), elements, elements, streams, copy, sum));
  ToPairs(streams.steps, streams.changes, scratch.pairs.data());
  ToPlanes(streams.escapes, streams.escape_count, width, scratch.planes.data());
  const std::array<std::span<const uint8_t>, kStreams> all = {
      std::span(scratch.gaps).first(streams.gap_bytes),
      std::span(scratch.pairs).first(PairsOf(streams.changes)),
      std::span(scratch.planes).first(streams.escape_count * width)};
  Header header;
  header.order = static_cast<uint8_t>(order);
  header.elements = static_cast<uint32_t>(elements);
  header.changes = static_cast<uint32_t>(streams.changes);
  header.gap_bytes = static_cast<uint32_t>(streams.gap_bytes);
  header.escapes = static_cast<uint32_t>(streams.escape_count);
  const size_t room = std::min(code_bytes_max, scratch.code.size());
  if (room < kHeaderBytes) return {{}, streams.changes};
  size_t end = kHeaderBytes;
  for (size_t i = 0; i < kStreams; ++i) {
    if (all[i].empty()) continue;
    size_t stored = ZSTD_compress2(scratch.compressor.get(), scratch.code.data() + end, room - end,
                                   all[i].data(), all[i].size());
    if (ZSTD_isError(stored) != 0 || stored >= all[i].size()) {  // longer, or no room for it
      if (all[i].size() > room - end) return {{}, streams.changes};
      stored = all[i].size();
      std::memcpy(scratch.code.data() + end, all[i].data(), stored);
      header.plain = static_cast<uint8_t>(header.plain | 1u << i);
    }
    header.stored[i] = static_cast<uint32_t>(stored);
    end += stored;
  }
  Write(header, scratch.code.data());
  return {std::span(scratch.code).first(end), streams.changes};
}

size_t Coder::ElementsOf(DeltaOrder order, size_t bytes) const {
  const auto width = static_cast<size_t>(kernels::DeltaElementBytes(order));
  WW_CHECK(bytes <= block_bytes_max_ && bytes % width == 0);
  return bytes / width;
}

Status Coder::Apply(DeltaOrder order, std::span<const std::byte> code,
                    std::span<std::byte> target) {
  const size_t elements = ElementsOf(order, target.size());
  WW_ASSIGN_OR_STATUS(const DeltaStreams streams, Decode(order, code, elements));
  if (!kernels::DeltaApply(order, target.data(), elements, streams)) return DoNotFit();
  return OkStatus();
}

Result<uint64_t> Coder::ApplyTo(DeltaOrder order, std::span<const std::byte> code,
                                std::span<const std::byte> base, std::span<std::byte> target) {
  WW_CHECK(base.size() == target.size());
  const size_t elements = ElementsOf(order, target.size());
  WW_ASSIGN(const DeltaStreams streams, Decode(order, code, elements));
  uint64_t sum = 0;
  if (!kernels::DeltaApplyTo(order, target.data(), base.data(), elements, streams, sum)) {
    return Fail(DoNotFit());
  }
  return sum;
}

Result<DeltaStreams> Coder::Decode(DeltaOrder order, std::span<const std::byte> code,
                                   size_t elements) {
  const auto width = static_cast<size_t>(kernels::DeltaElementBytes(order));
  if (code.size() < kHeaderBytes) return Fail(Malformed("shorter than its header"));
  const Header header = Read(code.data());
  if (header.version != kVersion) return Fail(Malformed("of a version that is not known"));
  if (header.order != static_cast<uint8_t>(order) || header.elements != elements) {
    return Fail(Malformed("of another block"));
  }
  // What follows has room in the scratch memory.
  if (header.zero != 0 || header.plain >> kStreams != 0 || header.changes > elements ||
      header.escapes > header.changes ||
      header.gap_bytes > header.changes + elements / kernels::kDeltaGapMax) {
    return Fail(Malformed("its streams are longer than the block's can be"));
  }
  Scratch& scratch = *scratch_;
  const std::array<std::span<uint8_t>, kStreams> all = {
      std::span(scratch.gaps).first(header.gap_bytes),
      std::span(scratch.pairs).first(PairsOf(header.changes)),
      std::span(scratch.planes).first(header.escapes * width)};
  std::span<const std::byte> left = code.subspan(kHeaderBytes);
  for (size_t i = 0; i < kStreams; ++i) {
    if (header.stored[i] > left.size()) return Fail(Malformed("it ends too early"));
    const auto stored = left.first(header.stored[i]);
    left = left.subspan(stored.size());
    size_t made = stored.size();
    if (all[i].empty() || (header.plain & 1u << i) != 0) {
      if (made != all[i].size())
        return Fail(Malformed("a stream is not as long as its header says"));
      if (made > 0) std::memcpy(all[i].data(), stored.data(), made);
    } else {
      made = ZSTD_decompressDCtx(scratch.decompressor.get(), all[i].data(), all[i].size(),
                                 stored.data(), stored.size());
      if (ZSTD_isError(made) != 0 || made != all[i].size()) {
        return Fail(Malformed("a stream is not as long as its header says"));
      }
    }
  }
  if (!left.empty()) return Fail(Malformed("something follows it"));
  FromPairs(scratch.pairs.data(), header.changes, scratch.steps.data());
  FromPlanes(scratch.planes.data(), header.escapes, width, scratch.escapes.data());
  DeltaStreams streams = scratch.Empty();
  streams.gap_bytes = header.gap_bytes;
  streams.changes = header.changes;
  streams.escape_count = header.escapes;
  return streams;
}

}  // namespace weightwire::delta
