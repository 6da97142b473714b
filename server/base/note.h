#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "server/base/ids.h"

namespace weightwire {

/// A line of the log that belongs to an epoch. What is logged where is the process's matter: rooms
/// that know no log hand out notes.
struct Note {
  Epoch epoch{};
  Version version{};
  std::array<uint8_t, 16> trace_id{};  ///< W3C; of the version, in every process that it passes
  std::string rank;                    ///< of an agent's notes: "engine-a/1"
  bool bad = false;                    ///< something was lost, refused or given up
  std::string text;
};
/// Must not block. Runs on the strand of whoever notes.
using Notes = std::function<void(const Note&)>;

}  // namespace weightwire
