#pragma once

#include <algorithm>
#include <vector>

#include "kernels/device.h"

namespace weightwire::kernels {

/// FourBitKernel, with blocks of so many threads, a multiple of those of a group.
inline void RunFourBit(const internal::DeviceFourBit& job, int threads) {
  const int shared = internal::ThreadsOfGroup(job.group);
  for (int64_t first = 0; first < job.rows * job.across; first += threads / shared) {
    std::vector<internal::FourBitUnit> units;
    std::vector<uint32_t> amax(static_cast<size_t>(threads / shared));
    for (int t = 0; t < threads; ++t) {
      units.push_back(internal::FourBitUnitOf(job, first, t));
      uint32_t& here = amax[static_cast<size_t>(t / shared)];
      here = std::max(here, internal::AmaxOfUnit(units.back()));
    }
    for (int t = 0; t < threads; ++t) {
      internal::QuantizeUnit(job, units[static_cast<size_t>(t)],
                             amax[static_cast<size_t>(t / shared)]);
    }
  }
}

}  // namespace weightwire::kernels
