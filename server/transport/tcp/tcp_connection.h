#pragma once

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "server/transport/export_table.h"
#include "server/transport/frame.h"
#include "server/transport/operation.h"
#include "server/transport/tcp/tcp_core.h"

namespace weightwire::transport {

/// One socket of a session: sends frames, reads frames. Everything runs on its loop.
class TcpConnection final : public std::enable_shared_from_this<TcpConnection> {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  TcpConnection(TcpCore& core, IoLoop& loop, Socket socket);

  IoLoop& loop() { return loop_; }
  /// Before anything else; on any thread. `endpoint` is kept until Shut.
  void Bind(std::shared_ptr<TcpEndpoint> endpoint, size_t index);
  /// Starts to read, unless Shut came first.
  void Start();
  /// Not after Shut, like SendNotify.
  void StartGet(GetOperation operation);
  void SendNotify(std::vector<std::byte> message);
  /// Closes the socket; after it no buffer is touched. Completes what was posted.
  void Shut();

 private:
  /// One frame under way to the peer.
  struct Outgoing {
    std::array<std::byte, kFrameBytes> header;
    std::vector<std::byte> small;              ///< of a notify
    std::shared_ptr<const Exported> exported;  ///< of a reply
    std::vector<PieceRange> ranges;
    bool is_notify = false;
  };

  void ReadHeader();
  void OnHeader();
  void OnGet(const Frame& frame);
  void OnGetReply(const Frame& frame);
  void ReadNotify(size_t bytes);
  void ReadPayload(uint64_t request);
  void FinishGet(uint64_t request, Status status);
  void WriteNext();
  void Broken(const boost::system::error_code& error);
  void Garbage(const std::string& what);

  TcpCore& core_;
  IoLoop& loop_;
  Socket socket_;
  std::shared_ptr<TcpEndpoint> endpoint_;
  size_t index_ = 0;
  bool shut_ = false;

  uint64_t next_request_ = 1;
  std::map<uint64_t, GetOperation> gets_;  ///< sent, not completed

  std::array<std::byte, kFrameBytes> header_in_;
  std::array<std::byte, kNotifyBytesMax> notify_in_;
  std::vector<boost::asio::mutable_buffer> payload_in_;

  std::deque<Outgoing> control_;  ///< requests and notifies: they pass waiting replies
  std::deque<Outgoing> replies_;
  std::vector<Outgoing> writing_;
  std::vector<boost::asio::const_buffer> payload_out_;
};

}  // namespace weightwire::transport
