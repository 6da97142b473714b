#pragma once

#include <cstdint>

namespace weightwire {

/// What a rank made of what changed since earlier versions, instead of reading it.
struct DeltaFigures {
  int64_t bytes = 0;       ///< that were made
  int64_t code_bytes = 0;  ///< that were read for them
  int64_t elements = 0;    ///< in `bytes`
  int64_t changed = 0;     ///< of `elements`, since the version before
  DeltaFigures& operator+=(const DeltaFigures& other) {
    bytes += other.bytes;
    code_bytes += other.code_bytes;
    elements += other.elements;
    changed += other.changed;
    return *this;
  }
  friend bool operator==(const DeltaFigures&, const DeltaFigures&) = default;
};

}  // namespace weightwire
