#pragma once

#include <algorithm>
#include <string_view>

/// Head and embedding of a language model, by the last parts of the names that checkpoints have for
/// them, whatever a wrapper puts before.
namespace weightwire::layout {

/// Whether `name` is `last` or ends with it as whole dotted parts.
constexpr bool EndsWithParts(std::string_view name, std::string_view last) {
  return name.ends_with(last) &&
         (name.size() == last.size() || name[name.size() - last.size() - 1] == '.');
}

constexpr bool IsHeadName(std::string_view name) { return EndsWithParts(name, "lm_head.weight"); }

/// Not the copies that MTP layers have in some checkpoints.
constexpr bool IsEmbeddingName(std::string_view name) {
  constexpr std::string_view kLast[] = {"embed_tokens.weight", "embeddings.weight",
                                        "word_embeddings.weight", "wte.weight"};
  return name.find("layers.") == std::string_view::npos &&
         std::ranges::any_of(kLast,
                             [name](std::string_view last) { return EndsWithParts(name, last); });
}

}  // namespace weightwire::layout
