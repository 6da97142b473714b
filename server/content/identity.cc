// Everything above the sums is folded, word by word, into two lanes of 64 bits that begin
// differently: h = Mix((h ^ word) + kGolden). Texts are fed as their length and their bytes in
// little-endian words, the last one filled up with zeros.
#include "server/content/identity.h"

#include <functional>
#include <numeric>
#include <utility>

namespace weightwire::content {
namespace {

using kernels::KeyedSum;
using layout::Fingerprint;

class Fold {
 public:
  explicit Fold(std::string_view domain) { Text(domain); }

  void Word(uint64_t word) {
    for (uint64_t& lane : lanes_) lane = kernels::Mix((lane ^ word) + kernels::kGolden);
  }
  void Text(std::string_view text) {
    Word(text.size());
    for (size_t at = 0; at < text.size(); at += 8) {
      uint64_t word = 0;
      for (size_t i = 0; i < 8 && at + i < text.size(); ++i) {
        word |= uint64_t{static_cast<unsigned char>(text[at + i])} << 8 * i;
      }
      Word(word);
    }
  }
  void Tensor(const layout::TensorSpec& tensor) {
    Text(tensor.name);
    Word(static_cast<uint64_t>(tensor.dtype));
    Word(static_cast<uint64_t>(Elements(tensor)));
  }
  kernels::SumSeed Seed() const { return {{lanes_[0], lanes_[1]}}; }
  Fingerprint Finish() const { return {lanes_[0], lanes_[1]}; }

 private:
  uint64_t lanes_[2] = {kernels::Mix(1), kernels::Mix(2)};
};

Fingerprint HashOf(const Leaf& leaf) {
  Fold fold("weightwire.content.leaf.2");
  fold.Tensor(leaf.tensor);
  for (uint64_t lane : leaf.sum.lane) fold.Word(lane);
  return fold.Finish();
}

Fingerprint Join(const Fingerprint& left, const Fingerprint& right) {
  Fold fold("weightwire.content.node.1");
  for (const Fingerprint& child : {left, right}) {
    fold.Word(child.high);
    fold.Word(child.low);
  }
  return fold.Finish();
}

}  // namespace

int64_t Elements(const layout::TensorSpec& tensor) {
  return std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
}

kernels::SumSeed SeedOf(std::string_view tensor) {
  Fold fold("weightwire.content.seed.1");
  fold.Text(tensor);
  return fold.Seed();
}

Fingerprint RootOf(std::span<const Leaf> leaves) {
  std::vector<Fingerprint> level;
  level.reserve(leaves.size());
  for (const Leaf& leaf : leaves) level.push_back(HashOf(leaf));
  while (level.size() > 1) {
    std::vector<Fingerprint> above;
    for (size_t i = 0; i + 1 < level.size(); i += 2) above.push_back(Join(level[i], level[i + 1]));
    if (level.size() % 2 == 1) above.push_back(level.back());
    level = std::move(above);
  }
  return level.empty() ? Fingerprint{} : level.front();
}

Fingerprint ClassOf(std::span<const Leaf> leaves) {
  Fold fold("weightwire.content.class.2");
  fold.Word(leaves.size());
  for (const Leaf& leaf : leaves) fold.Tensor(leaf.tensor);
  return fold.Finish();
}

}  // namespace weightwire::content
