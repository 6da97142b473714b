#include "tests/sim/model.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "server/memory/stage_store.h"

namespace weightwire::sim {
namespace {

constexpr int64_t kTrainerVocabRows = 12;
constexpr uint64_t kRewardDiffers = 500;  // more than a run has versions, less than a lineage

}  // namespace

Party MegatronTp2Pp2() {
  return {"megatron:tp2,pp2,vocab_pad=" + std::to_string(kTrainerVocabRows), 4,
          [](const oracle::DenseConfig& config, const oracle::Tensors& hf) {
            oracle::MegatronShape shape;
            shape.tp = 2;
            shape.stage_layers = {1, 1};
            shape.vocab_rows = kTrainerVocabRows;
            return oracle::MegatronRanks(config, hf, shape);
          }};
}

Party MegatronTp2() {
  return {"megatron:tp2,vocab_pad=" + std::to_string(kTrainerVocabRows), 2,
          [](const oracle::DenseConfig& config, const oracle::Tensors& hf) {
            oracle::MegatronShape shape;
            shape.tp = 2;
            shape.stage_layers = {2};
            shape.vocab_rows = kTrainerVocabRows;
            return oracle::MegatronRanks(config, hf, shape);
          }};
}

Party VllmTp1() {
  return {"vllm:tp1", 1, [](const oracle::DenseConfig& config, const oracle::Tensors& hf) {
            return oracle::VllmRanks(config, hf, {.tp = 1});
          }};
}

Party VllmTp2() {
  return {"vllm:tp2", 2, [](const oracle::DenseConfig& config, const oracle::Tensors& hf) {
            return oracle::VllmRanks(config, hf, {.tp = 2});
          }};
}

Party HuggingFace() {
  return {"hf", 1, [](const oracle::DenseConfig&, const oracle::Tensors& hf) {
            return std::vector<oracle::Tensors>{hf};
          }};
}

Party TwoModels(Party actor, Party reward) {
  const std::string name = actor.spec + " and " + reward.spec;
  const uint32_t world_size = actor.world_size;
  return {name, world_size, nullptr, {{"actor", std::move(actor)}, {"reward", std::move(reward)}}};
}

Party EngineOf(std::string model, Party party) {
  const std::string name = party.spec + " of " + model;
  const uint32_t world_size = party.world_size;
  return {name, world_size, nullptr, {{std::move(model), std::move(party)}}};
}

control::LayoutSubmission Model::Layout(const Party& party, uint32_t rank) const {
  control::LayoutSubmission submission;
  if (party.models.empty()) {
    submission.config_json = config_json_;
    submission.spec = party.spec;
    submission.observed = Observed(party, rank);
    return submission;
  }
  for (const PartyOfModel& of : party.models) {
    control::LayoutOfModel& model = submission.models.emplace_back();
    model.model = of.model;
    model.layout.config_json = config_json_;
    model.layout.spec = of.party.spec;
    const auto its = of.RankOf(rank, party);
    if (!its) continue;
    model.rank = *its;
    model.world_size = of.party.world_size;
    model.layout.observed = Observed(of.party, *its);
  }
  return submission;
}

// What follows is kept for all fleets: every model is the same, and a run of thousands of seeds has
// a dozen versions.

const std::vector<layout::ObservedTensor>& Model::Observed(const Party& party,
                                                           uint32_t rank) const {
  static std::map<std::string, std::vector<std::vector<layout::ObservedTensor>>> all;
  auto& of_ranks = all[party.spec];
  if (of_ranks.empty()) {
    for (const oracle::Tensors& tensors : party.ranks(config_, oracle::HuggingFace(config_, 0))) {
      auto& observed = of_ranks.emplace_back();
      for (const auto& [name, array] : tensors) {
        observed.push_back({name, layout::DType::kBF16, array.Shape()});
      }
    }
  }
  return of_ranks.at(rank);
}

const std::vector<std::vector<uint8_t>>& Model::Bytes(const Party& party, uint32_t rank,
                                                      uint64_t version, uint8_t padding) const {
  static std::map<std::tuple<std::string, uint64_t, uint8_t>, std::vector<Image>> images;
  std::vector<Image>& of_ranks = images[{party.spec, version, padding}];
  if (of_ranks.empty() && !party.models.empty()) {
    for (uint32_t r = 0; r < party.world_size; ++r) {
      of_ranks.push_back(ImageOfModels(party, r, version, padding));
    }
  }
  if (of_ranks.empty()) {
    const oracle::Tensors hf = oracle::HuggingFace(config_, 1);
    for (const oracle::Tensors& tensors : party.ranks(config_, hf)) {
      Image& image = of_ranks.emplace_back();
      for (const auto& [name, array] : tensors) {
        auto& bytes = image.emplace_back();
        for (uint64_t cell : array.cells) {
          const bool pad = cell == oracle::kPadding;
          // By so little from version to version that what changed can be coded.
          const uint64_t bits = cell + version;
          bytes.push_back(pad ? padding : static_cast<uint8_t>(bits));
          bytes.push_back(pad ? padding : static_cast<uint8_t>(bits >> 8));
        }
      }
    }
  }
  return of_ranks.at(rank);
}

Model::Image Model::ImageOfModels(const Party& party, uint32_t rank, uint64_t version,
                                  uint8_t padding) const {
  Image image;
  for (const PartyOfModel& of : party.models) {
    const auto its = of.RankOf(rank, party);
    if (!its) continue;
    const uint64_t own = of.model == "reward" ? kRewardDiffers : 0;
    const Image& part = Bytes(of.party, *its, version + own, padding);
    image.insert(image.end(), part.begin(), part.end());
  }
  return image;
}

const std::vector<uint8_t>& Model::Buffer(const Party& party, uint32_t rank,
                                          uint64_t version) const {
  static std::map<std::tuple<std::string, uint32_t, uint64_t>, std::vector<uint8_t>> buffers;
  std::vector<uint8_t>& buffer = buffers[{party.spec, rank, version}];
  if (buffer.empty()) {
    const Image& image = Bytes(party, rank, version, 0);
    std::vector<uint64_t> sizes;
    for (const auto& tensor : image) sizes.push_back(tensor.size());
    const memory::ArenaMap arena = memory::ArenaMapOf(sizes).value();
    buffer.resize(arena.bytes_total);
    for (size_t i = 0; i < image.size(); ++i) {
      std::ranges::copy(image[i], buffer.begin() + static_cast<ptrdiff_t>(arena.offsets[i]));
    }
  }
  return buffer;
}

}  // namespace weightwire::sim
