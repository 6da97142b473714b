#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "server/base/status.h"

namespace weightwire::device {

/// What names a GPU in every process: an index names it only where CUDA_VISIBLE_DEVICES is the
/// same.
struct Uuid {
  std::array<uint8_t, 16> bytes{};
  friend auto operator<=>(const Uuid&, const Uuid&) = default;
};

/// As nvidia-smi has it: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6".
std::string ToString(const Uuid& uuid);
/// Its end, for addresses, where room is short.
std::string ShortName(const Uuid& uuid);
///   kInvalidArgument / kInvalidRequest  not of that form
Result<Uuid> ParseUuid(std::string_view text);

}  // namespace weightwire::device
