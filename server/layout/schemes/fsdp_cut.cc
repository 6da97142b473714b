#include "server/layout/schemes/fsdp_cut.h"

#include <algorithm>
#include <map>

#include "server/base/checked.h"
#include "server/layout/schemes/flat.h"
#include "server/layout/schemes/fsdp_order.h"

namespace weightwire::layout::fsdp {
namespace {

constexpr int64_t kAlignBytes = 16;

int64_t CeilDivide(int64_t size, int64_t parts) { return size / parts + (size % parts != 0); }

int64_t Elements(const TensorSpec& tensor) { return *CheckedProduct(tensor.shape); }

/// The boxes of a block of torch's tensor, row-major and contiguous in local storage. Where torch
/// joins the last canonical dimensions, a range of the joined one is several boxes of them.
std::vector<Piece> BlockPieces(uint32_t tensor, const Shape& canonical_shape, const Box& block) {
  const Shape strides = RowMajorStrides(block.extent);
  if (block.extent.size() == canonical_shape.size()) return {{tensor, block, 0, strides}};
  const size_t outer = block.extent.size() - 1;
  const auto split = static_cast<std::ptrdiff_t>(outer);
  const Shape inner(canonical_shape.begin() + split, canonical_shape.end());
  const Shape inner_strides = RowMajorStrides(inner);
  std::vector<Piece> pieces;
  for (const FlatRun& run :
       FlatRuns(inner, block.begin[outer], block.begin[outer] + block.extent[outer])) {
    Piece piece{tensor,
                {{block.begin.begin(), block.begin.begin() + split},
                 {block.extent.begin(), block.extent.begin() + split}},
                run.begin - block.begin[outer],
                {strides.begin(), strides.begin() + split}};
    const auto append = [](Shape& to, const Shape& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    append(piece.box.begin, run.box.begin);
    append(piece.box.extent, run.box.extent);
    append(piece.local_stride, inner_strides);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

Range Chunk(int64_t size, int64_t parts, int64_t index) {
  const int64_t chunk = CeilDivide(size, parts);
  const int64_t begin = chunk == 0 || index > size / chunk ? size : index * chunk;
  return {begin, std::min(chunk, size - begin)};
}

Result<Cutter> Cutter::Make(const CanonicalSpace& canonical, std::span<const TorchTensor> tensors,
                            std::string_view family, const Sharding& sharding) {
  Cutter cutter(canonical, tensors, sharding);
  if (sharding.kind == Kind::kFsdp1 || sharding.kind == Kind::kFsdp1Orig) {
    WW_FAIL_IF_ERROR(cutter.PlaceParameters(family));
  }
  return cutter;
}

Status Cutter::PlaceParameters(std::string_view family) {
  std::map<int64_t, std::vector<uint32_t>> by_layer;
  std::vector<const TorchTensor*> torch_of(canonical_.tensors.size());
  for (const TorchTensor& torch : tensors_) {
    if (torch.buffer) continue;
    by_layer[torch.layer].push_back(torch.tensor);
    torch_of[torch.tensor] = &torch;
  }
  for (auto& [layer, parameters] : by_layer) {
    WW_RETURN_IF_ERROR(SortInModuleOrder(family, canonical_, parameters));
    FlatParameter flat;
    flat.name = layer < 0 ? "_flat_param" : NameOf("model.layers.{layer}._flat_param", layer, 0);
    for (uint32_t tensor : parameters) flat.parameters.push_back({torch_of[tensor]});
    WW_RETURN_IF_ERROR(PlaceIn(flat));
    flats_.push_back(std::move(flat));
  }
  return OkStatus();
}

Status Cutter::PlaceIn(FlatParameter& flat) const {
  const DType dtype = DTypeOf(flat);
  const int64_t align = sharding_.kind == Kind::kFsdp1 ? 1
                        : sharding_.align > 0          ? sharding_.align
                                                       : kAlignBytes / ElementBytes(dtype);
  int64_t end = 0;
  bool fits = true;
  for (Placed& placed : flat.parameters) {
    const std::optional<int64_t> begin = RoundUpChecked(end, align);
    placed.begin = begin.value_or(0);
    placed.count = Elements(canonical_.tensors[placed.torch->tensor]);
    fits = begin && !__builtin_add_overflow(*begin, placed.count, &end);
    if (!fits) break;
  }
  flat.elements = CeilDivide(end, sharding_.shards);
  if (fits && StorageBytes(dtype, Shape{flat.elements, sharding_.shards})) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                "the flat parameter's byte count does not fit 64 bits")
      .AtTensor(flat.name);
}

DType Cutter::DTypeOf(const FlatParameter& flat) const {
  return canonical_.tensors[flat.parameters.front().torch->tensor].dtype;
}

RankLayout Cutter::Rank(int64_t shard, int64_t t) const {
  RankLayout rank;
  for (const FlatParameter& flat : flats_) AddFlat(flat, shard, rank);
  for (const TorchTensor& torch : tensors_) {
    if (torch.buffer) {
      rank.tensors.push_back(Whole(torch));
    } else if (sharding_.kind == Kind::kFsdp2) {
      rank.tensors.push_back(DTensor(torch, shard, t));
    } else if (sharding_.kind == Kind::kZero3) {
      rank.tensors.push_back(ZeroPartition(torch, shard));
    }
  }
  return rank;
}

LocalTensor Cutter::Whole(const TorchTensor& torch) const {
  const TensorSpec& spec = canonical_.tensors[torch.tensor];
  LocalTensor local{spec.name, spec.dtype, torch.shape, {}};
  AppendFlatPieces(torch.tensor, spec.shape, 0, Elements(spec), 0, local.pieces);
  return local;
}

LocalTensor Cutter::DTensor(const TorchTensor& torch, int64_t shard, int64_t t) const {
  const TensorSpec& spec = canonical_.tensors[torch.tensor];
  Box block{Shape(torch.shape.size(), 0), torch.shape};
  const auto cut = [&block](size_t dim, int64_t parts, int64_t index) {
    const Range range = Chunk(block.extent[dim], parts, index);
    block.begin[dim] += range.begin;
    block.extent[dim] = range.count;
  };
  const int64_t ndim = std::ssize(torch.shape);
  if (torch.tp_dim >= 0) cut(static_cast<size_t>(torch.tp_dim), sharding_.tp, t);
  if (ndim > 0) {
    const auto dim = static_cast<size_t>(sharding_.dim < ndim ? sharding_.dim : 0);
    cut(dim, sharding_.shards, shard);
    // FSDP2 reports no extent here even where tensor parallelism has left nothing in another one.
    if (*CheckedProduct(block.extent) == 0) block.extent[dim] = 0;
  }
  LocalTensor local{spec.name, spec.dtype, block.extent, {}};
  if (*CheckedProduct(block.extent) > 0) {
    local.pieces = BlockPieces(torch.tensor, spec.shape, block);
  }
  return local;
}

LocalTensor Cutter::ZeroPartition(const TorchTensor& torch, int64_t shard) const {
  const TensorSpec& spec = canonical_.tensors[torch.tensor];
  const Range range = Chunk(Elements(spec), sharding_.shards, shard);
  LocalTensor local{spec.name, spec.dtype, {CeilDivide(Elements(spec), sharding_.shards)}, {}};
  AppendFlatPieces(torch.tensor, spec.shape, range.begin, range.begin + range.count, 0,
                   local.pieces);
  return local;
}

void Cutter::AddFlat(const FlatParameter& flat, int64_t shard, RankLayout& rank) const {
  const int64_t from = shard * flat.elements;
  const int64_t to = from + flat.elements;
  const bool orig = sharding_.kind == Kind::kFsdp1Orig;
  if (!orig) {
    rank.tensors.push_back({flat.name, DTypeOf(flat), {flat.elements}, {}});
  }
  for (const Placed& placed : flat.parameters) {
    const int64_t begin = std::clamp(from - placed.begin, int64_t{0}, placed.count);
    const int64_t end = std::clamp(to - placed.begin, int64_t{0}, placed.count);
    const TensorSpec& spec = canonical_.tensors[placed.torch->tensor];
    int64_t offset = placed.begin + begin - from;
    if (orig) {
      rank.tensors.push_back({spec.name, spec.dtype, {end - begin}, {}});
      if (sharding_.shards == 1) rank.tensors.back().shape = placed.torch->shape;
      offset = 0;
    }
    AppendFlatPieces(placed.torch->tensor, spec.shape, begin, end, offset,
                     rank.tensors.back().pieces);
  }
}

int64_t Cutter::PiecesBound() const {
  // A flat range is at most 2(n − 1) + 1 boxes; a flat parameter's has two broken parameters.
  int64_t bound = 0;
  const bool zero = sharding_.kind == Kind::kZero3;
  for (const TorchTensor& torch : tensors_) {
    const int64_t ndim = std::ssize(canonical_.tensors[torch.tensor].shape);
    const bool joined = ndim != std::ssize(torch.shape);
    bound += zero ? std::max<int64_t>(1, 2 * ndim - 1) : joined ? 3 : 1;
  }
  return bound + 2 * (2 * kMaxDims - 1) * std::ssize(flats_);
}

}  // namespace weightwire::layout::fsdp
