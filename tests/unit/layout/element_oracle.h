#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Where each element of a dense model's local parameter comes from, worked out from the
/// parameter's name and one element's coordinates, by formulas that share nothing with the schemes.
namespace weightwire::layout::oracle {

struct Sizes {
  std::string model_type;
  int64_t hidden = 0, layers = 0, heads = 0, kv = 0, head_dim = 0, inter = 0, vocab = 0;
  bool tied = false, attention_bias = false, mlp_bias = false;
  int64_t tp = 1, pp = 1, cp = 1, dp = 1;
  std::vector<int64_t> stages;  ///< layers by stage
  int64_t vocab_rows = 0;       ///< padded
  std::string ConfigJson() const;
};

struct Element {
  std::string tensor;
  int64_t row = 0;
  int64_t column = 0;  ///< 0 for tensors with one dimension
};

/// nullopt: padding. `rows` and `columns` of a one-dimensional parameter are its length and 1.
std::optional<Element> MegatronElement(const Sizes& s, int64_t t, int64_t stage,
                                       const std::string& name, int64_t row, int64_t column,
                                       bool te_names);
std::optional<Element> VllmElement(const Sizes& s, int64_t t, const std::string& name, int64_t row,
                                   int64_t column);
/// How many ranks hold each element of the canonical tensor.
int64_t MegatronCopies(const Sizes& s, const std::string& tensor);
int64_t VllmCopies(const Sizes& s, const std::string& tensor);

}  // namespace weightwire::layout::oracle
