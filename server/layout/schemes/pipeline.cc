#include "server/layout/schemes/pipeline.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

/// Layers of every chunk, in the order in which the model passes them: chunk v of stage p is at
/// v · stages + p.
using Counts = std::vector<int64_t>;

constexpr size_t kNotationMax = 1'000'000;

Status CannotDistribute(int64_t layers, int64_t stages, std::string_view how) {
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::to_string(layers) + " layers cannot be distributed over " +
                    std::to_string(stages) + " pipeline stages " + std::string(how))
      .Remedy("pass first= and last=, or every chunk as in layers=7-7-6");
}

Status BadNotation(std::string_view text) {
  return BadOption("layout", text, "Megatron's notation, as in Et*2|t*3|tL");
}

/// `text` without repetitions.
Result<std::string> Expand(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    std::string unit(1, text[i]);
    if (text[i] == '(') {
      size_t depth = 1;
      size_t end = i + 1;
      for (; end < text.size() && depth > 0; ++end) {
        depth += text[end] == '(' ? 1 : text[end] == ')' ? -1 : 0;
      }
      if (depth > 0) return Fail(BadNotation(text));
      WW_ASSIGN(unit, Expand(text.substr(i + 1, end - i - 2)));
      i = end;
    } else {
      ++i;
    }
    size_t times = 1;
    if (i < text.size() && text[i] == '*') {
      const size_t end = std::min(text.find_first_not_of("0123456789", i + 1), text.size());
      if (end == i + 1 || end - i > 7) return Fail(BadNotation(text));
      times = std::stoul(std::string(text.substr(i + 1, end - i - 1)));
      i = end;
    }
    if (times * unit.size() > kNotationMax - out.size()) return Fail(BadNotation(text));
    while (times-- > 0) out += unit;
  }
  return out;
}

/// Layers of every chunk, and the chunk with the MTP layers.
struct Placed {
  Counts counts;
  std::optional<size_t> mtp_chunk;
};

Status Misplaced(std::string_view text, const std::string& what) {
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                "layout=" + std::string(text.substr(0, 128)) + " " + what)
      .Remedy("pass what Megatron's --pipeline-model-parallel-layout has, as in Et*2|t*3|tmL");
}

/// Megatron's own checks. A notation that leaves E, m or L out speaks of decoder layers alone.
Status CheckSymbols(std::string_view text, const std::string& symbols, int64_t mtp_layers) {
  const auto count = [&symbols](char c) { return std::ranges::count(symbols, c); };
  if (count('E') > 1 || (count('E') == 1 && symbols.front() != 'E')) {
    return Misplaced(text, "has E in another place than the first, or twice");
  }
  if (count('L') > 1 || (count('L') == 1 && symbols.back() != 'L')) {
    return Misplaced(text, "has L in another place than the last, or twice");
  }
  const size_t first_mtp = symbols.find('m');
  if (first_mtp != std::string::npos && symbols.find('t', first_mtp) != std::string::npos) {
    return Misplaced(text, "has an MTP layer (m) before a decoder layer (t)");
  }
  if (count('m') != 0 && count('m') != mtp_layers) {
    return Misplaced(text, "has " + std::to_string(count('m')) +
                               " MTP layers (m), and the model has " + std::to_string(mtp_layers));
  }
  return OkStatus();
}

Result<Placed> ReadNotation(std::string_view text, int64_t mtp_layers, int64_t stages) {
  WW_ASSIGN(const std::string symbols, Expand(text));
  WW_FAIL_IF_ERROR(CheckSymbols(text, symbols, mtp_layers));
  Placed placed{{0}, std::nullopt};
  for (const char symbol : symbols) {
    const size_t chunk = placed.counts.size() - 1;
    if (symbol == '|') {
      placed.counts.push_back(0);
    } else if (symbol == 't') {
      ++placed.counts.back();
    } else if (symbol == 'm') {
      if (placed.mtp_chunk.value_or(chunk) != chunk) {
        return Fail(Misplaced(text, "has MTP layers (m) in two chunks"));
      }
      placed.mtp_chunk = chunk;
    } else if (symbol != 'E' && symbol != 'L') {
      return Fail(BadNotation(text));
    }
  }
  const size_t last_chunks = placed.counts.size() - std::min<size_t>(placed.counts.size(), stages);
  if (placed.mtp_chunk && *placed.mtp_chunk < last_chunks) {
    return Fail(Misplaced(text, "has MTP layers (m) in another than a stage's last chunk"));
  }
  return placed;
}

Status CheckListed(const Counts& counts, int64_t layers, int64_t stages, int64_t chunks,
                   const std::string& how) {
  int64_t total = 0;
  bool fits = static_cast<int64_t>(counts.size()) == stages * chunks;
  for (int64_t count : counts) fits = fits && !__builtin_add_overflow(total, count, &total);
  return fits && total == layers ? OkStatus() : CannotDistribute(layers, stages, how);
}

/// first= and last=: each stage's layers over its chunks evenly.
Result<Counts> UnevenCounts(const ParallelSpec& spec, int64_t layers, int64_t stages,
                            int64_t chunks) {
  WW_ASSIGN(const std::optional<int64_t> first, IntegerOption(spec, "first", 1));
  WW_ASSIGN(const std::optional<int64_t> last, IntegerOption(spec, "last", 1));
  const Status refused = CannotDistribute(layers, stages, "with that first= and last=");
  if (first.value_or(0) > layers || last.value_or(0) > layers - first.value_or(0)) {
    return Fail(refused);
  }
  const int64_t even_stages = stages - (first ? 1 : 0) - (last ? 1 : 0);
  const int64_t rest = layers - first.value_or(0) - last.value_or(0);
  const bool fits = even_stages > 0 ? rest >= even_stages && rest % even_stages == 0
                                    : even_stages == 0 && rest == 0;
  if (!fits) return Fail(refused);
  Counts of_stage(static_cast<size_t>(stages), even_stages > 0 ? rest / even_stages : 0);
  if (first) of_stage.front() = *first;
  if (last) of_stage.back() = *last;
  Counts counts;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t count : of_stage) {
      if (count % chunks != 0) return Fail(refused);
      counts.push_back(count / chunks);
    }
  }
  return counts;
}

Result<Counts> EvenCounts(const ParallelSpec& spec, int64_t layers, int64_t stages,
                          int64_t chunks) {
  WW_ASSIGN(const bool embedding, FlagOption(spec, "account_embedding"));
  WW_ASSIGN(const bool loss, FlagOption(spec, "account_loss"));
  const int64_t counted = layers + (embedding ? 1 : 0) + (loss ? 1 : 0);
  const int64_t all = stages * chunks;
  if (counted < all || counted % all != 0) {
    return Fail(CannotDistribute(
        layers, stages,
        chunks > 1 ? "of " + std::to_string(chunks) + " chunks evenly" : std::string("evenly")));
  }
  Counts counts(static_cast<size_t>(all), counted / all);
  if (embedding) --counts.front();
  if (loss) --counts.back();
  return counts;
}

Result<Placed> PlacedBy(const ParallelSpec& spec, int64_t layers, int64_t mtp_layers,
                        int64_t stages, int64_t chunks) {
  const auto listed = spec.options.find("layers");
  const bool both = spec.options.contains("pipeline") && spec.options.contains("layout");
  const auto notation = spec.options.find(spec.options.contains("layout") ? "layout" : "pipeline");
  const bool uneven = spec.options.contains("first") || spec.options.contains("last");
  const bool counted =
      spec.options.contains("account_embedding") || spec.options.contains("account_loss");
  const int ways = (listed != spec.options.end() ? 1 : 0) +
                   (notation != spec.options.end() ? 1 : 0) + (both ? 1 : 0) + (uneven ? 1 : 0) +
                   (counted ? 1 : 0);
  if (ways > 1) {
    return Fail(Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                       "layers=, layout=, pipeline=, first= with last=, and account_… exclude each "
                       "other")
                    .Remedy("keep one of them"));
  }
  if (listed != spec.options.end()) {
    WW_ASSIGN(Counts counts, ParseDashedList("layers", listed->second));
    WW_FAIL_IF_ERROR(CheckListed(counts, layers, stages, chunks, "as layers=" + listed->second));
    return Placed{std::move(counts), std::nullopt};
  }
  if (notation != spec.options.end()) {
    WW_ASSIGN(Placed placed, ReadNotation(notation->second, mtp_layers, stages));
    WW_FAIL_IF_ERROR(CheckListed(placed.counts, layers, stages, chunks,
                                 "as " + notation->first + "=" + notation->second));
    return placed;
  }
  WW_ASSIGN(Counts counts, uneven ? UnevenCounts(spec, layers, stages, chunks)
                                  : EvenCounts(spec, layers, stages, chunks));
  return Placed{std::move(counts), std::nullopt};
}

}  // namespace

Result<Pipeline> PipelineOf(const ParallelSpec& spec, int64_t layers, int64_t mtp_layers,
                            int64_t stages, int64_t chunks) {
  WW_ASSIGN(const Placed placed, PlacedBy(spec, layers, mtp_layers, stages, chunks));
  Pipeline pipeline;
  pipeline.chunks.resize(static_cast<size_t>(stages));
  pipeline.mtp_stage =
      placed.mtp_chunk ? static_cast<int64_t>(*placed.mtp_chunk) % stages : stages - 1;
  int64_t next = 0;
  for (size_t i = 0; i < placed.counts.size(); ++i) {
    pipeline.chunks[i % pipeline.chunks.size()].push_back({next, placed.counts[i]});
    next += placed.counts[i];
  }
  return pipeline;
}

}  // namespace weightwire::layout
