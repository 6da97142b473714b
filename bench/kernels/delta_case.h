#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "server/delta/coder.h"

/// The deltas that kernels_bench measures: blocks of bf16 of which a share changed, most of it by
/// one unit in the last place, as an optimizer does.
namespace weightwire::kernels {

class DeltaCase {
 public:
  static constexpr size_t kBlockBytes = 1 << 20;

  DeltaCase(const std::vector<unsigned char>& source, double share)
      : versions_{Bytes(source.size()), {}} {
    std::memcpy(versions_[0].data(), source.data(), source.size());
    versions_[1] = versions_[0];
    std::mt19937_64 random(1);
    std::geometric_distribution<size_t> gap(share);
    for (size_t at = 2 * gap(random); at + 2 <= source.size(); at += 2 + 2 * gap(random)) {
      uint16_t bits;
      std::memcpy(&bits, &versions_[1][at], sizeof bits);
      const auto steps = static_cast<uint16_t>(random() % 8 == 0 ? 1 + random() % 6 : 1);
      bits = static_cast<uint16_t>(random() % 2 == 0 ? bits + steps : bits - steps);
      std::memcpy(&versions_[1][at], &bits, sizeof bits);
    }
    held_ = versions_[0];
    for (size_t i = 0; i < 2; ++i) Encode(i, [&](auto code) { codes_[i].push_back(code); });
  }

  /// Bytes of the codes.
  size_t Encode() {
    size_t bytes = 0;
    Encode(0, [&](const Bytes& code) { bytes += code.size(); });
    return bytes;
  }
  /// The other version in the place of the one that is held. `sum`: null, or gets that of blocks.
  size_t EncodeAndCopy(uint64_t* sum) {
    size_t bytes = 0;
    for (size_t at = 0; at < held_.size(); at += kBlockBytes) {
      bytes += coder_
                   .EncodeAndCopy(DeltaOrder::kFloat16, Block(held_, at),
                                  Block(versions_[1 - version_], at), kBlockBytes, sum)
                   .bytes.size();
    }
    version_ = 1 - version_;
    return bytes;
  }
  bool Apply() {
    bool applied = true;
    for (size_t at = 0; at < held_.size(); at += kBlockBytes) {
      applied &=
          coder_.Apply(DeltaOrder::kFloat16, codes_[version_][at / kBlockBytes], Block(held_, at))
              .ok();
    }
    version_ = 1 - version_;
    return applied;
  }
  /// The same with the other version somewhere else, and its sums.
  bool ApplyTo() {
    bool applied = true;
    made_.resize(held_.size());
    for (size_t at = 0; at < held_.size(); at += kBlockBytes) {
      applied &= coder_
                     .ApplyTo(DeltaOrder::kFloat16, codes_[version_][at / kBlockBytes],
                              Block(held_, at), Block(made_, at))
                     .has_value();
    }
    std::swap(held_, made_);
    version_ = 1 - version_;
    return applied;
  }
  /// What is held is the version that it should be.
  bool Right() const { return held_ == versions_[version_]; }

 private:
  using Bytes = std::vector<std::byte>;

  static std::span<std::byte> Block(Bytes& bytes, size_t at) {
    return std::span(bytes).subspan(at, std::min(kBlockBytes, bytes.size() - at));
  }
  /// From `version` to the other one.
  template <typename Take>
  void Encode(size_t version, Take take) {
    for (size_t at = 0; at < held_.size(); at += kBlockBytes) {
      const auto code = coder_.Encode(DeltaOrder::kFloat16, Block(versions_[version], at),
                                      Block(versions_[1 - version], at), kBlockBytes);
      take(Bytes(code.bytes.begin(), code.bytes.end()));
    }
  }

  delta::Coder coder_{kBlockBytes};
  Bytes versions_[2];
  std::vector<Bytes> codes_[2];  ///< from each version to the other
  Bytes held_, made_;
  size_t version_ = 0;  ///< of what is held
};

}  // namespace weightwire::kernels
