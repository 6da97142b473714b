/* Of what libstdc++ asks the C library for, the one function that is newer than glibc 2.34: std::random_device's. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

uint32_t arc4random(void) {
  uint32_t value;
  for (;;) {
    const ssize_t got = getrandom(&value, sizeof value, 0);
    if (got == sizeof value) return value;
    if (got < 0 && errno != EINTR) abort();
  }
}
