#include "server/transport/ucx/ucx_pending_connection.h"

#include <boost/asio/io_context.hpp>
#include <string>
#include <utility>

#include "server/transport/operation.h"
#include "server/transport/ucx/ucx_endpoint.h"
#include "server/transport/ucx/ucx_listener.h"

namespace weightwire::transport {

UcxPendingConnection::UcxPendingConnection(std::shared_ptr<UcxCore> core,
                                           std::weak_ptr<UcxListener> listener, uint64_t id)
    : core_(std::move(core)),
      listener_(std::move(listener)),
      id_(id),
      timer_(core_->loop.context()) {}

void UcxPendingConnection::Start() {
  core_->Bind(id_, shared_from_this());
  timer_.expires_after(core_->options.handshake_timeout);
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    self->core_->Post([self] { self->Drop("handshake_timeout"); });
  });
}

void UcxPendingConnection::OnMessage(std::span<const std::byte> message) {
  if (left_ || refused_) return;
  if (handshake_) return OnProof(message);
  const auto hello = DecodeCallerHello(message);
  if (!hello.has_value()) return Drop("garbage");
  handshake_.emplace(*hello, message, core_->self, *core_->handler);
  if (!handshake_->awaits_proof()) return Conclude(handshake_->reply(), "ticket");
  core_->worker().Send(id_, handshake_->callee_proof(), false);
}

void UcxPendingConnection::OnProof(std::span<const std::byte> message) {
  const auto verdict = handshake_->OnProof(message);
  if (!verdict.has_value()) return Drop("garbage");
  Conclude(*verdict, "proof");
}

void UcxPendingConnection::Conclude(CalleeReply reply, const char* check) {
  if (reply.code == Code::kOk && core_->session_count() >= core_->options.inbound_sessions_max) {
    reply = {0, 0, Code::kResourceExhausted, Reason::kLimitExceeded};
  }
  core_->worker().Send(id_, EncodeCalleeReply(reply), false);
  if (reply.code != Code::kOk) {
    refused_ = true;
    return CountRefused(*core_->options.metrics, core_->name, reply, check);
  }
  const Hello& hello = handshake_->hello();
  Leave();
  auto endpoint = std::make_shared<UcxEndpoint>(core_, hello, id_, hello.caller,
                                                "the caller " + std::to_string(hello.caller.value));
  endpoint->Start(DeadlineAfter(core_->options.self_test_timeout),
                  [core = core_.get()](Result<std::shared_ptr<Endpoint>> proved) {
                    if (proved.has_value()) core->handler->OnAccepted(*proved);
                  });
}

void UcxPendingConnection::OnBroken(const std::string&) { Drop("broken"); }

void UcxPendingConnection::Shut() { Drop("closed_here"); }

void UcxPendingConnection::Leave() {
  left_ = true;
  timer_.cancel();
  if (auto listener = listener_.lock()) listener->Left(shared_from_this());
}

void UcxPendingConnection::Drop(const char* cause) {
  if (left_) return;
  if (!refused_) core_->CountClose(cause);
  core_->worker().Close(id_);
  Leave();
}

}  // namespace weightwire::transport
