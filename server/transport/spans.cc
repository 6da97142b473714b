#include "server/transport/spans.h"

namespace weightwire::transport {

uint64_t TotalBytes(std::span<const MutableSpan> spans) {
  uint64_t total = 0;
  for (const MutableSpan& span : spans) total += span.size();
  return total;
}

}  // namespace weightwire::transport
