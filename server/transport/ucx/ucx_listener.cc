#include "server/transport/ucx/ucx_listener.h"

#include <boost/asio/io_context.hpp>
#include <future>
#include <utility>

#include "server/transport/address.h"
#include "server/transport/operation.h"
#include "server/transport/ucx/ucx_dial.h"
#include "server/transport/ucx/ucx_pending_connection.h"
#include "server/transport/ucx/ucx_self_test.h"

namespace weightwire::transport {

UcxListener::UcxListener(std::shared_ptr<UcxCore> core) : core_(std::move(core)) {}

Status UcxListener::Open() {
  WW_RETURN_IF_ERROR(core_->viable());
  WW_ASSIGN_OR_STATUS(auto pattern,
                      memory::MemoryRegion::Allocate("ucx-self-test", kUcxSelfTestBytes));
  FillUcxSelfTest({pattern->data(), kUcxSelfTestBytes}, core_->self);
  core_->self_test_key = core_->exports.Export({{pattern, 0, kUcxSelfTestBytes}});
  std::promise<Status> opened;
  core_->Post([this, &opened] { opened.set_value(Listen()); });
  return opened.get_future().get();
}

Status UcxListener::Listen() {
  const std::string& bind = core_->options.bind;
  WW_ASSIGN_OR_STATUS(auto parts, SplitAddress(bind));
  auto cannot = [&bind](const std::string& why) {
    return Status(Code::kUnavailable, Reason::kIoError, "cannot listen on " + bind + ": " + why);
  };
  boost::system::error_code error;
  const auto host = boost::asio::ip::make_address(parts.first, error);
  if (error) return cannot("the host is not numeric");
  const boost::asio::ip::tcp::endpoint endpoint(host, parts.second);
  core_->on_caller = [listener = weak_from_this(), core = core_.get()](void* request) {
    if (auto open = listener.lock()) return open->Admit(request);
    core->worker().Reject(request);
  };
  uint16_t port = 0;
  const std::string failure = core_->worker().Listen(endpoint.data(), endpoint.size(), port);
  if (!failure.empty()) return cannot(failure);
  const std::string& advertised = core_->options.advertised_host;
  address_ = JoinAddress(advertised.empty() ? parts.first : advertised, port);
  return OkStatus();
}

void UcxListener::Admit(void* request) {
  if (stopped_) return core_->worker().Reject(request);
  if (pending_.size() >= core_->options.inbound_handshakes_max) {
    core_->CountFull();
    return core_->worker().Reject(request);
  }
  std::string failure;
  const uint64_t id = core_->worker().Accept(request, failure);
  if (id == 0) return core_->CountClose("broken");
  auto pending = std::make_shared<UcxPendingConnection>(core_, weak_from_this(), id);
  pending_.insert(pending);
  pending->Start();
  ShowVisitors();
}

void UcxListener::Call(const std::string& address, const Hello& hello, Nanos timeout,
                       Transport::ConnectDone done) {
  auto dial = std::make_shared<UcxDial>(core_, weak_from_this(), address, hello, std::move(done));
  core_->Post([self = shared_from_this(), dial, deadline = DeadlineAfter(timeout)] {
    if (self->stopped_) return dial->Fail(ClosedHere());
    self->dials_.insert(dial);
    dial->Start(deadline);
  });
}

void UcxListener::Left(const std::shared_ptr<UcxPendingConnection>& pending) {
  pending_.erase(pending);
  ShowVisitors();
}

void UcxListener::Ended(const std::shared_ptr<UcxDial>& dial) { dials_.erase(dial); }

void UcxListener::ShowVisitors() {
  core_->options.metrics->Set("connections", static_cast<double>(pending_.size()),
                              {{"transport", core_->name}, {"state", "handshaking"}});
}

void UcxListener::Stop() {
  stopped_ = true;
  if (core_->viable().ok()) core_->worker().StopListening();
  for (const auto& pending : std::set(pending_)) pending->Shut();
  for (const auto& dial : std::set(dials_)) dial->Shut();
}

}  // namespace weightwire::transport
