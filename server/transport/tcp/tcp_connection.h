#pragma once

#include <array>
#include <boost/asio/buffer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "server/transport/frame.h"
#include "server/transport/frame_mac.h"
#include "server/transport/operation.h"
#include "server/transport/spans.h"
#include "server/transport/tcp/tcp_buffers.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_outgoing.h"
#include "server/transport/tcp/tcp_stream.h"

namespace weightwire::transport {

/// One socket of a session: sends frames, reads frames. Everything runs on its loop.
class TcpConnection final : public std::enable_shared_from_this<TcpConnection> {
 public:
  /// `macs`: of a session whose frames are sealed.
  TcpConnection(TcpCore& core, IoLoop& loop, TcpStream stream, std::optional<FrameMacs> macs);

  IoLoop& loop() { return loop_; }
  /// Before anything else; on any thread. `endpoint` is kept until Shut.
  void Bind(std::shared_ptr<TcpEndpoint> endpoint, size_t index);
  /// Starts to read, unless Shut came first.
  void Start();
  /// Not after Shut, like SendNotify.
  void StartGet(GetOperation operation);
  void SendNotify(std::vector<std::byte> message, bool bounded);
  /// Closes the socket; after it no buffer is touched. Completes what was posted.
  void Shut();

 private:
  void ReadHeader();
  void OnHeader();
  void OnGet(const Frame& frame);
  void OnGetReply(const Frame& frame);
  void ReadNotify(size_t bytes);
  void ReadPayload(uint64_t request);
  void ReadPieces();
  void ReadTag();
  void FinishGet(uint64_t request, Status status);
  void WriteNext();
  size_t tag_bytes() const { return macs_ ? kTagBytes : 0; }
  void Broken(const boost::system::error_code& error);
  void Garbage(const std::string& what);
  /// What was read does not fit its MAC, or that of TLS.
  void Forged();

  TcpCore& core_;
  IoLoop& loop_;
  TcpStream stream_;
  std::shared_ptr<TcpEndpoint> endpoint_;
  size_t index_ = 0;
  bool shut_ = false;
  std::optional<FrameMacs> macs_;

  uint64_t next_request_ = 1;
  std::map<uint64_t, GetOperation> gets_;  ///< sent, not completed

  std::array<std::byte, kFrameBytes + kTagBytes> header_in_;
  std::array<std::byte, kTcpNotifyBytesMax + kTagBytes> notify_in_;
  FrameTag tag_in_;
  /// The payload that is being read: of this Get, so many bytes more, which go to `place_`.
  uint64_t arriving_ = 0;
  uint64_t arriving_bytes_ = 0;
  SpanWriter place_;

  std::deque<TcpOutgoing> control_;  ///< requests and notifies: they pass waiting replies
  std::deque<TcpOutgoing> replies_;
  std::vector<TcpOutgoing> writing_;
  std::vector<boost::asio::const_buffer> payload_out_;
};

}  // namespace weightwire::transport
