#include "server/wire/status.h"

#include <optional>
#include <utility>

#include "server/wire/checks.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

std::optional<Code> CodeFromNumber(int number) {
  if (number < 0 || number > static_cast<int>(Code::kUnauthenticated)) return std::nullopt;
  return static_cast<Code>(number);
}

/// What gRPC itself means by a code, where no detail of ours came with it.
Reason ReasonOfBareCode(Code code) {
  switch (code) {
    case Code::kCancelled:
      return Reason::kShuttingDown;
    case Code::kDeadlineExceeded:
      return Reason::kDeadlineExceeded;
    case Code::kResourceExhausted:
      return Reason::kMessageTooLarge;
    case Code::kUnimplemented:
      return Reason::kProtocolVersion;
    case Code::kUnavailable:
      return Reason::kTransportFailed;
    case Code::kPermissionDenied:
    case Code::kUnauthenticated:
      return Reason::kPermissionDenied;
    case Code::kInvalidArgument:
      return Reason::kInvalidRequest;
    default:
      return Reason::kInternal;
  }
}

Status WithDetail(Code code, Reason reason, const std::string& message,
                  const v1::ErrorDetail& detail) {
  return Status(code, reason, message)
      .AtRank(detail.rank())
      .AtTensor(detail.tensor())
      .AtEpoch(Epoch(detail.epoch()))
      .Remedy(detail.remedy());
}

}  // namespace

v1::ErrorDetail DetailOf(const Status& status) {
  v1::ErrorDetail out;
  out.set_reason(static_cast<v1::Reason>(status.reason()));
  out.set_rank(CleanText(status.rank(), 2 * kIdBytesMax));
  out.set_tensor(CleanText(status.tensor(), kNameBytesMax));
  out.set_epoch(status.epoch().value);
  out.set_remedy(CleanText(status.remedy(), kErrorRemedyBytesMax));
  return out;
}

v1::Outcome OutcomeOf(const Status& status) {
  v1::Outcome out;
  if (status.ok()) return out;
  out.set_code(static_cast<int>(status.code()));
  out.set_message(CleanText(status.message(), kErrorMessageBytesMax));
  *out.mutable_detail() = DetailOf(status);
  return out;
}

v1::RpcStatus RpcStatusOf(const Status& status) {
  v1::RpcStatus out;
  out.set_code(static_cast<int>(status.code()));
  out.set_message(CleanText(status.message(), kErrorMessageBytesMax));
  out.add_details()->PackFrom(DetailOf(status));
  return out;
}

Result<Status> FromProto(std::string_view field, const v1::Outcome& outcome) {
  const auto code = CodeFromNumber(outcome.code());
  if (!code) return Fail(UnknownEnum(std::string(field) + ".code", outcome.code()));
  if (*code == Code::kOk) return Status();
  const v1::ErrorDetail& detail = outcome.detail();
  const auto reason = ReasonFromNumber(detail.reason());
  if (!reason) return Fail(UnknownEnum(std::string(field) + ".detail.reason", detail.reason()));
  WW_FAIL_IF_ERROR(CheckText(std::string(field) + ".message", outcome.message(), kTextBytesMax));
  return WithDetail(*code, *reason, outcome.message(), detail);
}

std::string EncodeDetails(const Status& status) { return RpcStatusOf(status).SerializeAsString(); }

Status FromCall(int code, std::string_view message, std::string_view details) {
  Code known = CodeFromNumber(code).value_or(Code::kUnknown);
  if (known == Code::kOk) known = Code::kUnknown;
  v1::RpcStatus rpc;
  v1::ErrorDetail detail;
  const bool ours =
      !details.empty() && rpc.ParseFromArray(details.data(), static_cast<int>(details.size())) &&
      rpc.code() == code && rpc.details_size() == 1 && rpc.details(0).UnpackTo(&detail) &&
      ReasonFromNumber(detail.reason()).has_value();
  if (ours) {
    return WithDetail(known, *ReasonFromNumber(detail.reason()), rpc.message(), detail);
  }
  return Status(known, ReasonOfBareCode(known), std::string(message));
}

}  // namespace weightwire::wire
