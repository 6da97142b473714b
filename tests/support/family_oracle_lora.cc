#include "tests/support/family_oracle_lora.h"

#include <algorithm>
#include <set>

namespace weightwire::family_oracle {
namespace {

constexpr const char* kBefore = "base_model.model.";

/// "model.layers.3.self_attn.q_proj" → PEFT's name of matrix A or B.
std::string NameOf(const std::string& module, char matrix) {
  return kBefore + module + ".lora_" + matrix + ".weight";
}

/// Modules of the decoder's layers that the word means and the checkpoint has as one matrix.
std::vector<std::string> ModulesOf(const Config& c, const Tensors& hf, const std::string& module) {
  std::vector<std::string> modules;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    for (const std::string& plain : {LayerPrefix(layer) + "self_attn.", DensePrefix(c, layer)}) {
      const std::string at = Wrapped(c, plain);
      if (hf.contains(at + module + ".weight")) modules.push_back(at + module);
    }
  }
  return modules;
}

void AddInOrder(std::vector<int64_t>& order, std::set<int64_t>& seen, int64_t number) {
  if (seen.insert(number).second) order.push_back(number);
}

Array ColumnsOf(const Array& whole, const std::vector<int64_t>& columns) {
  Array out{{whole.rows(), std::ssize(columns)}, {}};
  for (int64_t row = 0; row < whole.rows(); ++row) {
    for (int64_t column : columns) {
      out.cells.push_back(whole.cells.at(static_cast<size_t>(row * whole.Width() + column)));
    }
  }
  return out;
}

Array RowsOf(const Array& whole, const std::vector<int64_t>& rows) {
  std::vector<Array> parts;
  for (int64_t row : rows) parts.push_back(Rows(whole, row, 1));
  return Concat(parts);
}

/// Rows and columns of `weight` among the rank's cells.
void FindHeld(const Array& weight, const Tensors& rank, std::vector<int64_t>& rows,
              std::vector<int64_t>& columns) {
  const uint64_t first = weight.cells.front(), end = weight.cells.back() + 1;
  std::set<int64_t> rows_seen, columns_seen;
  for (const auto& [name, array] : rank) {
    for (uint64_t cell : array.cells) {
      if (cell < first || cell >= end) continue;
      const auto at = static_cast<int64_t>(cell - first);
      AddInOrder(rows, rows_seen, at / weight.Width());
      AddInOrder(columns, columns_seen, at % weight.Width());
    }
  }
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& LoraTargets() {
  static const std::vector<std::pair<std::string, std::string>> targets = {
      {"q", "q_proj"},       {"k", "k_proj"},
      {"v", "v_proj"},       {"o", "o_proj"},
      {"gate", "gate_proj"}, {"up", "up_proj"},
      {"down", "down_proj"}, {"q_a", "q_a_proj"},
      {"q_b", "q_b_proj"},   {"kv_a", "kv_a_proj_with_mqa"},
      {"kv_b", "kv_b_proj"}};
  return targets;
}

Tensors Adapters(const Config& c, const Tensors& hf, int64_t rank,
                 const std::vector<std::string>& targets) {
  uint64_t next = 0;
  for (const auto& [name, array] : hf) next = std::max(next, array.cells.back() + 1);
  Tensors adapters;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    Array array{{rows, columns}, {}};
    for (int64_t i = 0; i < rows * columns; ++i) array.cells.push_back(next++);
    adapters[name] = std::move(array);
  };
  for (const auto& [word, leaf] : LoraTargets()) {
    const bool named = std::find(targets.begin(), targets.end(), word) != targets.end();
    if (!targets.empty() && !named) continue;
    for (const std::string& module : ModulesOf(c, hf, leaf)) {
      const Array& weight = hf.at(module + ".weight");
      add(NameOf(module, 'A'), rank, weight.Width());
      add(NameOf(module, 'B'), weight.rows(), rank);
    }
  }
  return adapters;
}

bool AdaptersFit(const Config& c, const std::vector<std::string>& targets) {
  const Tensors hf = HuggingFace(c);
  return std::all_of(targets.begin(), targets.end(),
                     [&](const std::string& word) { return !Adapters(c, hf, 1, {word}).empty(); });
}

std::vector<Tensors> AdapterRanks(const Tensors& hf, const Tensors& adapters,
                                  const std::vector<Tensors>& base) {
  std::vector<Tensors> ranks(base.size());
  for (const auto& [name, a] : adapters) {
    const size_t tail = name.find(".lora_A.weight");
    if (tail == std::string::npos) continue;
    const size_t head = std::string(kBefore).size();
    const std::string module = name.substr(head, tail - head);
    const Array& b = adapters.at(NameOf(module, 'B'));
    for (size_t rank = 0; rank < base.size(); ++rank) {
      std::vector<int64_t> rows, columns;
      FindHeld(hf.at(module + ".weight"), base[rank], rows, columns);
      if (rows.empty()) continue;
      ranks[rank][name] = ColumnsOf(a, columns);
      ranks[rank][NameOf(module, 'B')] = RowsOf(b, rows);
    }
  }
  return ranks;
}

}  // namespace weightwire::family_oracle
