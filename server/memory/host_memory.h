#pragma once

#include <cstdint>
#include <string>

namespace weightwire::memory {

/// Bytes that this process may use: the machine's memory, or less where a cgroup (v2 or v1, any
/// from its own one up) allows less, as in a container. `root` is where the files are looked for.
uint64_t MemoryLimit(const std::string& root = "/");

}  // namespace weightwire::memory
