#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

#include "server/base/ids.h"

namespace weightwire {

/// gRPC's canonical codes, with gRPC's numbers, so that rpc/ converts by cast.
enum class Code : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

/// Why something was refused or failed. Closed: the same value feeds status details on the wire,
/// metric labels and exit codes of wwctl. Numbers are part of the protocol (proto
/// weightwire.v1.Reason has the same ones) and never change; append only.
enum class Reason : int {
  kNone = 0,
  kInvalidRequest = 1,      ///< malformed or missing field
  kUnknownEnum = 2,         ///< an enum value this build does not know
  kMessageTooLarge = 3,     ///< message, name or list over its stated limit
  kLimitExceeded = 4,       ///< a stated bound (members, copies, memory) was met
  kUnknownModel = 5,        ///< model_type without a family
  kUnknownScheme = 6,       ///< layout scheme or parallel spec not understood
  kShapeMismatch = 7,       ///< observed shape differs from the layout's
  kDtypeMismatch = 8,       ///< dtypes differ and no cast is planned
  kShapeOverflow = 9,       ///< a shape's element or byte count does not fit
  kTensorMissing = 10,      ///< a tensor of the layout was not reported, or is unknown
  kTensorUnexpected = 11,   ///< a reported tensor is not part of the layout
  kDuplicateRank = 12,      ///< a second live process claims the rank
  kMissingRank = 13,        ///< not all ranks of a group have registered
  kOverlappingShards = 14,  ///< two sources, or two pieces of one target, overlap in part
  kUnownedElement = 15,     ///< an element that a target needs is held by no source
  kStaleIncarnation = 16,   ///< the caller's incarnation was replaced or fenced
  kStaleEpoch = 17,         ///< the epoch is older than the one in progress
  kStaleVersion = 18,       ///< the published version is not newer than the last one
  kMemoryTooSmall = 19,     ///< an fd or region is shorter than the layout needs
  kMemoryNotSealed = 20,    ///< memfd without F_SEAL_SHRINK, or a file that cannot be sealed
  kMemoryInvalid = 21,      ///< not a memfd, offset outside the region, wrong owner
  kNotRegistered = 22,      ///< unknown participant, plan or epoch
  kNotReady = 23,           ///< fewer engines than min_engines, or no committed epoch yet
  kLeaseExpired = 24,       ///< no heartbeat within the lease
  kMemberLost = 25,         ///< a participant's process ended or was evicted
  kDeadlineExceeded = 26,   ///< a phase or a call outlived its deadline
  kAbortRequested = 27,     ///< an operator or the trainer aborted the epoch
  kDigestMismatch = 28,     ///< bytes arrived that do not match the source's sums
  kTransportFailed = 29,    ///< a connection broke or could not be made
  kTicketRejected = 30,     ///< a data-plane hello without a valid ticket
  kProtocolVersion = 31,    ///< no common protocol version
  kInsecureListener = 32,   ///< plaintext listener beyond loopback without --insecure
  kJournalFailed = 33,      ///< the decision could not be made durable
  kShuttingDown = 34,
  kPermissionDenied = 35,
  kConfigInvalid = 36,
  kIoError = 37,
  kInternal = 38,
};

/// Stable snake_case names ("stale_epoch"); used as metric labels and in JSON.
std::string_view ReasonName(Reason reason);
std::string_view CodeName(Code code);
/// nullopt for a number that is no Reason: the caller answers kUnknownEnum.
std::optional<Reason> ReasonFromNumber(int number);

/// The answer of an operation that can fail while the program is right. [[nodiscard]].
///
/// `rank`, `tensor`, `epoch` and `remedy` name what the message is about; empty when they do not
/// apply. `rank` is text ("trainer/3", "engine-a/1") because it always names group and rank.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, Reason reason, std::string message)
      : code_(code), reason_(reason), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  Reason reason() const { return reason_; }
  const std::string& message() const { return message_; }
  const std::string& rank() const { return rank_; }
  const std::string& tensor() const { return tensor_; }
  const std::string& remedy() const { return remedy_; }
  Epoch epoch() const { return epoch_; }

  Status&& AtRank(std::string rank) && {
    rank_ = std::move(rank);
    return std::move(*this);
  }
  Status&& AtTensor(std::string tensor) && {
    tensor_ = std::move(tensor);
    return std::move(*this);
  }
  Status&& AtEpoch(Epoch epoch) && {
    epoch_ = epoch;
    return std::move(*this);
  }
  Status&& Remedy(std::string remedy) && {
    remedy_ = std::move(remedy);
    return std::move(*this);
  }

  /// "FAILED_PRECONDITION (stale_version): … [rank trainer/0, tensor …, epoch 4]; remedy".
  std::string ToString() const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  Code code_ = Code::kOk;
  Reason reason_ = Reason::kNone;
  std::string message_;
  std::string rank_;
  std::string tensor_;
  std::string remedy_;
  Epoch epoch_{};
};

inline Status OkStatus() { return {}; }

template <typename T>
using Result = tl::expected<T, Status>;

/// The failure as a Result: `return Fail(Code::kInvalidArgument, Reason::kShapeMismatch, "…");`
/// Converts to any Result<T>; for a function that returns Status write Status(...) itself.
inline tl::unexpected<Status> Fail(Code code, Reason reason, std::string message) {
  return tl::make_unexpected(Status(code, reason, std::move(message)));
}
inline tl::unexpected<Status> Fail(Status status) { return tl::make_unexpected(std::move(status)); }

/// Ends the process with file, line and condition. For programmers' errors only.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace weightwire

#define WW_CHECK(condition)                                                      \
  do {                                                                           \
    if (!(condition)) ::weightwire::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

#define WW_CONCAT_INNER(a, b) a##b
#define WW_CONCAT(a, b) WW_CONCAT_INNER(a, b)

/// In a function that returns Status: returns the failure of `expr` (a Status).
#define WW_RETURN_IF_ERROR(expr)                                    \
  do {                                                              \
    if (auto ww_status = (expr); !ww_status.ok()) return ww_status; \
  } while (false)

/// In a function that returns Result<T>: returns the failure of `expr` (a Status).
#define WW_FAIL_IF_ERROR(expr)                                                                     \
  do {                                                                                             \
    if (auto ww_status = (expr); !ww_status.ok()) return ::weightwire::Fail(std::move(ww_status)); \
  } while (false)

/// In a function that returns Result<U>: `WW_ASSIGN(auto x, F());` with F returning Result<T>.
#define WW_ASSIGN(lhs, expr) WW_ASSIGN_IMPL(WW_CONCAT(ww_result_, __LINE__), lhs, expr)
#define WW_ASSIGN_IMPL(result, lhs, expr)                                        \
  auto result = (expr);                                                          \
  if (!result.has_value()) return ::weightwire::Fail(std::move(result.error())); \
  lhs = std::move(*result)

/// The same in a function that returns Status.
#define WW_ASSIGN_OR_STATUS(lhs, expr) \
  WW_ASSIGN_STATUS_IMPL(WW_CONCAT(ww_result_, __LINE__), lhs, expr)
#define WW_ASSIGN_STATUS_IMPL(result, lhs, expr)             \
  auto result = (expr);                                      \
  if (!result.has_value()) return std::move(result.error()); \
  lhs = std::move(*result)
