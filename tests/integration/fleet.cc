#include "tests/integration/fleet.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

/// The two bytes of a BF16 element that stand for a cell: any bit pattern, NaNs included.
uint16_t ElementOf(uint64_t cell) { return static_cast<uint16_t>(cell >> 21); }

std::vector<std::byte> BytesOf(const oracle::Array& array) {
  std::vector<std::byte> bytes(2 * array.cells.size());
  for (size_t i = 0; i < array.cells.size(); ++i) {
    const uint16_t element = ElementOf(array.cells[i]);
    std::memcpy(bytes.data() + 2 * i, &element, 2);
  }
  return bytes;
}

/// Elements of `found` that differ from `expected`; padding is nobody's.
size_t CountDifferences(const oracle::Array& expected, std::span<const std::byte> found) {
  size_t differences = 0;
  for (size_t i = 0; i < expected.cells.size(); ++i) {
    if (expected.cells[i] == oracle::kPadding) continue;
    uint16_t element = 0;
    std::memcpy(&element, found.data() + 2 * i, 2);
    if (element != ElementOf(expected.cells[i])) ++differences;
  }
  return differences;
}

}  // namespace

Party MegatronTp2Pp2() {
  return {"megatron:tp2,pp2,first=2", [](const oracle::DenseConfig& c, const oracle::Tensors& hf) {
            oracle::MegatronShape shape;
            shape.tp = 2;
            shape.stage_layers = {2, c.layers - 2};
            shape.vocab_rows = (c.vocab + 255) / 256 * 256;
            return oracle::MegatronRanks(c, hf, shape);
          }};
}

Party VllmTp1() {
  return {"vllm:tp1", [](const oracle::DenseConfig& c, const oracle::Tensors& hf) {
            return oracle::VllmRanks(c, hf, {});
          }};
}

Party VllmTp2() {
  return {"vllm:tp2", [](const oracle::DenseConfig& c, const oracle::Tensors& hf) {
            oracle::VllmShape shape;
            shape.tp = 2;
            return oracle::VllmRanks(c, hf, shape);
          }};
}

Party HuggingFaceWhole() {
  return {"hf", [](const oracle::DenseConfig&, const oracle::Tensors& hf) {
            return std::vector<oracle::Tensors>{hf};
          }};
}

oracle::DenseConfig TinyQwen2() {
  oracle::DenseConfig config;
  config.model_type = "qwen2";
  config.hidden = 11;
  config.layers = 3;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 5;
  config.intermediate = 14;
  config.vocab = 37;
  return config;
}

oracle::DenseConfig BiggerQwen2() {
  oracle::DenseConfig config = TinyQwen2();
  config.hidden = 301;
  config.vocab = 12'001;
  return config;
}

client::Layout SchemeLayout(const oracle::DenseConfig& config, const Party& party,
                            const oracle::Tensors& tensors) {
  client::Layout layout;
  layout.config_json = oracle::ConfigJson(config);
  layout.spec = party.spec;
  for (const auto& [name, array] : tensors) {
    layout.observed.push_back({name, layout::DType::kBF16, array.Shape()});
  }
  return layout;
}

client::Place PlaceOf(const std::string& agent_socket, const std::string& group, size_t rank,
                      size_t world_size) {
  client::Place place;
  place.agent_socket = agent_socket;
  place.group = group;
  place.rank = static_cast<uint32_t>(rank);
  place.world_size = static_cast<uint32_t>(world_size);
  return place;
}

Trainer::Trainer(const std::string& agent_socket, const oracle::DenseConfig& config,
                 const Party& party, const std::string& group)
    : config_(config), party_(party) {
  Open(agent_socket, group);
}

void Trainer::Open(const std::string& agent_socket, const std::string& group) {
  const auto ranks = party_.ranks(config_, oracle::HuggingFace(config_, 0));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    auto publisher = client::Publisher::Open(PlaceOf(agent_socket, group, rank, ranks.size()));
    ASSERT_TRUE(publisher.has_value()) << publisher.error().ToString();
    publishers_.push_back(std::move(*publisher));
    const Status bound = publishers_.back()->Bind(SchemeLayout(config_, party_, ranks[rank]));
    ASSERT_TRUE(bound.ok()) << bound.ToString();
  }
}

void Trainer::Fill(uint64_t salt) {
  const auto ranks = party_.ranks(config_, oracle::HuggingFace(config_, salt));
  ASSERT_EQ(ranks.size(), publishers_.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    size_t index = 0;
    for (const auto& [name, array] : ranks[rank]) {
      const std::vector<std::byte> bytes = BytesOf(array);
      const std::span<std::byte> memory = publishers_[rank]->arena().tensor(index++);
      ASSERT_EQ(memory.size(), bytes.size()) << name;
      std::memcpy(memory.data(), bytes.data(), bytes.size());
    }
  }
}

void Trainer::Scribble() {
  for (const auto& publisher : publishers_) {
    for (size_t index = 0; index < publisher->arena().tensor_count(); ++index) {
      const std::span<std::byte> memory = publisher->arena().tensor(index);
      std::memset(memory.data(), 0xEE, memory.size());
    }
  }
}

void Trainer::Publish(uint64_t version, const client::PublishOptions& options) {
  const Nanos end = SystemClock().Now() + kPatience;
  for (const auto& publisher : publishers_) {
    Status accepted = publisher->Publish(Version(version), options);
    while (accepted.reason() == Reason::kNotReady &&
           options.mode == client::PublishMode::kSnapshot && SystemClock().Now() < end) {
      accepted = publisher->Publish(Version(version), options);
    }
    ASSERT_TRUE(accepted.ok()) << accepted.ToString();
  }
}

Status Trainer::AwaitReleases(uint64_t version) {
  Status first;
  for (const auto& publisher : publishers_) {
    const Result<Epoch> released = publisher->WaitReleased(Version(version), kPatience);
    if (!released && first.ok()) first = released.error();
  }
  return first;
}

Engine::Engine(const std::string& agent_socket, const std::string& name,
               const oracle::DenseConfig& config, const Party& party)
    : name_(name), config_(config), party_(party) {
  Open(agent_socket);
}

void Engine::Open(const std::string& agent_socket) {
  const auto ranks = party_.ranks(config_, oracle::HuggingFace(config_, 0));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    auto subscriber = client::Subscriber::Open(PlaceOf(agent_socket, name_, rank, ranks.size()));
    ASSERT_TRUE(subscriber.has_value()) << subscriber.error().ToString();
    subscribers_.push_back(std::move(*subscriber));
    const Status bound = subscribers_.back()->Bind(SchemeLayout(config_, party_, ranks[rank]));
    ASSERT_TRUE(bound.ok()) << bound.ToString();
  }
  served_.resize(ranks.size());
}

void Engine::Install(uint64_t version, uint64_t salt) {
  std::optional<client::Offer> leader;
  for (size_t rank = 0; rank < subscribers_.size(); ++rank) {
    const auto offer = subscribers_[rank]->WaitOffer(kPatience);
    ASSERT_TRUE(offer.has_value()) << name_ << "/" << rank << " got no offer of version " << version
                                   << "; " << subscribers_[rank]->LastFence().ToString();
    ASSERT_EQ(offer->version.value, version) << name_ << "/" << rank;
    EXPECT_EQ(offer->leader, rank == 0);
    auto tensors = subscribers_[rank]->Flip(*offer);
    ASSERT_TRUE(tensors.has_value()) << tensors.error().ToString();
    served_[rank] = std::move(*tensors);
    Compare(rank, salt);
    if (offer->leader) leader = offer;
  }
  ASSERT_TRUE(leader.has_value());
  const Status acknowledged = subscribers_[0]->Acknowledge(*leader, std::chrono::microseconds(3));
  EXPECT_TRUE(acknowledged.ok()) << acknowledged.ToString();
}

void Engine::ExpectServes(uint64_t version, uint64_t salt) const {
  for (size_t rank = 0; rank < subscribers_.size(); ++rank) {
    const auto serving = subscribers_[rank]->Serving();
    ASSERT_TRUE(serving.has_value()) << name_ << "/" << rank << " serves nothing";
    EXPECT_EQ(serving->version.value, version) << name_ << "/" << rank;
    Compare(rank, salt);
  }
}

void Engine::Compare(size_t rank, uint64_t salt) const {
  const auto expected = party_.ranks(config_, oracle::HuggingFace(config_, salt)).at(rank);
  ASSERT_EQ(served_[rank].size(), expected.size());
  size_t index = 0;
  for (const auto& [name, array] : expected) {
    const std::span<const std::byte> found = served_[rank][index++];
    ASSERT_EQ(found.size(), 2 * array.cells.size()) << name;
    EXPECT_EQ(CountDifferences(array, found), 0u)
        << "elements of " << name << " on " << name_ << "/" << rank << " (" << party_.spec << ")";
  }
}

}  // namespace weightwire::integration
