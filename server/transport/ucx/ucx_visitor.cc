#include "server/transport/ucx/ucx_visitor.h"

#include <boost/asio/io_context.hpp>
#include <string>
#include <utility>

#include "server/transport/operation.h"
#include "server/transport/ucx/ucx_endpoint.h"
#include "server/transport/ucx/ucx_gate.h"

namespace weightwire::transport {

UcxVisitor::UcxVisitor(std::shared_ptr<UcxCore> core, std::weak_ptr<UcxGate> gate, uint64_t id)
    : core_(std::move(core)), gate_(std::move(gate)), id_(id), timer_(core_->loop.context()) {}

void UcxVisitor::Start() {
  core_->Bind(id_, shared_from_this());
  timer_.expires_after(core_->options.handshake_timeout);
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    self->core_->Post([self] { self->Drop("handshake_timeout"); });
  });
}

void UcxVisitor::OnMessage(std::span<const std::byte> message) {
  if (left_ || refused_) return;
  if (handshake_) return OnProof(message);
  const auto introduction = DecodeIntroduction(message);
  if (!introduction.has_value()) return Drop("garbage");
  handshake_.emplace(*introduction, message, core_->self, *core_->handler);
  if (!handshake_->awaits_proof()) return Conclude(handshake_->reply(), "ticket");
  core_->worker().Send(id_, handshake_->challenge(), false);
}

void UcxVisitor::OnProof(std::span<const std::byte> message) {
  const auto verdict = handshake_->OnProof(message);
  if (!verdict.has_value()) return Drop("garbage");
  Conclude(*verdict, "proof");
}

void UcxVisitor::Conclude(HelloReply reply, const char* check) {
  if (reply.code == Code::kOk && core_->session_count() >= core_->options.inbound_sessions_max) {
    reply = {0, 0, Code::kResourceExhausted, Reason::kLimitExceeded};
  }
  core_->worker().Send(id_, EncodeHelloReply(reply), false);
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

void UcxVisitor::OnBroken(const std::string&) { Drop("broken"); }

void UcxVisitor::Shut() { Drop("closed_here"); }

void UcxVisitor::Leave() {
  left_ = true;
  timer_.cancel();
  if (auto gate = gate_.lock()) gate->Left(shared_from_this());
}

void UcxVisitor::Drop(const char* cause) {
  if (left_) return;
  if (!refused_) core_->CountClose(cause);
  core_->worker().Close(id_);
  Leave();
}

}  // namespace weightwire::transport
