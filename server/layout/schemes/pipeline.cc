#include "server/layout/schemes/pipeline.h"

#include "server/base/checked.h"
#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

Status CannotDistribute(int64_t layers, int64_t stages, std::string_view how) {
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::to_string(layers) + " layers cannot be distributed over " +
                    std::to_string(stages) + " pipeline stages " + std::string(how))
      .Remedy("pass first= and last=, or every stage as in layers=7-7-6");
}

Result<std::vector<int64_t>> ExplicitCounts(std::string_view text, int64_t layers, int64_t stages) {
  WW_ASSIGN(std::vector<int64_t> counts, ParseDashedList("layers", text));
  int64_t total = 0;
  bool fits = static_cast<int64_t>(counts.size()) == stages;
  for (int64_t count : counts) fits = fits && !__builtin_add_overflow(total, count, &total);
  if (!fits || total != layers) {
    return Fail(CannotDistribute(layers, stages, "as layers=" + std::string(text)));
  }
  return counts;
}

Result<std::vector<int64_t>> DerivedCounts(const ParallelSpec& spec, int64_t layers,
                                           int64_t stages) {
  WW_ASSIGN(const std::optional<int64_t> first, IntegerOption(spec, "first", 1));
  WW_ASSIGN(const std::optional<int64_t> last, IntegerOption(spec, "last", 1));
  const int64_t even_stages = stages - (first ? 1 : 0) - (last ? 1 : 0);
  if (first.value_or(0) > layers || last.value_or(0) > layers - first.value_or(0)) {
    return Fail(CannotDistribute(layers, stages, "with that first= and last="));
  }
  const int64_t rest = layers - first.value_or(0) - last.value_or(0);
  const bool fits = even_stages > 0 ? rest >= even_stages && rest % even_stages == 0
                                    : even_stages == 0 && rest == 0;
  if (!fits)
    return Fail(
        CannotDistribute(layers, stages, first || last ? "with that first= and last=" : "evenly"));
  std::vector<int64_t> counts(static_cast<size_t>(stages),
                              even_stages > 0 ? rest / even_stages : 0);
  if (first) counts.front() = *first;
  if (last) counts.back() = *last;
  return counts;
}

}  // namespace

Result<std::vector<StageLayers>> PipelineStages(const ParallelSpec& spec, int64_t layers,
                                                int64_t stages) {
  const auto listed = spec.options.find("layers");
  if (listed != spec.options.end() &&
      (spec.options.contains("first") || spec.options.contains("last"))) {
    return Fail(BadOption("layers", listed->second, "allowed beside first= and last="));
  }
  WW_ASSIGN(const std::vector<int64_t> counts, listed != spec.options.end()
                                                   ? ExplicitCounts(listed->second, layers, stages)
                                                   : DerivedCounts(spec, layers, stages));
  std::vector<StageLayers> result;
  int64_t next = 0;
  for (int64_t count : counts) {
    result.push_back({next, count});
    next += count;
  }
  return result;
}

}  // namespace weightwire::layout
