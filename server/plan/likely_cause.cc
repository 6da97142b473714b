#include "server/plan/likely_cause.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace weightwire::plan {
namespace {

using layout::CanonicalSpace;
using layout::TensorSpec;

constexpr const char* kSameModel =
    "both sides must describe the same model: compare their config.json";

std::vector<std::string_view> PartsOf(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= name.size();) {
    const size_t dot = std::min(name.find('.', at), name.size());
    parts.push_back(name.substr(at, dot - at));
    at = dot + 1;
  }
  return parts;
}

bool IsNumber(std::string_view part) {
  return !part.empty() && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
}

size_t CommonPrefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

size_t CommonSuffix(std::string_view a, std::string_view b) {
  const auto ends = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend());
  return static_cast<size_t>(ends.first - a.rbegin());
}

/// Equal but for numbers: of another layer or expert.
bool DifferInNumbers(std::string_view a, std::string_view b) {
  const auto x = PartsOf(a), y = PartsOf(b);
  return std::ranges::equal(x, y, [](std::string_view one, std::string_view other) {
    return one == other || (IsNumber(one) && IsNumber(other));
  });
}

bool SameNumbers(std::string_view a, std::string_view b) {
  const auto numbers = [](std::string_view name) {
    std::vector<std::string_view> parts = PartsOf(name);
    std::erase_if(parts, [](std::string_view part) { return !IsNumber(part); });
    return parts;
  };
  return numbers(a) == numbers(b);
}

/// What stands before a common end of two dotted parts or more that has all numbers.
std::optional<std::pair<std::string, std::string>> OtherPrefix(std::string_view a,
                                                               std::string_view b) {
  size_t common = CommonSuffix(a, b);
  const auto begins_part = [&](std::string_view name) {
    return common == name.size() || name[name.size() - common - 1] == '.';
  };
  while (common > 0 && !(begins_part(a) && begins_part(b))) --common;
  const std::string_view end = a.substr(a.size() - common);
  const std::string_view before_a = a.substr(0, a.size() - common);
  const std::string_view before_b = b.substr(0, b.size() - common);
  const auto has_number = [](std::string_view name) {
    return std::ranges::any_of(PartsOf(name), IsNumber);
  };
  if (end.find('.') == std::string_view::npos || has_number(before_a) || has_number(before_b)) {
    return std::nullopt;
  }
  return std::pair(std::string(before_a), std::string(before_b));
}

/// Forms in which one side stores in one tensor what the other stores in several.
std::optional<std::string> OtherForm(const CanonicalSpace& source, std::string_view missing) {
  std::vector<std::string_view> parts = PartsOf(missing);
  const auto joined = [](const std::vector<std::string_view>& made) {
    std::string name;
    for (std::string_view part : made) name.append(name.empty() ? "" : ".").append(part);
    return name;
  };
  static constexpr std::pair<std::string_view, std::string_view> kForms[] = {
      {"q_proj", "qkv_proj"},        {"k_proj", "qkv_proj"},      {"v_proj", "qkv_proj"},
      {"gate_proj", "gate_up_proj"}, {"up_proj", "gate_up_proj"}, {"qkv_proj", "q_proj"},
      {"gate_up_proj", "gate_proj"}};
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const auto& [from, to] : kForms) {
      if (parts[i] != from) continue;
      std::vector<std::string_view> other = parts;
      other[i] = to;
      if (std::string name = joined(other); source.Find(name)) return name;
    }
    if (parts[i] != "experts" || i + 1 == parts.size()) continue;
    const bool single = IsNumber(parts[i + 1]);
    if (single && i + 2 == parts.size()) continue;
    const std::string_view matrix = parts[i + (single ? 2 : 1)];
    // transformers 5: experts.gate_up_proj; before: experts.N.gate_proj.weight
    for (std::string_view form : {matrix == "gate_proj" || matrix == "up_proj" ? "gate_up_proj"
                                  : matrix == "gate_up_proj"                   ? "gate_proj"
                                                                               : matrix,
                                  matrix}) {
      std::vector<std::string_view> other(parts.begin(),
                                          parts.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      if (!single) other.push_back("0");
      other.push_back(form);
      if (!single) other.push_back("weight");
      if (std::string name = joined(other); source.Find(name)) return name;
    }
  }
  return std::nullopt;
}

/// The name that only the source has and that shares most with `missing`, which it must do for
/// three fifths of their length.
const TensorSpec* Nearest(const CanonicalSpace& source, const CanonicalSpace& target,
                          std::string_view missing) {
  const TensorSpec* best = nullptr;
  size_t most = 0;
  for (const TensorSpec& tensor : source.tensors) {
    const size_t shorter = std::min(tensor.name.size(), missing.size());
    const size_t longer = std::max(tensor.name.size(), missing.size());
    const size_t common =
        std::min(shorter, CommonPrefix(missing, tensor.name) + CommonSuffix(missing, tensor.name));
    if (common <= most || 5 * common < 3 * longer || target.Find(tensor.name) ||
        !SameNumbers(tensor.name, missing)) {
      continue;
    }
    best = &tensor;
    most = common;
  }
  return best;
}

}  // namespace

std::string MissingRemedy(const CanonicalSpace& source, const CanonicalSpace& target,
                          const TensorSpec& missing) {
  const std::string& name = missing.name;
  if (const auto weight_name = layout::WeightNameOf(name)) {
    const std::string weight(*weight_name);
    if (const auto found = source.Find(weight)) {
      return "the source has " + weight + " as " +
             std::string(layout::DTypeName(source.tensors[*found].dtype)) +
             " without scales: give the target's config.json a quantization_config that can be "
             "followed on the way (fp8 with a weight_block_size), or publish quantized weights";
    }
  }
  if (const auto form = OtherForm(source, name)) {
    return "the source has " + *form +
           ", another form of it: describe the tensors on both sides as one checkpoint stores them";
  }
  bool other_numbers = false, any_common = false;
  for (const TensorSpec& tensor : source.tensors) {
    any_common = any_common || target.Find(tensor.name);
    other_numbers = other_numbers || DifferInNumbers(tensor.name, name);
  }
  for (const TensorSpec& tensor : source.tensors) {
    if (target.Find(tensor.name)) continue;
    if (const auto prefixes = OtherPrefix(name, tensor.name)) {
      return "the source has " + tensor.name + ": \"" + prefixes->second + "\" where the target " +
             "has \"" + prefixes->first + "\"; give the tensors the same names on both sides";
    }
  }
  if (const TensorSpec* nearest = Nearest(source, target, name)) {
    return "the nearest name that only the source has is " + nearest->name +
           ": give the tensor the same name on both sides";
  }
  if (other_numbers || !any_common) return kSameModel;
  return "publish it, or leave it out with skip= in the target's parallel spec; no name that only "
         "the source has is like it";
}

std::string ShapeRemedy(const TensorSpec& tensor, const layout::Shape& at_source) {
  const layout::Shape& wanted = tensor.shape;
  if (at_source != wanted && std::ranges::is_permutation(at_source, wanted)) {
    return "one side has it transposed: describe it as the checkpoint stores it";
  }
  const bool only_rows = !wanted.empty() && at_source.size() == wanted.size() &&
                         std::equal(wanted.begin() + 1, wanted.end(), at_source.begin() + 1);
  const bool vocabulary =
      tensor.name.ends_with("embed_tokens.weight") || tensor.name.ends_with("lm_head.weight");
  if (only_rows && vocabulary) {
    return "rows that pad the vocabulary are no part of the model: describe as many rows as "
           "vocab_size on both sides";
  }
  return kSameModel;
}

}  // namespace weightwire::plan
