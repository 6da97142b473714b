#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

constexpr size_t kLinesMax = 20;

bool IsWeight(const ObservedTensor& tensor) { return !tensor.name.ends_with("_extra_state"); }

bool StandsFor(DType found, DType expected) {
  const auto is_float = [](DType dtype) {
    return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
  };
  return found == expected || (is_float(found) && is_float(expected));
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

/// The option that sets a vocabulary's padding; empty for tensors without one.
std::string_view PaddingOption(std::string_view name) {
  if (name == "embedding.word_embeddings.weight" || name == "output_layer.weight") {
    return "vocab_pad";
  }
  if (name == "model.embed_tokens.weight" || name == "lm_head.weight") return "vocab_pad_to";
  return {};
}

std::string ShapeRemedy(const LocalTensor& expected, const Shape& found) {
  const std::string_view option = PaddingOption(expected.name);
  const bool only_rows = !found.empty() && found.size() == expected.shape.size() &&
                         std::equal(found.begin() + 1, found.end(), expected.shape.begin() + 1);
  if (!option.empty() && only_rows) {
    const std::string rows = std::to_string(found[0]);
    if (option == "vocab_pad") return "pass vocab_pad=N with N = " + rows + " × tp";
    return "pass vocab_pad_to=N such that the padded vocabulary has " + rows + " × tp rows";
  }
  return "compare the parallel spec and config.json with the running model";
}

/// Collects differences: the first one decides reason, tensor and remedy.
class Differences {
 public:
  void Add(
      Reason reason, const std::string& tensor, const std::string& line,
      std::string remedy = "compare the parallel spec and config.json with the running model") {
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
  } else if (!StandsFor(found.dtype, expected.dtype)) {
    differences.Add(Reason::kDtypeMismatch, found.name,
                    "expected " + std::string(DTypeName(expected.dtype)) + ", found " +
                        std::string(DTypeName(found.dtype)) + ", and no cast is known");
  }
}

}  // namespace

Result<RankLayout> Reconcile(const RankLayout& expected, std::vector<ObservedTensor> observed) {
  std::erase_if(observed, [](const ObservedTensor& tensor) { return !IsWeight(tensor); });
  std::unordered_map<std::string_view, const LocalTensor*> by_name;
  for (const LocalTensor& tensor : expected.tensors) by_name.emplace(tensor.name, &tensor);

  Differences differences;
  std::unordered_set<std::string_view> seen;
  RankLayout result;
  for (const ObservedTensor& found : observed) {
    const auto it = by_name.find(found.name);
    if (it == by_name.end()) {
      differences.Add(Reason::kTensorUnexpected, found.name,
                      "not expected, found " + TensorText(found.dtype, found.shape));
    } else if (!seen.insert(found.name).second) {
      differences.Add(Reason::kTensorUnexpected, found.name, "expected once, found twice");
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
                    "expected " + TensorText(tensor.dtype, tensor.shape) + ", not found");
  }
  if (!differences.empty()) return Fail(std::move(differences).ToStatus());
  return result;
}

}  // namespace weightwire::layout
