#include "server/rpc/random.h"

#include <sys/random.h>

#include "server/base/status.h"

namespace weightwire::rpc {

void RandomBytes(void* out, size_t bytes) {
  // Requests of at most 256 bytes are never cut short by a signal.
  WW_CHECK(bytes <= 256);
  WW_CHECK(getrandom(out, bytes, 0) == static_cast<ssize_t>(bytes));
}

uint64_t RandomNonZero() {
  uint64_t out = 0;
  while (out == 0) RandomBytes(&out, sizeof(out));
  return out;
}

}  // namespace weightwire::rpc
