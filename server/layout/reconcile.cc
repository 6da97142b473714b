#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "server/layout/head_names.h"
#include "server/layout/models.h"
#include "server/layout/scheme.h"
#include "server/layout/schemes/megatron_names.h"

namespace weightwire::layout {
namespace {

constexpr size_t kLinesMax = 20;

bool IsWeight(const ObservedTensor& tensor) { return !tensor.name.ends_with("_extra_state"); }

bool IsCast(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
}

/// The shape of an INT4 weight, which compressed-tensors stores as I64, Kimi's releases as I32.
bool IsShape(std::string_view tensor) { return tensor.ends_with(".weight_shape"); }

bool StandsFor(const ObservedTensor& found, DType expected) {
  return found.dtype == expected || (IsCast(found.dtype) && IsCast(expected)) ||
         (IsShape(found.name) && expected == DType::kI64 && found.dtype == DType::kI32);
}

std::string ShapeText(const Shape& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  }
  return text + "]";
}

std::string TensorText(DType dtype, const Shape& shape) {
  return std::string(DTypeName(dtype)) + " " + ShapeText(shape);
}

constexpr std::string_view kCompare =
    "compare the parallel spec and config.json with the running model";

bool IsHead(std::string_view name) {
  return IsHeadName(name) || EndsWithParts(name, "output_layer.weight");
}

/// What to do about a tensor that only one side has, or that has another shape.
std::string RemedyFor(Reason reason, std::string_view name) {
  if (reason == Reason::kTensorUnexpected && name.starts_with("mtp.")) {
    return "if the model has MTP layers, pass mtp=single, or mtp=fused where its checkpoint has "
           "all experts of an MTP layer in one tensor; otherwise do not report it";
  }
  if (name.find("experts.") != std::string_view::npos) {
    return "compare the number of experts in config.json, and ep in the parallel spec, with the "
           "running model";
  }
  if (reason == Reason::kTensorMissing) {
    return IsHead(name) ? "set tie_word_embeddings to true in config.json if the head is the "
                          "embedding; otherwise report it"
                        : "report it, or correct config.json and the parallel spec, by which this "
                          "rank has it";
  }
  if (reason == Reason::kTensorUnexpected) {
    return IsHead(name) ? "set tie_word_embeddings to false in config.json if the head is not the "
                          "embedding; otherwise do not report it"
                        : "do not report it, or correct config.json and the parallel spec, by "
                          "which this rank does not have it";
  }
  return std::string(kCompare);
}

/// The option that sets a vocabulary's padding; empty for tensors without one.
std::string_view PaddingOption(std::string_view name) {
  if (name.ends_with("embedding.word_embeddings.weight") || name.ends_with("output_layer.weight")) {
    return "vocab_pad";
  }
  if (name.ends_with("model.embed_tokens.weight") || name.ends_with("lm_head.weight")) {
    return "vocab_pad_to";
  }
  return {};
}

std::string ShapeRemedy(const LocalTensor& expected, const Shape& found) {
  const std::string_view option = PaddingOption(expected.name);
  const bool only_rows = !found.empty() && found.size() == expected.shape.size() &&
                         std::equal(found.begin() + 1, found.end(), expected.shape.begin() + 1);
  if (option.empty() || !only_rows) return RemedyFor(Reason::kShapeMismatch, expected.name);
  const std::string rows = std::to_string(found[0]);
  if (option == "vocab_pad") return "pass vocab_pad=N with N = " + rows + " × tp";
  return "pass vocab_pad_to=N such that the padded vocabulary has " + rows + " × tp rows";
}

/// Collects differences: the first one decides reason, tensor and remedy.
class Differences {
 public:
  void Add(Reason reason, const std::string& tensor, const std::string& line, std::string remedy) {
    if (count_++ == 0) {
      reason_ = reason;
      tensor_ = tensor;
      remedy_ = std::move(remedy);
    }
    if (count_ <= kLinesMax) lines_ += "\n  " + tensor + ": " + line;
  }
  bool empty() const { return count_ == 0; }
  Status ToStatus() && {
    std::string message = std::to_string(count_) +
                          (count_ == 1 ? " tensor differs" : " tensors differ") +
                          " from the expected layout:" + lines_;
    if (count_ > kLinesMax) message += "\n  … and " + std::to_string(count_ - kLinesMax) + " more";
    return Status(Code::kFailedPrecondition, reason_, std::move(message))
        .AtTensor(std::move(tensor_))
        .Remedy(std::move(remedy_));
  }

 private:
  size_t count_ = 0;
  Reason reason_ = Reason::kNone;
  std::string tensor_;
  std::string remedy_;
  std::string lines_;
};

void Compare(const LocalTensor& expected, const ObservedTensor& found, Differences& differences) {
  if (found.shape != expected.shape) {
    differences.Add(Reason::kShapeMismatch, found.name,
                    "expected " + TensorText(expected.dtype, expected.shape) + ", found " +
                        TensorText(found.dtype, found.shape),
                    ShapeRemedy(expected, found.shape));
  } else if (!StandsFor(found, expected.dtype)) {
    differences.Add(Reason::kDtypeMismatch, found.name,
                    "expected " + std::string(DTypeName(expected.dtype)) + ", found " +
                        std::string(DTypeName(found.dtype)) + ", and no cast is known",
                    IsCast(expected.dtype)
                        ? "hold it as BF16, F16 or F32, which are cast into one another"
                        : "hold it as expected, or correct quantization_config in this side's "
                          "config.json: a trainer of floats needs none");
  }
}

/// The first tensor that is not the same in both, as expected and found; nullopt when none is.
std::optional<std::array<std::string, 3>> FirstDifference(const CanonicalSpace& expected,
                                                          const CanonicalSpace& found) {
  const auto text = [](const TensorSpec* tensor) {
    if (tensor == nullptr) return std::string("none");
    const std::string spec = TensorText(tensor->dtype, tensor->shape);
    return tensor->block.empty() ? spec
                                 : spec + " in blocks of " + std::to_string(tensor->block[0]) +
                                       " × " + std::to_string(tensor->block.at(1));
  };
  auto e = expected.tensors.begin();
  auto f = found.tensors.begin();
  for (; e != expected.tensors.end() || f != found.tensors.end(); ++e, ++f) {
    const bool has_e = e != expected.tensors.end(), has_f = f != found.tensors.end();
    if (has_e && has_f && *e == *f) continue;
    const bool first_e = has_e && (!has_f || e->name <= f->name);
    const bool first_f = has_f && (!has_e || f->name <= e->name);
    return {
        {(first_e ? e : f)->name, text(first_e ? &*e : nullptr), text(first_f ? &*f : nullptr)}};
  }
  return std::nullopt;
}

Status CheckTieOf(std::string_view model, const CanonicalSpace& source,
                  const CanonicalSpace& target) {
  const auto find = [model](const CanonicalSpace& space, bool (*is)(std::string_view)) {
    const auto it = std::ranges::find_if(space.tensors, [=](const TensorSpec& tensor) {
      const ModelAndTensor name = SplitName(tensor.name);
      return name.model == model && is(name.tensor);
    });
    return it == space.tensors.end() ? nullptr : &*it;
  };
  const TensorSpec* in_source = find(source, IsHeadName);
  const TensorSpec* in_target = find(target, IsHeadName);
  const bool both_embed = find(source, IsEmbeddingName) && find(target, IsEmbeddingName);
  if (!both_embed || (in_source == nullptr) == (in_target == nullptr)) return OkStatus();
  const TensorSpec& head = in_source != nullptr ? *in_source : *in_target;
  const std::string text = TensorText(head.dtype, head.shape);
  return Status(Code::kFailedPrecondition,
                in_source != nullptr ? Reason::kTensorUnexpected : Reason::kTensorMissing,
                in_source != nullptr
                    ? "the target ties lm_head to the embedding: expected none in the "
                      "source, found " +
                          text
                    : "the source ties lm_head to the embedding, the target does not: "
                      "expected " +
                          text + " in the source, found none")
      .AtTensor(head.name)
      .Remedy("give both sides the same tie_word_embeddings in config.json");
}

}  // namespace

Status CheckSameModel(const CanonicalSpace& expected, const CanonicalSpace& found) {
  const auto difference = FirstDifference(expected, found);
  if (!difference) return OkStatus();
  const auto& [tensor, wanted, got] = *difference;
  return Status(Code::kFailedPrecondition, Reason::kShapeMismatch,
                "this rank's model differs from that of the group's other ranks: " + tensor +
                    ": expected " + wanted + ", found " + got)
      .AtTensor(tensor)
      .Remedy("give every rank the same config.json, or describe the same tensors on every rank");
}

Status CheckTie(const CanonicalSpace& source, const CanonicalSpace& target) {
  for (const std::string& model : ModelsOf(target)) {
    WW_RETURN_IF_ERROR(CheckTieOf(model, source, target));
  }
  return OkStatus();
}

Result<RankLayout> Reconcile(const RankLayout& scheme, std::vector<ObservedTensor> observed) {
  std::erase_if(observed, [](const ObservedTensor& tensor) { return !IsWeight(tensor); });
  const RankLayout expected = NamedAsReported(scheme, observed);
  std::unordered_map<std::string_view, const LocalTensor*> by_name;
  for (const LocalTensor& tensor : expected.tensors) by_name.emplace(tensor.name, &tensor);

  Differences differences;
  std::unordered_set<std::string_view> seen;
  RankLayout result;
  for (const ObservedTensor& found : observed) {
    const auto it = by_name.find(found.name);
    if (it == by_name.end()) {
      differences.Add(Reason::kTensorUnexpected, found.name,
                      "expected none, found " + TensorText(found.dtype, found.shape),
                      RemedyFor(Reason::kTensorUnexpected, found.name));
    } else if (!seen.insert(found.name).second) {
      differences.Add(Reason::kTensorUnexpected, found.name, "expected once, found twice",
                      "report each tensor once");
    } else {
      Compare(*it->second, found, differences);
      if (differences.empty()) {
        result.tensors.push_back(*it->second);
        result.tensors.back().dtype = found.dtype;
      }
    }
  }
  for (const LocalTensor& tensor : expected.tensors) {
    if (seen.contains(tensor.name)) continue;
    differences.Add(Reason::kTensorMissing, tensor.name,
                    "expected " + TensorText(tensor.dtype, tensor.shape) + ", found none",
                    RemedyFor(Reason::kTensorMissing, tensor.name));
  }
  if (!differences.empty()) return Fail(std::move(differences).ToStatus());
  return result;
}

}  // namespace weightwire::layout
