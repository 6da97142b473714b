#pragma once

/// What sums cost: the linker puts functions of this file in front of the kernels that sum
/// (CMakeLists.txt), so that the product has no such switch.
namespace weightwire::bench {

/// While false, copies are made as ever, every sum is 0, and nothing that arrives is checked. Of
/// this process; not while a transfer runs.
void SetSums(bool on);

}  // namespace weightwire::bench
