#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <thread>
#include <vector>

#include "server/transport/frame_mac.h"
#include "server/transport/handshake.h"
#include "server/transport/tcp/tcp_preamble.h"
#include "tests/conformance/plain_socket.h"

/// Who sits between two agents and changes the frames of one direction, on sessions of one socket.
namespace weightwire::conformance {

/// A frame and what follows it, as bytes on the way; tags included where frames are sealed.
struct WireFrame {
  Frame frame;
  std::vector<std::byte> header;
  std::vector<std::byte> payload;
};
/// The same frame with other fields, its checksum made anew.
inline WireFrame Rewritten(WireFrame wire, const Frame& frame) {
  EncodeFrame(frame, std::span(wire.header).first<kFrameBytes>());
  return wire;
}

class TamperRelay {
 public:
  enum class Way { kToCaller, kToCallee };
  using Emit = std::function<void(const WireFrame&)>;
  /// Sees every frame of the way and emits what is passed on. On one thread for each session.
  using Tamper = std::function<void(const WireFrame&, const Emit&)>;

  /// Passes on to `callee`. Destroyed after the agents, whose end ends its connections.
  TamperRelay(std::string callee, bool sealed, Way way, Tamper tamper)
      : callee_(std::move(callee)), sealed_(sealed), way_(way), tamper_(std::move(tamper)) {
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~TamperRelay() {
    ending_ = true;
    Plain::ConnectTo(listener_.address());  // wakes the acceptor
    acceptor_.join();
    for (auto& thread : threads_) thread.join();
  }
  const std::string& address() const { return listener_.address(); }

 private:
  void Accept() {
    for (;;) {
      auto caller = std::make_shared<Plain>(listener_.Accept());
      if (ending_) return;
      auto callee = std::make_shared<Plain>(Plain::ConnectTo(callee_));
      threads_.emplace_back([=, this] {
        Pass(*caller, *callee, transport::kPreambleBytes + transport::kCallerProofBytes,
             way_ == Way::kToCallee);
      });
      threads_.emplace_back([=, this] {
        Pass(*callee, *caller, transport::kProvedReplyBytes + transport::kWelcomeBytes,
             way_ == Way::kToCaller);
      });
    }
  }
  void Pass(Plain& from, Plain& to, size_t handshake_bytes, bool tampers) {
    // Byte by byte: a side may refuse, and then says less.
    std::byte byte;
    for (size_t i = 0; i < handshake_bytes && from.Receive({&byte, 1}); ++i) to.Send({&byte, 1});
    const Emit emit = [&to](const WireFrame& wire) {
      to.Send(wire.header);
      to.Send(wire.payload);
    };
    for (WireFrame wire; Read(from, &wire);) tampers ? tamper_(wire, emit) : emit(wire);
    from.End();
    to.End();
  }
  bool Read(Plain& from, WireFrame* wire) const {
    const size_t tag = sealed_ ? transport::kTagBytes : 0;
    wire->header.resize(kFrameBytes + tag);
    if (!from.Receive(wire->header)) return false;
    const auto frame = transport::DecodeFrame(std::span(wire->header).first<kFrameBytes>());
    if (!frame.has_value()) return false;
    wire->frame = *frame;
    const bool follows = frame->type != FrameType::kGet && frame->length > 0;
    wire->payload.resize(follows ? frame->length + tag : 0);
    return from.Receive(wire->payload);
  }

  const std::string callee_;
  const bool sealed_;
  const Way way_;
  const Tamper tamper_;
  RawListener listener_{true};
  std::atomic<bool> ending_{false};
  std::list<std::thread> threads_;  ///< the acceptor's, until that has ended
  std::thread acceptor_;
};

}  // namespace weightwire::conformance
