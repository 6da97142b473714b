#pragma once

#include <string>
#include <string_view>

#include "server/coordinator/journal.h"

namespace weightwire::wire {

/// A record as bytes: kind, format version, little-endian fields with explicit lengths, checksum.
std::string EncodeRecord(const coordinator::JournalRecord& record);
///   kDataLoss / kJournalFailed  not what EncodeRecord makes: cut, changed, or of a newer version
Result<coordinator::JournalRecord> DecodeRecord(std::string_view bytes);

}  // namespace weightwire::wire
