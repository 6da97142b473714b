#include "tests/unit/transfer/random_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <tuple>

#include "tests/unit/kernels/four_bit_oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"

namespace weightwire::transfer::testing {
namespace {

using layout::DType;

int64_t Pick(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

std::pair<DType, DType> RandomDtypes(Rng& rng) {
  switch (Pick(rng, 0, 7)) {
    case 0:
      return {DType::kF32, DType::kBF16};
    case 1:
      return {DType::kBF16, DType::kF32};
    case 2:
      return {DType::kF32, DType::kF32};
    case 3:
      return {DType::kI64, DType::kI64};
    case 4:
      return {DType::kU8, DType::kU8};
    default:
      return {DType::kBF16, DType::kBF16};
  }
}

// Strides of a tensor in which `extent` lies with random gaps and in random axis order. Returns the
// elements that the tensor needs beyond the offset.
int64_t RandomStrides(Rng& rng, const std::vector<int64_t>& extent, std::vector<int64_t>* stride) {
  std::vector<size_t> order(extent.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (Pick(rng, 0, 3) == 0) std::shuffle(order.begin(), order.end(), rng);
  stride->assign(extent.size(), 1);
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0;) {
    (*stride)[order[i]] = next;
    next *= extent[order[i]] + (Pick(rng, 0, 1) == 0 ? 0 : Pick(rng, 1, 3));
  }
  return next;
}

std::vector<int64_t> RandomExtent(Rng& rng, int64_t elements_max) {
  std::vector<int64_t> extent(static_cast<size_t>(Pick(rng, 0, 4)));
  int64_t left = Pick(rng, 1, elements_max);
  for (auto& e : extent) {
    e = Pick(rng, 1, std::max<int64_t>(1, left));
    left /= e;
  }
  std::shuffle(extent.begin(), extent.end(), rng);
  return extent;
}

plan::CopyOp NamedOp(RandomPlan* out) {
  plan::CopyOp op;
  op.canonical = static_cast<uint32_t>(out->plan.tensor_names.size());
  out->plan.tensor_names.push_back("model.tensor." + std::to_string(op.canonical));
  return op;
}

// Gives the op a tensor of its own on each side, in which it lies somewhere.
void Place(Rng& rng, RandomPlan* out, uint32_t source, uint32_t target, plan::CopyOp* op) {
  op->source_offset = Pick(rng, 0, 5);
  op->target_offset = Pick(rng, 0, 5);
  const int64_t source_elements =
      op->source_offset + RandomStrides(rng, plan::SourceExtent(*op), &op->source_stride);
  const int64_t target_elements =
      op->target_offset + RandomStrides(rng, op->extent, &op->target_stride);
  op->source_tensor = static_cast<uint32_t>(out->source_tensor_bytes[source].size());
  op->target_tensor = static_cast<uint32_t>(out->target_tensor_bytes[target].size());
  out->source_tensor_bytes[source].push_back(
      static_cast<uint64_t>(source_elements * layout::ElementBytes(op->source_dtype)));
  out->target_tensor_bytes[target].push_back(
      static_cast<uint64_t>(target_elements * layout::ElementBytes(op->target_dtype)));
}

plan::CopyOp RandomOp(Rng& rng, const PlanShape& shape, RandomPlan* out, uint32_t source,
                      uint32_t target) {
  plan::CopyOp op = NamedOp(out);
  std::tie(op.source_dtype, op.target_dtype) = RandomDtypes(rng);
  op.extent = RandomExtent(rng, shape.elements_per_op_max);
  Place(rng, out, source, target, &op);
  return op;
}

// Codes or scales, as op->transform says, of groups of four bits: dtypes, blocks and extents.
void MakeFourBits(layout::ScaleRule rule, int64_t group, const std::vector<int64_t>& matrix,
                  plan::CopyOp* op) {
  const bool codes = op->transform == plan::Transform::kCodes;
  const bool int4 = rule == layout::ScaleRule::kInt4;
  const int64_t packed = int4 ? 8 : 2;
  op->rule = rule;
  op->target_dtype = !int4 ? DType::kU8 : codes ? DType::kI32 : op->source_dtype;
  op->block = {1, codes ? group / packed : group};
  op->source_extent = matrix;
  op->extent = {matrix[0], matrix[1] / (codes ? packed : group)};
}

layout::ScaleRule RandomFourBitRule(Rng& rng) {
  const layout::ScaleRule rules[] = {layout::ScaleRule::kMxFp4, layout::ScaleRule::kMxFp4Rounded,
                                     layout::ScaleRule::kInt4};
  return rules[Below(rng, 3)];
}

// Codes or scales of a matrix with blocks of odd sizes, none of more bytes than a segment has.
plan::CopyOp RandomQuantizedOp(Rng& rng, RandomPlan* out, uint32_t source, uint32_t target) {
  plan::CopyOp op = NamedOp(out);
  const DType floats[] = {DType::kBF16, DType::kF16, DType::kF32};
  op.source_dtype = floats[Below(rng, 3)];
  op.transform = Below(rng, 2) == 0 ? plan::Transform::kCodes : plan::Transform::kScales;
  op.target_dtype = op.transform == plan::Transform::kCodes ? DType::kF8E4M3 : DType::kF32;
  op.block = {Pick(rng, 1, 8), Pick(rng, 1, 8)};
  op.extent = {Pick(rng, 1, 60), Pick(rng, 1, 60)};
  if (Below(rng, 3) == 0) {
    const int64_t group = 8 * Pick(rng, 1, 8);
    MakeFourBits(RandomFourBitRule(rng), group, {op.extent[0], group * Pick(rng, 1, 5)}, &op);
  } else if (op.transform == plan::Transform::kScales) {
    op.source_extent = op.extent;
    for (size_t d = 0; d < 2; ++d) op.extent[d] = (op.extent[d] + op.block[d] - 1) / op.block[d];
  }
  Place(rng, out, source, target, &op);
  return op;
}

void SetTensor(RandomPlan* out, uint32_t target, plan::CopyOp* op, Rng& rng) {
  op->target_offset = Pick(rng, 0, 5);
  const int64_t elements = op->target_offset + RandomStrides(rng, op->extent, &op->target_stride);
  op->target_tensor = static_cast<uint32_t>(out->target_tensor_bytes[target].size());
  out->target_tensor_bytes[target].push_back(
      static_cast<uint64_t>(elements * layout::ElementBytes(op->target_dtype)));
}

// Codes and scales of one matrix that lies at `offset` of what is gathered; `group`: of four bits.
void MakeOfGathered(Rng& rng, RandomPlan* out, uint32_t target, int64_t offset,
                    const std::vector<int64_t>& matrix, int64_t group,
                    plan::GatherBuffer* gathered) {
  const std::vector<int64_t> block = {Pick(rng, 1, 8), Pick(rng, 1, 8)};
  const layout::ScaleRule rule = RandomFourBitRule(rng);
  for (const plan::Transform transform : {plan::Transform::kCodes, plan::Transform::kScales}) {
    plan::CopyOp op = NamedOp(out);
    op.transform = transform;
    op.block = block;
    op.extent = matrix;
    op.source_dtype = gathered->dtype;
    op.target_dtype = transform == plan::Transform::kCodes ? DType::kF8E4M3 : DType::kF32;
    op.source_offset = offset;
    op.source_stride = {matrix[1], 1};
    if (group > 0) {
      MakeFourBits(rule, group, matrix, &op);
    } else if (transform == plan::Transform::kScales) {
      op.source_extent = matrix;
      for (size_t d = 0; d < 2; ++d) op.extent[d] = (matrix[d] + block[d] - 1) / block[d];
    }
    SetTensor(out, target, &op, rng);
    gathered->made.push_back(op);
  }
}

// Rows of the matrix from each source rank, in turn and as they come.
void GatherRows(Rng& rng, RandomPlan* out, uint32_t target, int64_t offset,
                const std::vector<int64_t>& matrix, DType dtype) {
  std::vector<plan::Stream*> streams;
  for (plan::Stream& stream : out->plan.streams) {
    if (stream.target_rank == target) streams.push_back(&stream);
  }
  int64_t row = 0;
  for (size_t s = Below(rng, static_cast<uint32_t>(streams.size())); row < matrix[0]; ++s) {
    plan::Stream& stream = *streams[s % streams.size()];
    plan::CopyOp op = NamedOp(out);
    op.source_dtype = dtype == DType::kF32 && Below(rng, 2) == 0 ? DType::kBF16 : dtype;
    op.target_dtype = dtype;
    op.extent = {Pick(rng, 1, matrix[0] - row), matrix[1]};
    op.source_offset = Pick(rng, 0, 5);
    const int64_t elements = op.source_offset + RandomStrides(rng, op.extent, &op.source_stride);
    auto& sources = out->source_tensor_bytes[stream.source_rank];
    op.source_tensor = static_cast<uint32_t>(sources.size());
    sources.push_back(static_cast<uint64_t>(elements * layout::ElementBytes(op.source_dtype)));
    op.target_tensor = static_cast<uint32_t>(out->target_tensor_bytes[target].size());
    op.target_offset = offset + row * matrix[1];
    op.target_stride = {matrix[1], 1};
    row += op.extent[0];
    const int64_t bytes = plan::WireBytes(op);
    stream.bytes += bytes;
    out->plan.bytes_total += bytes;
    stream.ops.push_back(std::move(op));
  }
}

void Gather(Rng& rng, const PlanShape& shape, RandomPlan* out, uint32_t target) {
  const DType floats[] = {DType::kBF16, DType::kF16, DType::kF32};
  plan::GatherBuffer gathered;
  gathered.dtype = floats[Below(rng, 3)];
  std::vector<std::pair<int64_t, std::vector<int64_t>>> matrices;
  for (int i = 0; i < shape.gathered_per_target; ++i) {
    const int64_t offset = gathered.elements + Pick(rng, 0, 3);
    const int64_t group = Below(rng, 3) == 0 ? 8 * Pick(rng, 1, 8) : 0;
    const int64_t columns = group > 0 ? group * Pick(rng, 1, 3) : Pick(rng, 1, 60);
    matrices.push_back({offset, {Pick(rng, 1, 60), columns}});
    gathered.elements = offset + matrices[static_cast<size_t>(i)].second[0] *
                                     matrices[static_cast<size_t>(i)].second[1];
    MakeOfGathered(rng, out, target, offset, matrices.back().second, group, &gathered);
  }
  const auto tensor = static_cast<uint32_t>(out->target_tensor_bytes[target].size());
  for (plan::CopyOp& op : gathered.made) op.source_tensor = tensor;
  for (const auto& [offset, matrix] : matrices) {
    GatherRows(rng, out, target, offset, matrix, gathered.dtype);
  }
  out->target_tensor_bytes[target].push_back(
      static_cast<uint64_t>(plan::GatherBufferBytes(gathered)));
  out->plan.gathered.emplace(target, std::move(gathered));
}

float ReadFloat(DType dtype, const std::byte* at) {
  uint32_t bits = 0;
  if (dtype == DType::kF32) {
    std::memcpy(&bits, at, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, at, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// bf16 to nearest, ties to even, by trying both neighbours.
uint16_t ToBF16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto low = static_cast<uint16_t>(bits >> 16);
  const auto high = static_cast<uint16_t>(low + 1);
  const uint32_t low_bits = static_cast<uint32_t>(low) << 16;
  const uint32_t high_bits = static_cast<uint32_t>(high) << 16;
  float below, above;
  std::memcpy(&below, &low_bits, 4);
  std::memcpy(&above, &high_bits, 4);
  const double down = std::fabs(static_cast<double>(value) - static_cast<double>(below));
  const double up = std::fabs(static_cast<double>(above) - static_cast<double>(value));
  if (down != up) return down < up ? low : high;
  return low % 2 == 0 ? low : high;
}

void CopyElement(const plan::CopyOp& op, const std::byte* from, std::byte* to) {
  if (op.source_dtype == op.target_dtype) {
    std::memcpy(to, from, static_cast<size_t>(layout::ElementBytes(op.target_dtype)));
    return;
  }
  const float value = ReadFloat(op.source_dtype, from);
  if (op.target_dtype == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else {
    const uint16_t half = ToBF16(value);
    std::memcpy(to, &half, 2);
  }
}

// Calls visit(source element, target element) for every element of the op.
template <typename Visit>
void ForEachElement(const plan::CopyOp& op, size_t dim, int64_t source, int64_t target,
                    const Visit& visit) {
  if (dim == op.extent.size()) return visit(source, target);
  for (int64_t i = 0; i < op.extent[dim]; ++i) {
    ForEachElement(op, dim + 1, source + i * op.source_stride[dim],
                   target + i * op.target_stride[dim], visit);
  }
}

// The matrix quantized as a whole, by the kernels' oracle.
void QuantizeElements(const plan::CopyOp& op, const std::byte* from, std::byte* to) {
  namespace oracle = kernels::oracle;
  const bool codes = op.transform == plan::Transform::kCodes;
  const bool four_bits = layout::IsFourBit(op.rule);
  const std::vector<int64_t>& matrix = codes && !four_bits ? op.extent : op.source_extent;
  oracle::QuantizeCase c;
  c.box = oracle::PackedQuantizeBox(matrix[0], matrix[1], op.block[0], op.block[1]);
  std::copy_n(op.source_stride.begin(), 2, c.box.source_stride);
  c.from = op.source_dtype == DType::kF32   ? kernels::Element::kF32
           : op.source_dtype == DType::kF16 ? kernels::Element::kF16
                                            : kernels::Element::kBF16;
  const int64_t last =
      (matrix[0] - 1) * op.source_stride[0] + (matrix[1] - 1) * op.source_stride[1];
  const int bytes = layout::ElementBytes(op.source_dtype);
  const auto* first = reinterpret_cast<const unsigned char*>(from + op.source_offset * bytes);
  c.source.assign(first, first + (last + 1) * bytes);
  const int64_t packed = op.rule == layout::ScaleRule::kInt4 ? 8 : 2;
  const oracle::Quantized made =
      four_bits ? oracle::QuantizeFourBits({kernels::FourBitKindOf(static_cast<int>(op.rule)),
                                            codes ? op.block[1] * packed : op.block[1], c})
                : oracle::Quantize(c);
  const unsigned char* next = codes ? made.codes.data() : made.scales.data();
  const int made_bytes = layout::ElementBytes(op.target_dtype);
  ForEachElement(op, 0, 0, op.target_offset, [&](int64_t, int64_t element) {
    std::memcpy(to + element * made_bytes, next, static_cast<size_t>(made_bytes));
    next += made_bytes;
  });
}

}  // namespace

uint32_t Below(Rng& rng, uint32_t bound) { return static_cast<uint32_t>(rng() % bound); }

uint64_t SeedOr(uint64_t fallback) {
  const char* seed = std::getenv("WEIGHTWIRE_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 10) : fallback;
}

RandomPlan MakeSizedPlan(const std::vector<std::vector<int64_t>>& stream_bytes) {
  RandomPlan out;
  out.plan.id = {1, 2};
  out.plan.source_ranks = static_cast<uint32_t>(stream_bytes.size());
  out.plan.target_ranks = static_cast<uint32_t>(stream_bytes[0].size());
  out.source_tensor_bytes.resize(out.plan.source_ranks);
  out.target_tensor_bytes.resize(out.plan.target_ranks);
  for (uint32_t target = 0; target < out.plan.target_ranks; ++target) {
    for (uint32_t source = 0; source < out.plan.source_ranks; ++source) {
      const int64_t bytes = stream_bytes[source][target];
      if (bytes == 0) continue;
      plan::CopyOp op;
      op.canonical = static_cast<uint32_t>(out.plan.tensor_names.size());
      out.plan.tensor_names.push_back("model.tensor." + std::to_string(op.canonical));
      op.source_dtype = op.target_dtype = DType::kU8;
      op.extent = {bytes};
      op.source_stride = op.target_stride = {1};
      op.source_tensor = static_cast<uint32_t>(out.source_tensor_bytes[source].size());
      op.target_tensor = static_cast<uint32_t>(out.target_tensor_bytes[target].size());
      out.source_tensor_bytes[source].push_back(static_cast<uint64_t>(bytes));
      out.target_tensor_bytes[target].push_back(static_cast<uint64_t>(bytes));
      plan::Stream stream;
      stream.id = static_cast<uint32_t>(out.plan.streams.size());
      stream.source_rank = source;
      stream.target_rank = target;
      stream.bytes = bytes;
      stream.ops = {op};
      out.plan.bytes_total += bytes;
      ++out.plan.copies_total;
      out.plan.streams.push_back(std::move(stream));
    }
  }
  return out;
}

RandomPlan MakeRandomPlan(Rng& rng, const PlanShape& shape) {
  RandomPlan out;
  out.plan.id = {rng(), rng()};
  out.plan.source_ranks = shape.source_ranks;
  out.plan.target_ranks = shape.target_ranks;
  out.source_tensor_bytes.resize(shape.source_ranks);
  out.target_tensor_bytes.resize(shape.target_ranks);
  for (uint32_t target = 0; target < shape.target_ranks; ++target) {
    for (uint32_t source = 0; source < shape.source_ranks; ++source) {
      plan::Stream stream;
      stream.id = static_cast<uint32_t>(out.plan.streams.size());
      stream.source_rank = source;
      stream.target_rank = target;
      const int64_t ops = Pick(rng, 1, shape.ops_per_stream_max);
      for (int64_t i = 0; i < ops; ++i) {
        stream.ops.push_back(RandomOp(rng, shape, &out, source, target));
        int64_t bytes = layout::ElementBytes(stream.ops.back().target_dtype);
        for (int64_t e : stream.ops.back().extent) bytes *= e;
        stream.bytes += bytes;
      }
      for (int i = 0; i < shape.quantized_ops_per_stream; ++i) {
        stream.ops.push_back(RandomQuantizedOp(rng, &out, source, target));
        stream.bytes += plan::WireBytes(stream.ops.back());
      }
      out.plan.bytes_total += stream.bytes;
      out.plan.streams.push_back(std::move(stream));
    }
    if (shape.gathered_per_target > 0) Gather(rng, shape, &out, target);
  }
  return out;
}

std::vector<std::byte> RankMemory::Snapshot() const {
  std::vector<std::byte> bytes(region->size());
  WW_CHECK(device::CopyRun({bytes.data()}, region->bytes(), bytes.size()).ok());
  for (const memory::RegionSpan& tensor : binding) {
    if (tensor.region == region) continue;
    WW_CHECK(device::CopyRun({bytes.data() + tensor.offset}, tensor.at(), tensor.bytes).ok());
  }
  return bytes;
}

void RankMemory::Write(std::span<const std::byte> bytes) const {
  std::set<std::shared_ptr<memory::MemoryRegion>> regions = {region};
  for (const memory::RegionSpan& tensor : binding) regions.insert(tensor.region);
  for (const auto& one : regions) {
    WW_CHECK(device::CopyRun(one->bytes(), bytes.data(), one->size()).ok());
  }
}

RankMemory OnDevice(const RankMemory& memory, memory::GpuMemoryPool& gpu_pools) {
  RankMemory moved;
  moved.region = gpu_pools.Allocate("a rank", memory.region->size()).value();
  moved.Write({memory.region->data(), memory.region->size()});
  for (const memory::RegionSpan& tensor : memory.binding) {
    moved.binding.push_back({moved.region, tensor.offset, tensor.bytes});
  }
  return moved;
}

RankMemory Mixed(const RankMemory& memory, const std::vector<memory::GpuMemoryPool*>& pools) {
  RankMemory mixed = memory;
  for (size_t p = 0; p < pools.size(); ++p) {
    const RankMemory there = OnDevice(memory, *pools[p]);
    for (size_t i = p + 1; i < mixed.binding.size(); i += pools.size() + 1) {
      mixed.binding[i] = there.binding[i];
    }
  }
  return mixed;
}

RankMemory MakeMemory(Rng& rng, const std::vector<uint64_t>& tensor_bytes) {
  std::vector<uint64_t> offsets;
  uint64_t end = 0;
  for (uint64_t bytes : tensor_bytes) {
    end = (end + 7) / 8 * 8 + 8 * static_cast<uint64_t>(Pick(rng, 0, 3));
    offsets.push_back(end);
    end += bytes;
  }
  RankMemory memory;
  memory.region = memory::MemoryRegion::Allocate("rank", end + 16).value();
  for (uint64_t at = 0; at < memory.region->size(); at += sizeof(uint64_t)) {
    const uint64_t word = rng();
    std::memcpy(memory.region->data() + at, &word,
                std::min<uint64_t>(sizeof(word), memory.region->size() - at));
  }
  for (size_t i = 0; i < tensor_bytes.size(); ++i) {
    memory.binding.push_back({memory.region, offsets[i], tensor_bytes[i]});
  }
  return memory;
}

void TameFloats(Rng& rng, const plan::TransferPlan& plan, uint32_t source_rank,
                const RankMemory& memory) {
  for (const plan::Stream& stream : plan.streams) {
    if (stream.source_rank != source_rank) continue;
    for (const plan::CopyOp& op : stream.ops) {
      const auto gathered = plan.gathered.find(stream.target_rank);
      const bool gathers = gathered != plan.gathered.end() &&
                           op.target_tensor == gathered->second.made[0].source_tensor;
      if (op.source_dtype == op.target_dtype && !gathers) continue;
      const int bytes = layout::ElementBytes(op.source_dtype);
      std::byte* tensor = memory.binding[op.source_tensor].data();
      ForEachElement(op, 0, op.source_offset, op.target_offset, [&](int64_t source, int64_t) {
        const float value = std::uniform_real_distribution<float>(-4, 4)(rng);
        const uint16_t half = ToBF16(value);
        std::memcpy(tensor + source * bytes,
                    bytes == 4 ? static_cast<const void*>(&value) : static_cast<const void*>(&half),
                    static_cast<size_t>(bytes));
      });
    }
  }
}

void ChangeAll(Rng& rng, const plan::TransferPlan& plan, const std::vector<RankMemory>& sources) {
  for (uint32_t rank = 0; rank < sources.size(); ++rank) {
    std::vector<std::byte> bytes = sources[rank].Snapshot();
    for (std::byte& byte : bytes) byte ^= static_cast<std::byte>(1 + Below(rng, 255));
    sources[rank].Write(bytes);
    TameFloats(rng, plan, rank, sources[rank]);
  }
}

void ChangeSome(Rng& rng, const std::vector<RankMemory>& sources, double share) {
  for (const RankMemory& source : sources) {
    std::vector<std::byte> bytes = source.Snapshot();
    const auto changes = static_cast<uint64_t>(share * static_cast<double>(bytes.size()));
    for (uint64_t i = 0; i < changes; ++i) {
      bytes[Below(rng, static_cast<uint32_t>(bytes.size()))] ^= std::byte{1};
    }
    source.Write(bytes);
  }
}

std::vector<std::byte> Expected(const plan::TransferPlan& plan, uint32_t target_rank,
                                const RankMemory& target, const std::vector<RankMemory>& sources) {
  std::vector<std::byte> bytes = target.Snapshot();
  for (const plan::Stream& stream : plan.streams) {
    if (stream.target_rank != target_rank) continue;
    for (const plan::CopyOp& op : stream.ops) {
      const std::byte* from = sources[stream.source_rank].binding[op.source_tensor].data();
      std::byte* to = bytes.data() + target.binding[op.target_tensor].offset;
      if (op.transform != plan::Transform::kElements) {
        QuantizeElements(op, from, to);
        continue;
      }
      const int from_bytes = layout::ElementBytes(op.source_dtype);
      const int to_bytes = layout::ElementBytes(op.target_dtype);
      ForEachElement(op, 0, op.source_offset, op.target_offset,
                     [&](int64_t source, int64_t element) {
                       CopyElement(op, from + source * from_bytes, to + element * to_bytes);
                     });
    }
  }
  const auto gathered = plan.gathered.find(target_rank);
  if (gathered == plan.gathered.end()) return bytes;
  for (const plan::CopyOp& op : gathered->second.made) {
    QuantizeElements(op, bytes.data() + target.binding[op.source_tensor].offset,
                     bytes.data() + target.binding[op.target_tensor].offset);
  }
  return bytes;
}

}  // namespace weightwire::transfer::testing
