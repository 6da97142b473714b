#pragma once

#include "server/layout/families/parts.h"
#include "server/layout/families/wrapper.h"

/// Words that the towers of wrappers are written in.
namespace weightwire::layout::tower {

// ---- sizes ----
inline constexpr SizeOf kHidden = [](const ModelConfig& c) { return c.vision.hidden; };
inline constexpr SizeOf kThreeHidden = [](const ModelConfig& c) { return 3 * c.vision.hidden; };
inline constexpr SizeOf kIntermediate = [](const ModelConfig& c) { return c.vision.intermediate; };
inline constexpr SizeOf kChannels = [](const ModelConfig& c) { return c.vision.channels; };
inline constexpr SizeOf kFrames = [](const ModelConfig& c) { return c.vision.temporal_patch; };
inline constexpr SizeOf kPatch = [](const ModelConfig& c) { return c.vision.patch; };
inline constexpr SizeOf kMerged = [](const ModelConfig& c) {
  return c.vision.hidden * c.vision.merged;
};
inline constexpr SizeOf kOut = [](const ModelConfig& c) { return c.vision.out_hidden; };
inline constexpr SizeOf kProjector = [](const ModelConfig& c) { return c.vision.projector; };
inline constexpr SizeOf kMergers = [](const ModelConfig& c) { return c.vision.mergers; };
inline constexpr SizeOf kPatchElements = [](const ModelConfig& c) {
  return c.vision.channels * c.vision.patch * c.vision.patch;
};
inline constexpr SizeOf kPositionsAcross = [](const ModelConfig& c) {
  return c.vision.positions_across;
};
inline constexpr SizeOf kPositions = [](const ModelConfig& c) { return c.vision.positions; };

// ---- conditions ----
inline constexpr IsPresent kWithPooling = [](const ModelConfig& c, const LayerKind&) {
  return c.vision.pooling;
};
inline constexpr IsPresent kWithProjectorBias = [](const ModelConfig& c, const LayerKind&) {
  return c.vision.projector_bias;
};

// ---- tensors ----
constexpr TowerTensor Whole(std::string_view name, SizeOf first, SizeOf second = nullptr,
                            SizeOf third = nullptr, SizeOf fourth = nullptr,
                            SizeOf fifth = nullptr) {
  return {.name = name, .shape = {first, second, third, fourth, fifth}};
}
/// `engine`: the fused tensor that q, k and v are in; `name` has its rows by heads.
constexpr TowerTensor HeadRows(std::string_view name, std::string_view engine) {
  return {.name = name, .shape = {kHidden, kHidden}, .cut = TowerCut::kHeads, .engine = engine};
}
constexpr TowerTensor HeadBias(std::string_view name, std::string_view engine) {
  return {.name = name, .shape = {kHidden}, .cut = TowerCut::kHeads, .engine = engine};
}
/// q, k and v in three runs of rows, under one name for engines, too.
constexpr TowerTensor Qkv(std::string_view name) {
  return {.name = name, .shape = {kThreeHidden, kHidden}, .cut = TowerCut::kHeads, .slices = 3};
}
constexpr TowerTensor QkvBias(std::string_view name) {
  return {.name = name, .shape = {kThreeHidden}, .cut = TowerCut::kHeads, .slices = 3};
}
constexpr TowerTensor Rows(std::string_view name, SizeOf rows, SizeOf columns = nullptr) {
  return {.name = name, .shape = {rows, columns}, .cut = TowerCut::kRows};
}
/// gate or up of an MLP that engines fuse to `engine`.
constexpr TowerTensor FusedRows(std::string_view name, std::string_view engine) {
  return {
      .name = name, .shape = {kIntermediate, kHidden}, .cut = TowerCut::kRows, .engine = engine};
}
/// Whole, under another name for engines.
constexpr TowerTensor Named(std::string_view name, std::string_view engine, SizeOf first,
                            SizeOf second = nullptr) {
  return {.name = name, .shape = {first, second}, .engine = engine};
}
/// One for each further merger.
constexpr TowerTensor EachMerger(TowerTensor tensor) {
  tensor.count = kMergers;
  return tensor;
}
constexpr TowerTensor If(IsPresent present, TowerTensor tensor) {
  tensor.present = present;
  return tensor;
}
constexpr TowerTensor Columns(std::string_view name, SizeOf rows, SizeOf columns) {
  return {.name = name, .shape = {rows, columns}, .cut = TowerCut::kColumns};
}
/// Of SigLIP's pooling head, which language models have no use for.
constexpr TowerTensor Pooling(std::string_view name, SizeOf first, SizeOf second = nullptr,
                              SizeOf third = nullptr) {
  return {.name = name,
          .shape = {first, second, third},
          .cut = TowerCut::kAbsent,
          .present = kWithPooling};
}

}  // namespace weightwire::layout::tower
