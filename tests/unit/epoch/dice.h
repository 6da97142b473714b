#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

namespace weightwire::epoch::testing {

/// A seeded source of choices; the same seed gives the same run on every platform.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  /// 0 … n − 1.
  size_t Below(size_t n) { return static_cast<size_t>(engine_() % n); }
  bool Percent(uint64_t percent) { return engine_() % 100 < percent; }
  template <typename T>
  const T& Pick(const std::vector<T>& from) {
    return from[Below(from.size())];
  }

 private:
  std::mt19937_64 engine_;
};

/// First seed of a property test: WEIGHTWIRE_SEED, or 1.
inline uint64_t FirstSeed() {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

}  // namespace weightwire::epoch::testing
