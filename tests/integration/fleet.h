#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/cpp/weightwire.h"
#include "tests/support/dense_oracle.h"

/// Trainers and engines that hold a tiny dense model, filled from and compared with the oracle.
namespace weightwire::integration {

/// One side of a transfer: its parallel spec, and what each of its ranks holds.
struct Party {
  std::string spec;
  std::vector<oracle::Tensors> (*ranks)(const oracle::DenseConfig&, const oracle::Tensors& hf);
};
Party MegatronTp2Pp2();
Party VllmTp1();
Party VllmTp2();
Party HuggingFaceWhole();

/// qwen2 with sizes that share no factor with a power of two where that is possible.
oracle::DenseConfig TinyQwen2();
/// The same with enough bytes that a transfer takes a while.
oracle::DenseConfig BiggerQwen2();

/// The scheme submission of a rank that holds `tensors`, in their order.
client::Layout SchemeLayout(const oracle::DenseConfig& config, const Party& party,
                            const oracle::Tensors& tensors);
client::Place PlaceOf(const std::string& agent_socket, const std::string& group, size_t rank = 0,
                      size_t world_size = 1);

/// Every rank of one trainer. Test failures say what went wrong.
class Trainer {
 public:
  Trainer(const std::string& agent_socket, const oracle::DenseConfig& config, const Party& party,
          const std::string& group = "trainer");

  /// Writes the checkpoint `salt` into every rank's memory.
  void Fill(uint64_t salt);
  /// Overwrites every rank's memory with one byte value.
  void Scribble();
  /// A version that still moves from its snapshot is waited for.
  void Publish(uint64_t version, const client::PublishOptions& options = {});
  /// The releases of all ranks; the first that failed.
  Status AwaitReleases(uint64_t version);

  client::Publisher& rank(size_t index) { return *publishers_.at(index); }
  /// The process of that rank leaves.
  void Close(size_t rank) { publishers_.at(rank).reset(); }

 private:
  void Open(const std::string& agent_socket, const std::string& group);

  const oracle::DenseConfig config_;
  const Party party_;
  std::vector<std::unique_ptr<client::Publisher>> publishers_;
};

/// Every rank of one engine.
class Engine {
 public:
  Engine(const std::string& agent_socket, const std::string& name,
         const oracle::DenseConfig& config, const Party& party);

  /// Takes the next offer on every rank, flips, compares every byte with checkpoint `salt`, and
  /// acknowledges. Test failures say what differs.
  void Install(uint64_t version, uint64_t salt);
  /// What was flipped to last still holds checkpoint `salt`.
  void ExpectServes(uint64_t version, uint64_t salt) const;

  client::Subscriber& rank(size_t index) { return *subscribers_.at(index); }
  size_t world_size() const { return subscribers_.size(); }

 private:
  void Open(const std::string& agent_socket);
  void Compare(size_t rank, uint64_t salt) const;

  const std::string name_;
  const oracle::DenseConfig config_;
  const Party party_;
  std::vector<std::unique_ptr<client::Subscriber>> subscribers_;
  std::vector<std::vector<std::span<const std::byte>>> served_;
};

}  // namespace weightwire::integration
