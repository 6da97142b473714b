#pragma once

#include <random>

#include "tests/support/family_oracle_engine.h"
#include "tests/support/family_oracle_fsdp.h"
#include "tests/support/family_oracle_lora.h"
#include "tests/support/family_oracle_megatron.h"
#include "tests/support/family_oracle_model.h"

namespace weightwire {

/// A glob of `only=` or `skip=`, and what it means.
struct Pattern {
  const char* glob;
  bool (*matches)(const std::string& name);
};

/// One side of a transfer: what to ask the schemes for, and what the oracle makes of it.
struct Party {
  enum class Kind { kHuggingFace, kMegatron, kEngine, kFsdp };
  Kind kind = Kind::kHuggingFace;
  family_oracle::MegatronShape megatron;
  family_oracle::EngineShape engine;
  family_oracle::FsdpShape fsdp;
  bool mtp = true;                 ///< it holds MTP layers where the model has them
  std::string scheme = "hf";       ///< the word before the colon
  std::vector<std::string> items;  ///< "tp2", "spec=te", …
  std::vector<Pattern> only, skip;
  int64_t lora = 0;  ///< rank of the adapters that stand in place of the weights
  std::vector<std::string> targets;

  std::string Spec() const;
  bool Fits(const family_oracle::Config& config) const;
  /// Whether its filters let the canonical tensor move.
  bool Keeps(const std::string& name) const;
  /// Every glob and every target means something that the model has.
  bool NamesFit(const family_oracle::Config& config) const;
  /// All that there is to hold: the checkpoint's tensors, or adapters.
  family_oracle::Tensors Canonical(const family_oracle::Config& config,
                                   const family_oracle::Tensors& hf) const;
  std::vector<family_oracle::Tensors> Ranks(const family_oracle::Config& config,
                                            const family_oracle::Tensors& hf,
                                            const family_oracle::Weights& weights) const;

 private:
  std::vector<family_oracle::Tensors> Weights(const family_oracle::Config& config,
                                              const family_oracle::Tensors& hf,
                                              const family_oracle::Weights& weights) const;
};

struct Case {
  family_oracle::Config config;
  Party from;
  Party to;
};

/// Draws models and layouts of both sides that mostly fit each other; equal seeds give equal cases.
class FamilyGenerator {
 public:
  explicit FamilyGenerator(uint64_t seed) : random_(seed) {}
  Case Draw();

 private:
  using Config = family_oracle::Config;

  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool OneIn(int64_t n) { return In(1, n) == 1; }
  template <typename T>
  T Pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(In(0, std::ssize(values) - 1))];
  }
  int64_t DivisorOf(int64_t n);
  /// A size, written or, when it is 1, mostly left out.
  void Size(Party& party, const char* word, int64_t size);

  // family_parties.cc
  Party DrawHuggingFace(const Config& c);
  Party DrawFsdp(const Config& c);
  void DrawFilters(Case& c);
  void DrawLora(Case& c);
  Party DrawMegatron(const Config& c, int64_t tp);
  void DrawExpertGrid(const Config& c, Party& party);
  void DrawPipeline(const Config& c, Party& party);
  size_t MtpChunk(const std::vector<int64_t>& counts, int64_t pp);
  std::string Notation(const std::vector<int64_t>& counts, int64_t mtp, size_t mtp_chunk);
  Party DrawEngine(const Config& c, int64_t tp, bool sglang);
  void DrawPlacement(const Config& c, Party& party);
  void DrawVocab(const Config& c, Party& party);

  // family_generator.cc
  void DrawOutline(Config& c);
  void DrawSizes(Config& c, const Party& from, const Party& to);
  void DrawAttention(Config& c, int64_t tp, bool loose);
  void DrawVision(family_oracle::Vision& v, int64_t tp, bool loose);
  void DrawMixture(Config& c, const Party& from, const Party& to, bool loose);

  std::mt19937_64 random_;
};

}  // namespace weightwire
