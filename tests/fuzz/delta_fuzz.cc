// The code of a delta, as a peer may send it: kind and size of the block, then the code. It is
// refused or applied; nothing outside of the block changes.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "server/delta/coder.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weightwire::kernels::DeltaOrder;
  constexpr size_t kBlockMax = 4096;
  static weightwire::delta::Coder coder(kBlockMax);
  if (size < 3) return 0;
  const auto order = static_cast<DeltaOrder>(data[0] % weightwire::kernels::kDeltaOrders);
  const auto width = static_cast<size_t>(weightwire::kernels::DeltaElementBytes(order));
  const size_t bytes =
      std::min<size_t>((data[1] | data[2] << 8) % (kBlockMax + 1), kBlockMax) / width * width;
  const std::vector<std::byte> code(reinterpret_cast<const std::byte*>(data) + 3,
                                    reinterpret_cast<const std::byte*>(data) + size);
  std::vector<std::byte> target(
      bytes, std::byte{0x40});  // of its own size: AddressSanitizer sees one more
  (void)coder.Apply(order, code, target);
  return 0;
}
