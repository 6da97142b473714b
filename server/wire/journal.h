#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/coordinator/journal.h"

namespace weightwire::wire {

/// A record as bytes: kind, format version, little-endian fields with explicit lengths, checksum.
std::string EncodeRecord(const coordinator::JournalRecord& record);
///   kDataLoss / kJournalFailed  not what EncodeRecord makes: cut, changed, or of a newer version
Result<coordinator::JournalRecord> DecodeRecord(std::string_view bytes);

/// Which alternative of JournalRecord the record is of that begins with these kHeadBytes; nullopt:
/// none that this version knows. Nothing of it is proven.
inline constexpr size_t kHeadBytes = 2;
std::optional<size_t> KindOf(std::string_view head);

}  // namespace weightwire::wire
