#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/property/family_generator.h"

namespace weightwire {

/// Counts what the transfers of a run drew, so that nothing is silently left out.
class FamilyCoverage {
 public:
  void Add(const Case& drawn);
  /// What had to be drawn and was not: families, both sides' schemes, and words of the specs.
  std::vector<std::string> Missing() const;
  /// A table of families by scheme of source and target, then the count of each word.
  std::string Table() const;

 private:
  std::map<std::string, std::map<std::string, int>> families_;  ///< by family, "from hf", …
  std::map<std::string, int> words_;  ///< "megatron ep", "hf mtp=none", …
};

}  // namespace weightwire
