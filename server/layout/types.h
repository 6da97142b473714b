#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"

/// What a rank holds, in terms of the canonical space: Hugging Face names and global shapes.
namespace weightwire::layout {

/// Numbers are on the wire (proto weightwire.v1.DType); append only.
enum class DType : int {
  kBF16 = 1,
  kF16 = 2,
  kF32 = 3,
  kF64 = 4,
  kI8 = 5,
  kI16 = 6,
  kI32 = 7,
  kI64 = 8,
  kU8 = 9,
  kBool = 10,
  kF8E4M3 = 11,
  kF8E5M2 = 12,
  kF8E8M0 = 13,  ///< a power of two: 2^(byte - 127); 0xff is NaN
  kU16 = 14,
  kU32 = 15,
};
/// Bytes of one element: 1, 2, 4 or 8.
int ElementBytes(DType dtype);
/// safetensors' spelling: "BF16", "F8_E4M3", …
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);
std::optional<DType> DTypeFromNumber(int number);

/// The name of a weight's scales is the weight's and one of these, in checkpoints and in engines:
/// DeepSeek's and transformers' fp8, then compressed-tensors and modelopt.
inline constexpr std::string_view kScaleSuffixes[] = {"_scale_inv", "_scale"};
inline constexpr std::string_view kScaleSuffix = kScaleSuffixes[0];
/// The weight whose scales are called so; nullopt where it is no such name.
std::optional<std::string_view> WeightNameOf(std::string_view scales);
/// What compressed-tensors adds to the name of a weight whose elements lie packed, before it names
/// scales.
inline constexpr std::string_view kPackedSuffix = "_packed";
/// What gpt-oss adds to the name of a tensor with all experts.
inline constexpr std::string_view kFusedBlocks = "_blocks";
inline constexpr std::string_view kFusedScales = "_scales";
/// What modelopt adds to the name of a weight in NVFP4 for the scale of the whole tensor.
inline constexpr std::string_view kSecondScale = "_scale_2";
/// Scales of activations and of the KV cache, by the last part of their names: they follow from
/// calibration, not from weights, so that nothing makes them.
inline constexpr std::string_view kCalibrated[] = {"input_scale", "input_global_scale", "k_scale",
                                                   "v_scale"};
bool IsCalibrated(std::string_view tensor);
/// The name without kPackedSuffix.
std::string_view UnpackedName(std::string_view weight);

/// How the scale of a block follows from its largest magnitude. See kernels::ScaleKind.
enum class ScaleRule : int {
  kQuotient = 0,           ///< amax / 448, F32
  kPowerOfTwo = 1,         ///< the next power of two, F32 or a byte
  kOwnKind = 2,            ///< amax / 448 in the weight's own dtype
  kPowerOfTwoRounded = 3,  ///< compressed-tensors' power of two, a byte
  // Of elements of four bits: kernels::FourBitKind, in its order.
  kMxFp4 = 4,
  kMxFp4Rounded = 5,
  kNvFp4 = 6,
  kInt4 = 7,
  kNvFp4Modelopt = 8,
  kOwnQuotient = 9,  ///< of fp8: kQuotient, but quotients are rounded to the weight's own dtype
};
inline constexpr ScaleRule kLastScaleRule = ScaleRule::kOwnQuotient;
inline constexpr ScaleRule kFirstFourBitRule = ScaleRule::kMxFp4;
inline constexpr ScaleRule kLastFourBitRule = ScaleRule::kNvFp4Modelopt;
constexpr bool IsFourBit(ScaleRule rule) {
  return rule >= kFirstFourBitRule && rule <= kLastFourBitRule;
}
/// Whether codes follow from the largest magnitude of a whole tensor, or of several.
constexpr bool IsNvFp4(ScaleRule rule) {
  return rule == ScaleRule::kNvFp4 || rule == ScaleRule::kNvFp4Modelopt;
}
/// Whether scales by the rule, of a weight that was `from`, can be stored as `scales`.
bool CanStoreScales(ScaleRule rule, DType from, DType scales);

/// Extents, outermost first. A scalar has ndim 0 and one element.
using Shape = std::vector<int64_t>;
inline constexpr int kMaxDims = 8;

/// One tensor of the canonical space.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape;
  /// Of a quantized weight, [rows, columns]: the elements that share one scale. The scale of
  /// element (r, c) is element (r / block[0], c / block[1]) of the tensor `name` (without
  /// kPackedSuffix) + one of kScaleSuffixes. Empty for every other tensor, and where it is not
  /// known.
  Shape block = {};
  ScaleRule scale_rule = ScaleRule::kQuotient;  ///< of a weight with a block
  /// Weights that one element of it holds, along the last dimension: 2 of four bits in U8, 8 in
  /// I32.
  int64_t packed = 1;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// An axis-aligned block of a canonical tensor: `begin[d]` .. `begin[d] + extent[d]`, in elements.
struct Box {
  std::vector<int64_t> begin;
  std::vector<int64_t> extent;
  friend bool operator==(const Box&, const Box&) = default;
};
/// The common block of two boxes of equal ndim; nullopt when they share no element.
std::optional<Box> Intersect(const Box& a, const Box& b);
/// Elements of a valid box.
int64_t ElementCount(const Box& box);

/// One box of one canonical tensor, and where it lies inside a local tensor's storage: the element
/// at box.begin + i is at element `local_offset + Σ i[d] · local_stride[d]`.
///
/// A fused or interleaved tensor (qkv, gate_up, w13) is one local tensor with several pieces; a
/// transposed one has its strides exchanged. What no piece covers is padding: never read, never
/// written, never compared.
struct Piece {
  uint32_t tensor = 0;  ///< index into CanonicalSpace::tensors
  Box box;
  int64_t local_offset = 0;           ///< elements
  std::vector<int64_t> local_stride;  ///< elements, one per canonical dimension, all ≥ 1
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// A tensor as one rank's process holds it: contiguous row-major storage of `shape`.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape;
  std::vector<Piece> pieces;
  friend bool operator==(const LocalTensor&, const LocalTensor&) = default;
};
/// Bytes of the tensor's storage; nullopt when a size does not fit int64.
std::optional<int64_t> StorageBytes(DType dtype, std::span<const int64_t> shape);

/// All tensors of a model, sorted by name. Tied tensors appear once, under the name that
/// Hugging Face stores.
struct CanonicalSpace {
  std::vector<TensorSpec> tensors;
  friend bool operator==(const CanonicalSpace&, const CanonicalSpace&) = default;
  /// Index of `name`, by binary search; nullopt when absent.
  std::optional<uint32_t> Find(std::string_view name) const;
  /// The weight with a `block` whose scales tensor `scales` holds; nullopt when it is no such
  /// tensor.
  std::optional<uint32_t> WeightOf(uint32_t scales) const;
  /// The tensor with the scales of weight `name`; nullopt when there is none.
  std::optional<uint32_t> ScalesOf(std::string_view weight) const;
};

/// What one rank holds. Tensor order is the order of the rank's memory binding.
struct RankLayout {
  std::vector<LocalTensor> tensors;
  friend bool operator==(const RankLayout&, const RankLayout&) = default;
};

/// What all ranks of one group (the trainer, one engine, one checkpoint) hold.
struct ModelLayout {
  CanonicalSpace canonical;
  std::vector<RankLayout> ranks;  ///< by rank in the group, 0 … world_size − 1
  friend bool operator==(const ModelLayout&, const ModelLayout&) = default;
};

/// Limits on what a client may declare; each violation is kResourceExhausted / kLimitExceeded.
struct LayoutLimits {
  size_t canonical_tensors_max = 1'000'000;
  size_t local_tensors_per_rank_max = 1'000'000;
  size_t pieces_per_rank_max = 8'000'000;
  size_t ranks_max = 16'384;
  size_t name_bytes_max = 1'024;
  /// Work of the overlap proof per rank. Pieces as views, slices, transpositions and reshapes make
  /// them cost one step per pair that interleaves; only contrived strides come near the bound.
  int64_t overlap_steps_max = 100'000'000;
};

/// Checks one rank's layout on its own.
///
///   kInvalidArgument / kShapeOverflow     an element or byte count does not fit int64
///   kInvalidArgument / kInvalidRequest    ndim > kMaxDims or differs from the canonical tensor's,
///                                         negative extent, stride < 1, empty box, name empty or
///                                         duplicate
///   kInvalidArgument / kTensorMissing     a piece names no canonical tensor
///   kInvalidArgument / kShapeMismatch     a box leaves its canonical tensor, or its elements leave
///                                         the local tensor's storage
///   kInvalidArgument / kOverlappingShards two pieces, or two elements of one piece, share an
///                                         element of local storage
///   kResourceExhausted / kLimitExceeded   see LayoutLimits
/// The failure names the local tensor; the caller adds the rank.
Status ValidateRank(const CanonicalSpace& canonical, const RankLayout& rank,
                    const LayoutLimits& limits = {});
/// Checks the canonical space (sorted, unique, sizes fit, scales beside each weight with a block:
/// kInvalidRequest, kShapeMismatch) and every rank ("rank N" in the failure).
Status Validate(const ModelLayout& layout, const LayoutLimits& limits = {});

/// 128-bit digest (XXH3) of a layout: equal layouts, and only those, are expected to agree. Covers
/// canonical names, dtypes, shapes, blocks and every piece of every rank, with a domain separator
/// and explicit lengths, in little-endian order, so that it is the same on every host.
struct Fingerprint {
  uint64_t high = 0;
  uint64_t low = 0;
  friend constexpr auto operator<=>(const Fingerprint&, const Fingerprint&) = default;
  std::string ToHex() const;
};
Fingerprint FingerprintOf(const ModelLayout& layout);
Fingerprint FingerprintOf(const CanonicalSpace& canonical);

}  // namespace weightwire::layout
