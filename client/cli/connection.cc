#include "client/cli/connection.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>

#include "client/cli/epoch_engines.h"
#include "server/tls/credentials.h"
#include "server/wire/limits.h"
#include "server/wire/status.h"

namespace weightwire::cli {
namespace {

Status FromGrpc(const grpc::Status& status, const std::string& address) {
  if (status.ok()) return OkStatus();
  Status known =
      wire::FromCall(status.error_code(), status.error_message(), status.error_details());
  if (known.code() != Code::kUnavailable || !known.remedy().empty()) return known;
  return std::move(known).Remedy("is weightwired running, is --address " + address +
                                 " right, and does it speak TLS (--tls-cert, --tls-key, "
                                 "--tls-ca) or not?");
}

/// The status of a large job is more than gRPC's 4 MiB.
grpc::ChannelArguments WithoutLimit() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return arguments;
}

v1::StatusRequest RequestOf(const StatusAsk& ask, uint32_t epochs_max) {
  v1::StatusRequest request;
  request.set_epochs_max(epochs_max);
  request.set_engine_runs(true);
  request.set_no_participants(!ask.participants);
  return request;
}

/// Of the next page; `had` epochs are there.
uint32_t PageOf(const StatusAsk& ask, int had) {
  return ask.epochs_max == 0 ? kEpochsAround
                             : std::min(kEpochsAround, ask.epochs_max - static_cast<uint32_t>(had));
}

}  // namespace

Connection::Connection(const std::string& address, double seconds, const tls::TlsFiles& files)
    : address_(address),
      seconds_(seconds),
      stub_(v1::Coordinator::NewStub(tls::Dialer(files).Open(address, WithoutLimit()))) {}

std::unique_ptr<grpc::ClientContext> Connection::Context() const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::milliseconds(static_cast<int64_t>(seconds_ * 1e3)));
  return context;
}

Result<v1::StatusResponse> Connection::GetPage(const v1::StatusRequest& request) {
  v1::StatusResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->Status(Context().get(), request, &response), address_));
  return response;
}

Result<v1::StatusResponse> Connection::GetStatus(const StatusAsk& ask) {
  v1::StatusRequest request = RequestOf(ask, PageOf(ask, 0));
  WW_ASSIGN(v1::StatusResponse status, GetPage(request));
  const auto wants_more = [&] {
    const auto had = static_cast<uint32_t>(status.epochs_size());
    return had > 0 && status.epochs_left() > 0 && (ask.epochs_max == 0 || had < ask.epochs_max);
  };
  while (wants_more()) {
    const uint64_t last = status.epochs().rbegin()->epoch();
    request.set_epochs_before(last);
    request.set_epochs_max(PageOf(ask, status.epochs_size()));
    WW_ASSIGN(v1::StatusResponse page, GetPage(request));
    // Those that were left may have been forgotten meanwhile.
    if (page.epochs().empty() || page.epochs(0).epoch() >= last) break;
    AppendPage(std::move(page), &status);
  }
  KeepEpochs(ask.epochs_max, &status);  // a coordinator that knows no pages sends all
  return status;
}

Result<std::string> Connection::Explain(const std::string& engine, const std::string& tensor) {
  v1::ExplainPlanRequest request;
  request.set_engine(engine);
  request.set_tensor(tensor);
  v1::ExplainPlanResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->ExplainPlan(Context().get(), request, &response), address_));
  return response.text();
}

Status Connection::Abort(uint64_t epoch, const std::string& why) {
  v1::AbortRequest request;
  request.set_epoch(epoch);
  request.set_why(why);
  v1::AbortResponse response;
  return FromGrpc(stub_->Abort(Context().get(), request, &response), address_);
}

Status Connection::Commit(uint64_t epoch) {
  v1::CommitRequest request;
  request.set_epoch(epoch);
  v1::CommitResponse response;
  return FromGrpc(stub_->Commit(Context().get(), request, &response), address_);
}

Result<v1::RollbackResponse> Connection::Rollback(uint64_t version) {
  v1::RollbackRequest request;
  request.set_version(version);
  v1::RollbackResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->Rollback(Context().get(), request, &response), address_));
  return response;
}

Result<v1::VerifyResponse> Connection::Verify(const std::string& engine) {
  v1::VerifyRequest request;
  request.set_engine(engine);
  // Ends before the call does, so that what has been found by then is not lost.
  request.set_deadline_ms(static_cast<uint32_t>(std::max(1.0, seconds_ * 900)));
  v1::VerifyResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->Verify(Context().get(), request, &response), address_));
  return response;
}

Result<v1::DescribeEpochResponse> Connection::DescribeEpoch(uint64_t epoch) {
  v1::DescribeEpochRequest request;
  request.set_epoch(epoch);
  v1::DescribeEpochResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->DescribeEpoch(Context().get(), request, &response), address_));
  return response;
}

Result<v1::DrainResponse> Connection::Drain(const std::string& name, bool undo) {
  v1::DrainRequest request;
  request.set_name(name);
  request.set_undo(undo);
  v1::DrainResponse response;
  WW_FAIL_IF_ERROR(FromGrpc(stub_->Drain(Context().get(), request, &response), address_));
  return response;
}

Status Connection::Evict(const std::string& group, const std::string& why) {
  v1::EvictRequest request;
  request.set_group(group);
  request.set_why(why);
  v1::EvictResponse response;
  return FromGrpc(stub_->Evict(Context().get(), request, &response), address_);
}

Status Connection::Watch(uint32_t min_interval_ms, const StatusAsk& ask,
                         const std::function<bool(const v1::StatusResponse&)>& each) {
  grpc::ClientContext context;  // without a deadline: it lives as long as the person watches
  v1::WatchRequest request;
  request.set_min_interval_ms(min_interval_ms);
  *request.mutable_status() = RequestOf(ask, ask.epochs_max);
  auto reader = stub_->Watch(&context, request);
  v1::StatusResponse response;
  while (reader->Read(&response)) {
    KeepEpochs(ask.epochs_max, &response);
    if (!each(response)) {
      context.TryCancel();
      reader->Finish();
      return OkStatus();
    }
  }
  return FromGrpc(reader->Finish(), address_);
}

}  // namespace weightwire::cli
