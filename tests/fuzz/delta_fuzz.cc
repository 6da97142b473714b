// A delta: order and size of the block, then either the code, as a peer may send it, which is
// refused or applied without memory being taken for what it says of itself; or the two versions of
// a block, which the code of one from the other restores.
#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "server/delta/coder.h"

namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kBlockMax = 4096;
/// Of a Status with its words.
constexpr size_t kSmall = 1024;

std::atomic<size_t> largest{0};
void Allocated(const volatile void*, size_t size) { largest = std::max<size_t>(largest, size); }
void Freed(const volatile void*) {}

void Require(bool holds) {
  if (!holds) std::abort();
}

void Apply(weightwire::delta::Coder& coder, weightwire::kernels::DeltaOrder order, size_t bytes,
           const Bytes& code) {
  const Bytes base(bytes, std::byte{0x40});
  Bytes target = base, made(bytes);  // of their own size: AddressSanitizer sees one more
  largest = 0;
  const bool in_place = coder.Apply(order, code, target).ok();
  const bool elsewhere = coder.ApplyTo(order, code, base, made).has_value();
  Require(largest <= kSmall);
  Require(in_place == elsewhere && (!in_place || target == made));
}

/// `input`: the most bytes of a code, then the newer version, as often as it takes; the older one
/// differs from it where a byte is odd.
void RoundTrip(weightwire::delta::Coder& coder, weightwire::kernels::DeltaOrder order, size_t bytes,
               const Bytes& input) {
  if (input.size() < 3) return;
  const auto code_bytes_max = std::to_integer<size_t>(input[0]) | std::to_integer<size_t>(input[1])
                                                                      << 8;
  Bytes now(bytes), base(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    now[i] = input[2 + i % (input.size() - 2)];
    base[i] = (now[i] & std::byte{1}) == std::byte{0} ? now[i] : now[i] ^ std::byte{3};
  }
  Bytes kept = base;
  const auto made = coder.EncodeAndCopy(order, kept, now, code_bytes_max);
  Require(kept == now && made.bytes.size() <= code_bytes_max);
  if (made.bytes.empty()) return;
  const Bytes code(made.bytes.begin(), made.bytes.end());
  Require(coder.Apply(order, code, base).ok() && base == now);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weightwire::kernels::DeltaOrder;
  using weightwire::kernels::kDeltaOrders;
  static weightwire::delta::Coder coder(kBlockMax);
  [[maybe_unused]] static const int hooked =
      __sanitizer_install_malloc_and_free_hooks(Allocated, Freed);
  if (size < 3) return 0;
  const int kind = data[0] % (2 * kDeltaOrders);
  const auto order = static_cast<DeltaOrder>(kind % kDeltaOrders);
  const auto width = static_cast<size_t>(weightwire::kernels::DeltaElementBytes(order));
  const size_t bytes =
      static_cast<size_t>(data[1] | data[2] << 8) % (kBlockMax + 1) / width * width;
  const auto rest = std::as_bytes(std::span(data, size)).subspan(3);
  const Bytes input(rest.begin(), rest.end());
  kind < kDeltaOrders ? Apply(coder, order, bytes, input) : RoundTrip(coder, order, bytes, input);
  return 0;
}
