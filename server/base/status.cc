#include "server/base/status.h"

#include <cstdio>
#include <cstdlib>

namespace weightwire {

std::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kNone:
      return "none";
    case Reason::kInvalidRequest:
      return "invalid_request";
    case Reason::kUnknownEnum:
      return "unknown_enum";
    case Reason::kMessageTooLarge:
      return "message_too_large";
    case Reason::kLimitExceeded:
      return "limit_exceeded";
    case Reason::kUnknownModel:
      return "unknown_model";
    case Reason::kUnknownScheme:
      return "unknown_scheme";
    case Reason::kShapeMismatch:
      return "shape_mismatch";
    case Reason::kDtypeMismatch:
      return "dtype_mismatch";
    case Reason::kShapeOverflow:
      return "shape_overflow";
    case Reason::kTensorMissing:
      return "tensor_missing";
    case Reason::kTensorUnexpected:
      return "tensor_unexpected";
    case Reason::kDuplicateRank:
      return "duplicate_rank";
    case Reason::kMissingRank:
      return "missing_rank";
    case Reason::kOverlappingShards:
      return "overlapping_shards";
    case Reason::kUnownedElement:
      return "unowned_element";
    case Reason::kStaleIncarnation:
      return "stale_incarnation";
    case Reason::kStaleEpoch:
      return "stale_epoch";
    case Reason::kStaleVersion:
      return "stale_version";
    case Reason::kMemoryTooSmall:
      return "memory_too_small";
    case Reason::kMemoryNotSealed:
      return "memory_not_sealed";
    case Reason::kMemoryInvalid:
      return "memory_invalid";
    case Reason::kNotRegistered:
      return "not_registered";
    case Reason::kNotReady:
      return "not_ready";
    case Reason::kLeaseExpired:
      return "lease_expired";
    case Reason::kMemberLost:
      return "member_lost";
    case Reason::kDeadlineExceeded:
      return "deadline_exceeded";
    case Reason::kAbortRequested:
      return "abort_requested";
    case Reason::kDigestMismatch:
      return "digest_mismatch";
    case Reason::kTransportFailed:
      return "transport_failed";
    case Reason::kTicketRejected:
      return "ticket_rejected";
    case Reason::kProtocolVersion:
      return "protocol_version";
    case Reason::kInsecureListener:
      return "insecure_listener";
    case Reason::kJournalFailed:
      return "journal_failed";
    case Reason::kShuttingDown:
      return "shutting_down";
    case Reason::kPermissionDenied:
      return "permission_denied";
    case Reason::kConfigInvalid:
      return "config_invalid";
    case Reason::kIoError:
      return "io_error";
    case Reason::kInternal:
      return "internal";
  }
  return "invalid";
}

std::optional<Reason> ReasonFromNumber(int number) {
  if (number < 0 || number > static_cast<int>(Reason::kInternal)) return std::nullopt;
  return static_cast<Reason>(number);
}

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kCancelled:
      return "CANCELLED";
    case Code::kUnknown:
      return "UNKNOWN";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kAlreadyExists:
      return "ALREADY_EXISTS";
    case Code::kPermissionDenied:
      return "PERMISSION_DENIED";
    case Code::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case Code::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case Code::kAborted:
      return "ABORTED";
    case Code::kOutOfRange:
      return "OUT_OF_RANGE";
    case Code::kUnimplemented:
      return "UNIMPLEMENTED";
    case Code::kInternal:
      return "INTERNAL";
    case Code::kUnavailable:
      return "UNAVAILABLE";
    case Code::kDataLoss:
      return "DATA_LOSS";
    case Code::kUnauthenticated:
      return "UNAUTHENTICATED";
  }
  return "INVALID";
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  std::string text(CodeName(code_));
  text.append(" (").append(ReasonName(reason_)).append("): ").append(message_);
  std::string where;
  auto add = [&where](std::string_view what, const std::string& value) {
    if (value.empty()) return;
    where.append(where.empty() ? " [" : ", ").append(what).append(" ").append(value);
  };
  add("rank", rank_);
  add("tensor", tensor_);
  add("epoch", epoch_.value == 0 ? "" : std::to_string(epoch_.value));
  if (!where.empty()) text.append(where).append("]");
  if (!remedy_.empty()) text.append("; ").append(remedy_);
  return text;
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace weightwire
