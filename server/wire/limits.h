#pragma once

#include <cstddef>
#include <cstdint>

/// proto ↔ domain. Every conversion from the wire is total: it answers a Result and never trusts a
/// number, a size or an enum. Pure; thread-compatible.
namespace weightwire::wire {

// What one field may hold. A longer one is kInvalidArgument / kMessageTooLarge naming the field.
inline constexpr size_t kNameBytesMax = 1'024;      ///< tensor names
inline constexpr size_t kIdBytesMax = 128;          ///< jobs, groups: [A-Za-z0-9._-]
inline constexpr size_t kConfigBytesMax = 1 << 20;  ///< config.json
inline constexpr size_t kSpecBytesMax = 1'024;
inline constexpr size_t kTextBytesMax = 4'096;  ///< text for people
inline constexpr size_t kAddressBytesMax = 256;
inline constexpr size_t kAddressesMax = 16;       ///< transports of one agent
inline constexpr size_t kTensorsMax = 1'000'000;  ///< of one list
inline constexpr size_t kTraceOpsMax = 64;        ///< views of one copy, arguments of one view
inline constexpr size_t kPiecesMax = 8'000'000;   ///< of one rank
inline constexpr size_t kRanksMax = 16'384;
inline constexpr size_t kLegsMax = 16'384;  ///< plans that one member takes part in
inline constexpr size_t kDigestsMax = 4'000'000;
inline constexpr size_t kTroublesMax = 64;    ///< of one heartbeat
inline constexpr size_t kReceivingMax = 256;  ///< of one heartbeat
inline constexpr size_t kHeldMax = 16;        ///< contents of one rank's buffers

inline constexpr uint64_t kVersionMax = INT64_MAX;  ///< after the last number none could follow

// Of one slice, all parts together.
inline constexpr size_t kSliceStreamsMax = 4'000'000;
inline constexpr size_t kSliceOpsMax = 50'000'000;
inline constexpr size_t kSliceNameBytesMax = 256 << 20;
inline constexpr size_t kPartBytesMax = 1 << 20;  ///< of one SlicePart, of what one Reports carries

inline constexpr size_t kReportBytesMax = 64 << 20;  ///< all parts together
inline constexpr int kRefusedMax = 16;               ///< reasons of one Reported

// What a client takes in one answer (Python: client.py's MESSAGE_BYTES_MAX), and what a status
// fills of it: the epochs that were, oldest ones first, are left off beyond that.
inline constexpr size_t kAnswerBytesMax = 64 << 20;
inline constexpr size_t kStatusBytesMax = 48 << 20;

// An error travels twice in a call's trailers (grpc-message and grpc-status-details-bin), and these
// are limited to 8 KiB by every client that was not told otherwise. Longer texts are cut.
inline constexpr size_t kErrorMessageBytesMax = 2'000;
inline constexpr size_t kErrorRemedyBytesMax = 512;

}  // namespace weightwire::wire
