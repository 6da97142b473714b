#include <numeric>

#include "tests/support/family_oracle_megatron.h"

namespace weightwire::family_oracle {
namespace {

/// Numbers the layers: chunk 0 of every stage, then chunk 1 of every stage, …
Pipeline HandOut(int64_t pp, int64_t vpp, const std::vector<int64_t>& counts) {
  Pipeline pipeline(static_cast<size_t>(pp));
  int64_t next = 0;
  for (int64_t v = 0; v < vpp; ++v) {
    for (int64_t stage = 0; stage < pp; ++stage) {
      std::vector<int64_t> chunk;
      for (int64_t i = 0; i < counts[static_cast<size_t>(v * pp + stage)]; ++i) {
        chunk.push_back(next++);
      }
      pipeline[static_cast<size_t>(stage)].push_back(chunk);
    }
  }
  return pipeline;
}

}  // namespace

std::optional<Pipeline> EvenPipeline(int64_t layers, int64_t pp, int64_t vpp) {
  if (layers % (pp * vpp) != 0) return std::nullopt;
  const int64_t count = layers / (pp * vpp);
  Pipeline pipeline(static_cast<size_t>(pp));
  for (int64_t stage = 0; stage < pp; ++stage) {
    for (int64_t v = 0; v < vpp; ++v) {
      std::vector<int64_t> chunk(static_cast<size_t>(count));
      std::iota(chunk.begin(), chunk.end(), v * (layers / vpp) + stage * count);
      pipeline[static_cast<size_t>(stage)].push_back(chunk);
    }
  }
  return pipeline;
}

std::optional<Pipeline> AccountedPipeline(int64_t layers, int64_t pp, int64_t vpp, bool embedding,
                                          bool loss) {
  const int64_t counted = layers + (embedding ? 1 : 0) + (loss ? 1 : 0);
  if (counted % (pp * vpp) != 0) return std::nullopt;
  std::vector<int64_t> counts(static_cast<size_t>(pp * vpp), counted / (pp * vpp));
  if (embedding) --counts.front();
  if (loss) --counts.back();
  return HandOut(pp, vpp, counts);
}

std::optional<Pipeline> FirstLastPipeline(int64_t layers, int64_t pp, int64_t vpp, int64_t first,
                                          int64_t last) {
  const int64_t said = (first > 0 ? 1 : 0) + (last > 0 ? 1 : 0);
  const int64_t between = pp - said, rest = layers - first - last;
  if (between < 0 || rest < 0) return std::nullopt;
  if (between == 0 ? rest != 0 : rest == 0 || rest % between != 0) return std::nullopt;
  std::vector<int64_t> stages;
  for (int64_t stage = 0; stage < pp; ++stage) {
    if (stage == 0 && first > 0) {
      stages.push_back(first);
    } else if (stage == pp - 1 && last > 0) {
      stages.push_back(last);
    } else {
      stages.push_back(rest / between);
    }
  }
  std::vector<int64_t> counts;
  for (int64_t v = 0; v < vpp; ++v) {
    for (int64_t count : stages) {
      if (count % vpp != 0) return std::nullopt;
      counts.push_back(count / vpp);
    }
  }
  return HandOut(pp, vpp, counts);
}

std::optional<Pipeline> ListedPipeline(int64_t layers, int64_t pp, int64_t vpp,
                                       const std::vector<int64_t>& counts) {
  if (std::ssize(counts) != pp * vpp) return std::nullopt;
  if (std::accumulate(counts.begin(), counts.end(), int64_t{0}) != layers) return std::nullopt;
  return HandOut(pp, vpp, counts);
}

}  // namespace weightwire::family_oracle
