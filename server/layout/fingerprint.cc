// Every value is fed as little-endian 64-bit words, every list and text after its length, so that
// no two different layouts give the same byte sequence.
#include <xxhash.h>

#include <memory>

#include "server/base/checked.h"
#include "server/layout/joined.h"

namespace weightwire::layout {
namespace {

class Digest {
 public:
  explicit Digest(std::string_view domain) : state_(XXH3_createState()) {
    WW_CHECK(state_ != nullptr);
    XXH3_128bits_reset(state_.get());
    Text(domain);
  }

  void Word(uint64_t value) {
    if (used_ + sizeof(value) > sizeof(buffer_)) Flush();
    for (size_t i = 0; i < sizeof(value); ++i) {
      buffer_[used_++] = static_cast<unsigned char>(value >> (8 * i));
    }
  }
  void Text(std::string_view text) {
    Word(text.size());
    Flush();
    XXH3_128bits_update(state_.get(), text.data(), text.size());
  }
  void Words(std::span<const int64_t> values) {
    Word(values.size());
    for (int64_t value : values) Word(static_cast<uint64_t>(value));
  }
  Fingerprint Finish() {
    Flush();
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return {hash.high64, hash.low64};
  }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  void Flush() {
    XXH3_128bits_update(state_.get(), buffer_, used_);
    used_ = 0;
  }

  std::unique_ptr<XXH3_state_t, Free> state_;
  unsigned char buffer_[1024];
  size_t used_ = 0;
};

/// Stands where a text's length would, and is none.
constexpr uint64_t kBlockFollows = ~uint64_t{0};
constexpr uint64_t kRuleFollows = kBlockFollows - 16;
constexpr uint64_t kPackedFollows = kBlockFollows - 64;

enum class Of { kShapes, kElements };

void AddCanonical(const CanonicalSpace& canonical, Digest& digest, Of of = Of::kShapes) {
  digest.Word(canonical.tensors.size());
  for (const TensorSpec& tensor : canonical.tensors) {
    digest.Text(tensor.name);
    digest.Word(static_cast<uint64_t>(tensor.dtype));
    if (of == Of::kShapes) {
      digest.Words(tensor.shape);
    } else {  // a shape whose count does not fit is refused by Validate
      digest.Word(static_cast<uint64_t>(CheckedProduct(tensor.shape).value_or(0)));
    }
    if (tensor.block.empty()) continue;
    digest.Word(kBlockFollows);
    digest.Words(tensor.block);
    if (tensor.scale_rule != ScaleRule::kQuotient) {
      digest.Word(kRuleFollows + static_cast<uint64_t>(tensor.scale_rule));
    }
    if (tensor.packed > 1) digest.Word(kPackedFollows + static_cast<uint64_t>(tensor.packed));
  }
}

void AddPiece(const Piece& piece, Digest& digest) {
  digest.Word(piece.tensor);
  digest.Words(piece.box.begin);
  digest.Words(piece.box.extent);
  digest.Word(static_cast<uint64_t>(piece.local_offset));
  digest.Words(piece.local_stride);
}

void AddRank(const RankLayout& rank, Digest& digest) {
  digest.Word(rank.tensors.size());
  for (const LocalTensor& tensor : rank.tensors) {
    digest.Text(tensor.name);
    digest.Word(static_cast<uint64_t>(tensor.dtype));
    digest.Words(tensor.shape);
    digest.Word(tensor.pieces.size());
    for (const Piece& piece : tensor.pieces) AddPiece(piece, digest);
  }
}

}  // namespace

std::string Fingerprint::ToHex() const { return PlanId{high, low}.ToHex(); }

Fingerprint FingerprintOf(const CanonicalSpace& canonical) {
  Digest digest("weightwire.canonical.v1");
  AddCanonical(canonical, digest);
  return digest.Finish();
}

Fingerprint ElementsFingerprintOf(const CanonicalSpace& canonical) {
  Digest digest("weightwire.elements.v1");
  AddCanonical(canonical, digest, Of::kElements);
  return digest.Finish();
}

Fingerprint FingerprintOf(const ModelLayout& layout) {
  Digest digest("weightwire.layout.v1");
  AddCanonical(layout.canonical, digest);
  digest.Word(layout.ranks.size());
  for (const RankLayout& rank : layout.ranks) AddRank(rank, digest);
  return digest.Finish();
}

}  // namespace weightwire::layout
