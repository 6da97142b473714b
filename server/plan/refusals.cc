#include "server/plan/refusals.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "server/plan/likely_cause.h"
#include "server/plan/plan.h"
#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::DType;
using layout::TensorSpec;

Status Refuse(Reason reason, std::string message) {
  return Status(Code::kFailedPrecondition, reason, std::move(message));
}

std::string DtypeRemedy(DType from, DType to) {
  if (to == DType::kF8E4M3) {
    return "BF16, F16 and F32 weights are quantized on the way where the engine's "
           "quantization_config says how, and scales can be stored (in the weight's own dtype for "
           "compressed-tensors); else run the engine "
           "without it, or publish the quantized weights";
  }
  if (from == DType::kF8E4M3) {
    return "weights are not dequantized on the way: give the engine the trainer's "
           "quantization_config, or publish the weights before they are quantized";
  }
  return "casts are known among BF16, F16 and F32 only";
}

/// A block of `box`, which the owners do not cover.
Box FirstMissing(const Box& box, const OwnerIndex& index) {
  std::vector<Box> remaining = {box};
  for (const Owner& owner : index.Candidates(box)) {
    std::vector<Box> next;
    for (const Box& left : remaining) {
      if (const std::optional<Box> part = layout::Intersect(left, owner.box)) {
        AppendRest(left, *part, next);
      } else {
        next.push_back(left);
      }
    }
    remaining = std::move(next);
  }
  return remaining.at(0);
}

std::string BlockText(const TensorSpec& weight) {
  return std::to_string(weight.block[0]) + " × " + std::to_string(weight.block[1]);
}

}  // namespace

Status OtherShape(const TensorSpec& tensor, const layout::Shape& at_source) {
  return Refuse(Reason::kShapeMismatch,
                "source has shape " + ShapeText(at_source) + ", target " + ShapeText(tensor.shape))
      .AtTensor(tensor.name)
      .Remedy(ShapeRemedy(tensor, at_source));
}

Status NeedsWholeTensor(const TensorSpec& weight) {
  return Refuse(Reason::kDtypeMismatch,
                "NVFP4 has one global scale of a whole tensor, which is not made on the way")
      .AtTensor(weight.name)
      .Remedy("make a checkpoint with wwctl convert --quantize and push it, or take MXFP4 or INT4");
}

namespace {

/// Packed weights of gpt-oss' experts, and what stands beside packed weights, of a source that has
/// those before they are packed.
std::optional<Status> OfPacked(const TensorSpec& tensor, const layout::CanonicalSpace& source,
                               const layout::CanonicalSpace& target) {
  for (const std::string_view suffix : {layout::kFusedBlocks, layout::kFusedScales}) {
    if (!tensor.name.ends_with(suffix)) continue;
    if (!source.Find(tensor.name.substr(0, tensor.name.size() - suffix.size()))) continue;
    return Refuse(Reason::kDtypeMismatch, "gpt-oss' MXFP4 is not made on the way")
        .AtTensor(tensor.name)
        .Remedy(
            "make a checkpoint with wwctl convert --quantize mxfp4-gpt-oss and push it, or run the "
            "engine without quantization_config");
  }
  for (const std::string_view suffix :
       {layout::kSecondScale, std::string_view("_global_scale"), std::string_view("_shape")}) {
    if (!tensor.name.ends_with(suffix)) continue;
    const std::string weight = tensor.name.substr(0, tensor.name.size() - suffix.size());
    const bool own_name = suffix == layout::kSecondScale;
    const auto packed =
        target.Find(own_name ? weight : weight + std::string(layout::kPackedSuffix));
    if (!packed || !source.Find(weight)) continue;
    if (suffix != "_shape") return NeedsWholeTensor(target.tensors[*packed]);
    return Refuse(Reason::kTensorMissing,
                  "the shape of a weight, which no version changes, is not sent")
        .AtTensor(tensor.name)
        .Remedy(
            "leave it out: hf:skip=*.weight_shape; the engine has it from the checkpoint with "
            "which it began");
  }
  return std::nullopt;
}

/// Scales that are calibrated, with the words that leave all of them out.
Status NotCalibrated(const TensorSpec& tensor, const layout::CanonicalSpace& source,
                     const layout::CanonicalSpace& target) {
  std::string words;
  for (const std::string_view scale : layout::kCalibrated) {
    const std::string end = std::string(".").append(scale);
    const bool lacks = std::ranges::any_of(target.tensors, [&](const TensorSpec& wanted) {
      return wanted.name.ends_with(end) && !source.Find(wanted.name);
    });
    if (lacks) words.append(words.empty() ? "hf:skip=*" : "|*").append(end);
  }
  return Refuse(Reason::kTensorMissing,
                "a scale of activations follows from calibration, not from weights, and the source "
                "has none")
      .AtTensor(tensor.name)
      .Remedy("leave it out, so that the engine keeps its own: " + words +
              "; or publish a checkpoint that has them, as engines with vLLM's plug-in need it");
}

Status Mismatch(const TensorSpec& tensor, uint32_t source_rank, DType from, uint32_t target_rank,
                DType to, const std::string& why) {
  return Refuse(Reason::kDtypeMismatch, RankText(Side::kSource, source_rank) + " holds " +
                                            std::string(layout::DTypeName(from)) + ", " +
                                            RankText(Side::kTarget, target_rank) + " wants " +
                                            std::string(layout::DTypeName(to)) + ", and " + why)
      .AtRank(RankText(Side::kTarget, target_rank))
      .AtTensor(tensor.name);
}

}  // namespace

Status NoSuchTensor(const TensorSpec& tensor, uint32_t target_rank,
                    const layout::CanonicalSpace& source, const layout::CanonicalSpace& target) {
  if (layout::IsCalibrated(tensor.name)) {
    return NotCalibrated(tensor, source, target).AtRank(RankText(Side::kTarget, target_rank));
  }
  if (auto packed = OfPacked(tensor, source, target)) {
    return std::move(*packed).AtRank(RankText(Side::kTarget, target_rank));
  }
  return Refuse(Reason::kTensorMissing, "the source has no such tensor")
      .AtRank(RankText(Side::kTarget, target_rank))
      .AtTensor(tensor.name)
      .Remedy(MissingRemedy(source, target, tensor));
}

Status NoCast(const TensorSpec& tensor, uint32_t source_rank, DType from, uint32_t target_rank,
              DType to) {
  return Mismatch(tensor, source_rank, from, target_rank, to, "no cast is known")
      .Remedy(DtypeRemedy(from, to));
}

Status NoScales(const TensorSpec& tensor, uint32_t source_rank, DType from, uint32_t target_rank,
                DType to) {
  return Mismatch(tensor, source_rank, from, target_rank, to,
                  "its format's scales are made in the dtype that a checkpoint has")
      .Remedy(
          "give the engine's own loader the checkpoint's tensors (mode hf_sharded in vLLM), or "
          "publish the quantized weights");
}

Status Unowned(const TensorSpec& tensor, uint32_t target_rank, const Box& box,
               const OwnerIndex& index) {
  return Refuse(Reason::kUnownedElement,
                "no source rank holds elements " + BoxText(FirstMissing(box, index)))
      .AtRank(RankText(Side::kTarget, target_rank))
      .AtTensor(tensor.name)
      .Remedy("check that all source ranks have registered and cover the tensor");
}

Status CutsBlocks(const TensorSpec& weight, uint32_t target_rank, const Box& box) {
  const bool four_bits = layout::IsFourBit(weight.scale_rule);
  const std::string columns = std::to_string(weight.block[1]);
  return Refuse(Reason::kShapeMismatch, RankText(Side::kTarget, target_rank) + " holds " +
                                            BoxText(box) + ", which cuts through blocks of " +
                                            BlockText(weight) + " that have one " +
                                            (four_bits ? "scale" : "fp8 scale"))
      .AtRank(RankText(Side::kTarget, target_rank))
      .AtTensor(weight.name)
      .Remedy(four_bits ? "columns must begin and end at multiples of " + columns
                        : "what is quantized on the way must be cut at blocks: choose other "
                          "parallel sizes of the engine, or publish the quantized weights");
}

Status OtherRule(const TensorSpec& weight) {
  return Refuse(Reason::kDtypeMismatch,
                "source and target have scales of it by different rules (one a power of two, say)")
      .AtTensor(weight.name)
      .Remedy("give both sides the same quantization_config, with its scale_fmt");
}

Status HasScales(const TensorSpec& weight, const std::string& scales) {
  return Refuse(Reason::kDtypeMismatch,
                "the source holds " + scales + " beside a weight that is not fp8")
      .AtTensor(weight.name)
      .Remedy("publish the scales with the quantized weight, or neither");
}

Status LacksPartner(const TensorSpec& tensor, uint32_t target_rank, const Box& box,
                    const std::string& partner) {
  return Refuse(Reason::kTensorMissing, RankText(Side::kTarget, target_rank) + " holds " +
                                            BoxText(box) +
                                            " of it, but not what belongs to it of " + partner)
      .AtRank(RankText(Side::kTarget, target_rank))
      .AtTensor(tensor.name)
      .Remedy("codes and scales move together: filter both or neither with only= and skip=");
}

}  // namespace weightwire::plan
