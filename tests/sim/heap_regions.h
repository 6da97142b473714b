#pragma once

#include "server/memory/region.h"

namespace weightwire::sim {

/// What a process would pass over a socket: one more descriptor of the region's memory.
memory::UniqueFd AnotherFd(const memory::MemoryRegion& region);

}  // namespace weightwire::sim
