#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weightwire::rpc {

/// Bytes from the kernel's generator; ends the process when it has none (a broken host).
void RandomBytes(void* out, size_t bytes);
/// Never 0.
uint64_t RandomNonZero();

}  // namespace weightwire::rpc
