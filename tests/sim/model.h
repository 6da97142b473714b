#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/control/control.h"
#include "server/coordinator/journal.h"
#include "server/layout/scheme.h"
#include "tests/support/dense_oracle.h"

namespace weightwire::sim {

struct PartyOfModel;
/// What a group's ranks hold, and the spec that says so to the service.
struct Party {
  std::string spec;
  uint32_t world_size = 1;
  std::vector<oracle::Tensors> (*ranks)(const oracle::DenseConfig&,
                                        const oracle::Tensors& hf) = nullptr;
  /// Instead of `ranks`: of several models, or of the one that an engine holds; `spec` is a name
  /// only.
  std::vector<PartyOfModel> models = {};
};
/// A model of its own bytes on the last ranks of a group.
struct PartyOfModel {
  std::string model;
  Party party;
  /// Of a rank of the group its rank among those that have the model; nullopt: it has nothing.
  std::optional<uint32_t> RankOf(uint32_t rank, const Party& group) const {
    const uint32_t first = group.world_size - party.world_size;
    return rank < first ? std::nullopt : std::optional<uint32_t>(rank - first);
  }
};
/// A trainer that has both; the reward model is not on more ranks than the actor.
Party TwoModels(Party actor, Party reward);
Party EngineOf(std::string model, Party party);
Party MegatronTp2Pp2();
Party MegatronTp2();
Party VllmTp1();
Party VllmTp2();
Party HuggingFace();

/// What the model's `version` is of a version: the same number means other bytes in each lineage.
constexpr uint64_t ContentOf(const coordinator::VersionId& id) {
  return 1000 * (id.lineage - coordinator::kFirstLineage) + id.version.value;
}

/// A tiny qwen2 whose every element differs between versions: what each rank's memory must hold, by
/// the oracle of the loaders. Elements are BF16: the low 16 bits of the oracle's cells.
class Model {
 public:
  const oracle::DenseConfig& config() const { return config_; }
  const std::string& config_json() const { return config_json_; }

  /// What the rank submits.
  control::LayoutSubmission Layout(const Party& party, uint32_t rank) const;
  /// Names, types and shapes, in the order in which the rank binds its memory. Of one model.
  const std::vector<layout::ObservedTensor>& Observed(const Party& party, uint32_t rank) const;
  /// The bytes of every tensor of a rank, in the same order. Padding has `padding` in each byte.
  const std::vector<std::vector<uint8_t>>& Bytes(const Party& party, uint32_t rank,
                                                 uint64_t version, uint8_t padding) const;
  /// All bytes of a buffer that holds a version: a stage is made of zeros, and what is padding or
  /// between tensors is never written.
  const std::vector<uint8_t>& Buffer(const Party& party, uint32_t rank, uint64_t version) const;

 private:
  using Image = std::vector<std::vector<uint8_t>>;
  Image ImageOfModels(const Party& party, uint32_t rank, uint64_t version, uint8_t padding) const;
  oracle::DenseConfig config_{.model_type = "qwen2",
                              .hidden = 16,
                              .layers = 2,
                              .heads = 4,
                              .kv_heads = 2,
                              .head_dim = 3,
                              .intermediate = 10,
                              .vocab = 9};
  const std::string config_json_ = oracle::ConfigJson(config_);
};

}  // namespace weightwire::sim
