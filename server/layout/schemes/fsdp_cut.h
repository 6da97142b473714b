#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/schemes/fsdp.h"
#include "server/layout/schemes/rank_builder.h"

namespace weightwire::layout::fsdp {

/// torch.chunk: part `index` of `size` in `parts` chunks of ceil(size / parts); the last ones are
/// short or empty.
Range Chunk(int64_t size, int64_t parts, int64_t index);

/// Gives what one rank holds of a model's tensors.
class Cutter {
 public:
  /// Both must outlive the cutter. Places every parameter in its flat parameter where there are
  /// such.
  ///   as SortInModuleOrder
  ///   kInvalidArgument / kShapeOverflow  a flat parameter's bytes do not fit int64
  static Result<Cutter> Make(const CanonicalSpace& canonical, std::span<const TorchTensor> tensors,
                             std::string_view family, const Sharding& sharding);

  RankLayout Rank(int64_t shard, int64_t t) const;
  /// No rank has more pieces.
  int64_t PiecesBound() const;

 private:
  /// A parameter from element `begin` of its flat parameter on.
  struct Placed {
    const TorchTensor* torch = nullptr;
    int64_t begin = 0;
    int64_t count = 0;
  };
  struct FlatParameter {
    std::string name;
    int64_t elements = 0;  ///< of each rank
    std::vector<Placed> parameters;
  };

  Cutter(const CanonicalSpace& canonical, std::span<const TorchTensor> tensors,
         const Sharding& sharding)
      : canonical_(canonical), tensors_(tensors), sharding_(sharding) {}

  Status PlaceParameters(std::string_view family);
  Status PlaceIn(FlatParameter& flat) const;
  DType DTypeOf(const FlatParameter& flat) const;
  LocalTensor Whole(const TorchTensor& torch) const;
  LocalTensor DTensor(const TorchTensor& torch, int64_t shard, int64_t t) const;
  LocalTensor ZeroPartition(const TorchTensor& torch, int64_t shard) const;
  /// One flat parameter, or one tensor for each of its parameters.
  void AddFlat(const FlatParameter& flat, int64_t shard, RankLayout& rank) const;

  const CanonicalSpace& canonical_;
  std::span<const TorchTensor> tensors_;
  Sharding sharding_;
  std::vector<FlatParameter> flats_;
};

}  // namespace weightwire::layout::fsdp
