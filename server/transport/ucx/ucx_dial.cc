#include "server/transport/ucx/ucx_dial.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <utility>

#include "server/transport/address.h"
#include "server/transport/operation.h"
#include "server/transport/ucx/ucx_endpoint.h"
#include "server/transport/ucx/ucx_listener.h"

namespace weightwire::transport {

using boost::asio::ip::tcp;
using boost::system::error_code;

UcxDial::UcxDial(std::shared_ptr<UcxCore> core, std::weak_ptr<UcxListener> listener,
                 std::string address, const Hello& hello, Transport::ConnectDone done)
    : core_(std::move(core)),
      listener_(std::move(listener)),
      address_(std::move(address)),
      handshake_(hello),
      challenged_(!handshake_.awaits_proof()),
      done_(std::move(done)),
      timer_(core_->loop.context()),
      resolver_(core_->loop.context()) {}

void UcxDial::Start(Nanos deadline) {
  if (!core_->viable().ok()) return Fail(core_->viable());
  deadline_ = deadline;
  timer_.expires_at(std::chrono::steady_clock::time_point(deadline));
  timer_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (cancelled) return;
    self->core_->Post([self] {
      self->Fail(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                        "no session with " + self->address_ + " in time"));
    });
  });
  auto parts = SplitAddress(address_);
  if (!parts.has_value()) return Fail(parts.error());
  error_code error;
  if (const auto host = boost::asio::ip::make_address(parts->first, error); !error) {
    return Connect({host, parts->second});
  }
  resolver_.async_resolve(
      parts->first, std::to_string(parts->second),
      [self = shared_from_this()](const error_code& failure, const auto& candidates) {
        self->core_->Post([self, failure, candidates] {
          if (!self->done_) return;
          if (!failure) return self->Connect(candidates.begin()->endpoint());
          self->Fail(
              TransportFailed("no session with " + self->address_ + ": " + failure.message()));
        });
      });
}

void UcxDial::Connect(const tcp::endpoint& peer) {
  std::string failure;
  id_ = core_->worker().Connect(peer.data(), peer.size(), failure);
  if (id_ == 0) return Fail(TransportFailed("no session with " + address_ + ": " + failure));
  core_->Bind(id_, shared_from_this());
  core_->worker().Send(id_, EncodeCallerHello(handshake_.caller_hello()), false);
}

void UcxDial::OnMessage(std::span<const std::byte> message) {
  if (!done_) return;
  if (!challenged_) return OnCalleeProof(message);
  auto reply = DecodeCalleeReply(message);
  if (!reply.has_value()) return FailGarbage(reply.error());
  if (Status verdict = StatusOf(*reply); !verdict.ok()) return Fail(std::move(verdict));
  End();
  auto endpoint = std::make_shared<UcxEndpoint>(core_, handshake_.hello(), id_,
                                                handshake_.hello().callee, address_);
  endpoint->Start(std::min(deadline_, DeadlineAfter(core_->options.self_test_timeout)),
                  std::exchange(done_, nullptr));
}

void UcxDial::OnCalleeProof(std::span<const std::byte> message) {
  const auto proof =
      handshake_.OnCalleeProof(EncodeCallerHello(handshake_.caller_hello()), message);
  if (!proof.has_value()) {
    const bool garbage = proof.error().reason() == Reason::kInvalidRequest;
    return garbage ? FailGarbage(proof.error()) : Fail(proof.error());
  }
  challenged_ = true;
  core_->worker().Send(id_, *proof, false);
}

void UcxDial::FailGarbage(const Status& what) {
  Fail(TransportFailed(address_ + " does not speak weightwire: " + what.message()));
}

void UcxDial::OnBroken(const std::string& why) {
  Fail(TransportFailed("no session with " + address_ + ": " + why));
}

void UcxDial::Shut() { Fail(ClosedHere()); }

void UcxDial::Fail(Status why) {
  if (!done_) return;
  if (id_ != 0) core_->worker().Close(id_);
  End();
  std::exchange(done_, nullptr)(weightwire::Fail(std::move(why)));
}

void UcxDial::End() {
  timer_.cancel();
  resolver_.cancel();
  if (auto listener = listener_.lock()) listener->Ended(shared_from_this());
}

}  // namespace weightwire::transport
