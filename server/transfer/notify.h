#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/transport/transport.h"

/// What the two ends of a stream say to each other; see transfer.h for the conversation.
namespace weightwire::transfer {

inline constexpr uint8_t kNotifyVersion = 1;

/// Numbers are on the wire; append only.
enum class NotifyType : uint8_t {
  kOpen = 1,     ///< reader → source: ready to read the stream
  kBinding = 2,  ///< source → mapping reader: its tensors and its sums, as two exports
  kReady = 3,    ///< source → reader: a slot may be read
  kCredit = 4,   ///< reader → source: a slot was read and verified
  kClose =
      5,  ///< reader → source: all done, or given up; nothing of the source is touched any more
  kFail = 6,  ///< source → reader: cannot go on
  /// source → reader: `slot` has not come to the source yet, which is alive. Only to readers whose
  /// session has transport::kFeatureHearsWaiting.
  kWaiting = 7,
  /// source → reader: what changed in `slot` since earlier versions may be read (delta_slot.h),
  /// instead of the slot that is announced next. Only to readers whose session has
  /// transport::kFeatureTakesDelta.
  kDelta = 8,
};
/// "open", "ready", …
std::string_view NotifyTypeName(NotifyType type);

/// What a reader is told that holds up others which can do without it, and says itself then.
inline Status LeftBehind(std::string what) {
  return Status(Code::kDeadlineExceeded, Reason::kLimitExceeded, std::move(what));
}
inline bool IsLeftBehind(const Status& status) {
  return status.code() == Code::kDeadlineExceeded && status.reason() == Reason::kLimitExceeded;
}

/// One stream as one reader sees it. Every message carries it, so that no state is needed to decide
/// whether a message is stale.
struct StreamKey {
  Epoch epoch{};
  uint64_t plan_low = 0;  ///< PlanId::low
  uint32_t stream = 0;    ///< plan::Stream::id
  ParticipantId source{};
  ParticipantId reader{};
  friend constexpr auto operator<=>(const StreamKey&, const StreamKey&) = default;
};

/// A message; which fields count depends on `type`.
struct Notify {
  NotifyType type = NotifyType::kOpen;
  StreamKey key;

  // kOpen
  bool maps = false;  ///< the reader maps the source's memory; only sums are needed in slots
  uint64_t plan_high = 0;
  uint64_t segment_bytes_max = 0;  ///< both sides must cut alike
  uint64_t slot_bytes = 0;
  // kBinding
  transport::RegionKey binding{};  ///< one piece for each tensor of the source's binding
  transport::RegionKey sums{};     ///< one piece; kReady says where a slot's sums are
  // kReady, kCredit, kWaiting, kDelta
  uint32_t slot = 0;
  // kReady, kDelta
  transport::RegionKey memory{};  ///< the slot, or its SlotDelta; unused by a mapping reader
  // kDelta
  uint32_t delta_newest_bytes = 0;  ///< of the SlotDelta: to the end of the newest codes
  uint32_t delta_bytes = 0;         ///< all of it
  // kReady
  uint64_t offset = 0;  ///< of the slot's sums in the `sums` export; 0 for other readers
  /// No segment of the slot is as in the version before, as far as the source knows: its reader may
  /// as well read the bytes first, and the sums last. Never told to a mapping reader.
  bool changed = false;
  // kCredit
  uint64_t bytes_kept = 0;  ///< of the slot's payload: not read, because the reader had them
  // kClose, kFail; kOk: the reader is done
  Code code = Code::kOk;
  Reason reason = Reason::kNone;

  friend bool operator==(const Notify&, const Notify&) = default;
};

/// An encoded message on the stack.
struct NotifyBytes {
  std::array<std::byte, transport::kNotifyBytesMax> data{};
  size_t size = 0;
  std::span<const std::byte> span() const { return {data.data(), size}; }
};
NotifyBytes EncodeNotify(const Notify& notify);

/// Total: any bytes give a message or a failure, and a message encodes to the same bytes again.
///   kFailedPrecondition / kProtocolVersion  another version
///   kInvalidArgument / kUnknownEnum         type, code or reason that this build does not know
///   kInvalidArgument / kInvalidRequest      wrong size for its type, or reserved bits are set
Result<Notify> DecodeNotify(std::span<const std::byte> bytes);

}  // namespace weightwire::transfer
