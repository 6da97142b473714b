#include "server/layout/schemes/filter.h"

#include <algorithm>

#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

Status MatchesNothing(std::string_view key, std::string_view glob) {
  return Status(Code::kInvalidArgument, Reason::kTensorMissing,
                std::string(key) + "=" + std::string(glob) + " matches no tensor of the model")
      .Remedy("globs are compared with whole Hugging Face names, as in *.mlp.gate.weight");
}

/// Whether each canonical tensor matches one of the globs of option `key`; empty when the option
/// is not given.
Result<std::vector<bool>> Matches(const ParallelSpec& spec, const std::string& key,
                                  const CanonicalSpace& canonical) {
  std::vector<bool> matches;
  const auto option = spec.options.find(key);
  if (option == spec.options.end()) return matches;
  matches.resize(canonical.tensors.size());
  for (std::string_view glob : SplitList(option->second, '|')) {
    bool any = false;
    for (size_t i = 0; i < matches.size(); ++i) {
      if (!GlobMatches(glob, canonical.tensors[i].name)) continue;
      matches[i] = any = true;
    }
    if (!any) return Fail(MatchesNothing(key, glob));
  }
  return matches;
}

}  // namespace

bool GlobMatches(std::string_view glob, std::string_view name) {
  size_t g = 0, n = 0;
  size_t star = std::string_view::npos;  // the last '*' passed, and what it has swallowed up to
  size_t swallowed = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      swallowed = n;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == name[n])) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++swallowed;
    } else {
      return false;
    }
  }
  return glob.find_first_not_of('*', g) == std::string_view::npos;
}

Status ApplyFilters(const ParallelSpec& spec, ModelLayout& layout) {
  WW_ASSIGN_OR_STATUS(std::vector<bool> kept, Matches(spec, "only", layout.canonical));
  WW_ASSIGN_OR_STATUS(const std::vector<bool> skipped, Matches(spec, "skip", layout.canonical));
  if (kept.empty() && skipped.empty()) return OkStatus();
  kept.resize(layout.canonical.tensors.size(), kept.empty());
  for (size_t i = 0; i < skipped.size(); ++i) kept[i] = kept[i] && !skipped[i];
  if (std::find(kept.begin(), kept.end(), true) == kept.end()) {
    return Status(Code::kInvalidArgument, Reason::kTensorMissing, "only= and skip= leave no tensor")
        .Remedy("filters name what moves: leave out less");
  }
  for (RankLayout& rank : layout.ranks) {
    for (LocalTensor& tensor : rank.tensors) {
      std::erase_if(tensor.pieces, [&kept](const Piece& piece) { return !kept[piece.tensor]; });
    }
  }
  return OkStatus();
}

}  // namespace weightwire::layout
