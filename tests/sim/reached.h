#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>

#include "server/coordinator/coordinator.h"

namespace weightwire::sim {

/// What runs of the simulation came across: a branch that is never taken proves nothing.
class Reached {
 public:
  void Count(const std::string& what, uint64_t times = 1) { counts_[what] += times; }
  void Count(const coordinator::EpochStatus& epoch);
  /// One line for each count; Read adds what Write wrote.
  void Write(std::ostream& out) const;
  void Read(std::istream& in);
  /// Fails the test for everything that must be reached and was not.
  void ExpectAll() const;

 private:
  std::map<std::string, uint64_t> counts_;
};

}  // namespace weightwire::sim
