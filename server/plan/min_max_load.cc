// Is a load T enough? Send flow from a root to every demand (its bytes), from a demand to the ranks
// of its set, and from every rank to a sink (T): T is enough when all bytes arrive. If not, the
// demands on the root's side of the least cut have more bytes than T times the ranks that they can
// use; these bytes over these ranks are a greater bound, which no way of sharing can beat.
// Beginning with the mean, T rises from bound to bound until one is enough: that one is the answer
// (Newton's method for fractional programs; it ends because every T is that of another set of
// demands). T is kept as a fraction, so that all flows are whole numbers. Flows are found by
// Dinic's algorithm.
#include "server/plan/min_max_load.h"

#include <algorithm>
#include <limits>

namespace weightwire::plan {
namespace {

__extension__ using Wide = __int128;  // bytes × ranks do not fit 64 bits

class FlowGraph {
 public:
  explicit FlowGraph(size_t nodes) : edges_of_(nodes), level_(nodes), next_(nodes) {}

  /// The edge's number; its capacity is set by SetCapacity.
  size_t Add(size_t from, size_t to) {
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, 0});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
    return edges_.size() - 2;
  }
  /// Also takes back the edge's flow.
  void SetCapacity(size_t edge, Wide capacity) {
    edges_[edge].capacity = capacity;
    edges_[edge + 1].capacity = 0;
  }
  Wide MaxFlow(size_t root, size_t sink) {
    Wide total = 0;
    while (Level(root, sink)) {
      std::fill(next_.begin(), next_.end(), size_t{0});
      while (const Wide pushed = Push(root, sink, std::numeric_limits<Wide>::max())) {
        total += pushed;
      }
    }
    return total;
  }
  /// After MaxFlow: whether the node is on the root's side of the least cut.
  bool Reached(size_t node) const { return level_[node] >= 0; }

 private:
  struct Edge {
    size_t to = 0;
    Wide capacity = 0;
  };

  bool Level(size_t root, size_t sink) {
    std::fill(level_.begin(), level_.end(), -1);
    std::vector<size_t> queue = {root};
    level_[root] = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      for (size_t edge : edges_of_[queue[i]]) {
        const size_t to = edges_[edge].to;
        if (edges_[edge].capacity == 0 || level_[to] >= 0) continue;
        level_[to] = level_[queue[i]] + 1;
        queue.push_back(to);
      }
    }
    return level_[sink] >= 0;
  }

  Wide Push(size_t node, size_t sink, Wide most) {
    if (node == sink) return most;
    for (size_t& i = next_[node]; i < edges_of_[node].size(); ++i) {
      const size_t e = edges_of_[node][i];
      if (edges_[e].capacity == 0 || level_[edges_[e].to] != level_[node] + 1) continue;
      const Wide pushed = Push(edges_[e].to, sink, std::min(most, edges_[e].capacity));
      if (pushed == 0) continue;
      edges_[e].capacity -= pushed;
      edges_[e ^ 1].capacity += pushed;
      return pushed;
    }
    return 0;
  }

  std::vector<Edge> edges_;  ///< each beside its reverse
  std::vector<std::vector<size_t>> edges_of_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

}  // namespace

double LeastGreatestLoad(const BytesByHolders& demands, uint32_t rank_count) {
  // Nodes: root, sink, demands, ranks.
  constexpr size_t kRoot = 0;
  constexpr size_t kSink = 1;
  const auto rank_node = [&](uint32_t rank) { return 2 + demands.size() + rank; };
  FlowGraph graph(2 + demands.size() + rank_count);
  std::vector<size_t> demand_edges;
  std::vector<size_t> choice_edges;
  std::vector<size_t> rank_edges;
  Wide total = 0;
  for (const auto& [ranks, bytes] : demands) {
    const size_t node = 2 + demand_edges.size();
    demand_edges.push_back(graph.Add(kRoot, node));
    for (uint32_t rank : ranks) choice_edges.push_back(graph.Add(node, rank_node(rank)));
    total += bytes;
  }
  for (uint32_t r = 0; r < rank_count; ++r) rank_edges.push_back(graph.Add(rank_node(r), kSink));
  if (total == 0) return 0;

  Wide load = total;  // T = load / divisor
  Wide divisor = rank_count;
  while (true) {
    size_t next = 0;
    for (const auto& [ranks, bytes] : demands) {
      graph.SetCapacity(demand_edges[next++], bytes * divisor);
    }
    for (size_t edge : choice_edges) graph.SetCapacity(edge, total * divisor);
    for (size_t edge : rank_edges) graph.SetCapacity(edge, load);
    if (graph.MaxFlow(kRoot, kSink) == total * divisor) {
      return static_cast<double>(load) / static_cast<double>(divisor);
    }
    load = 0;
    divisor = 0;
    size_t node = 2;
    for (const auto& [ranks, bytes] : demands) load += graph.Reached(node++) ? bytes : 0;
    for (uint32_t r = 0; r < rank_count; ++r) divisor += graph.Reached(rank_node(r)) ? 1 : 0;
  }
}

}  // namespace weightwire::plan
