#pragma once

#include <array>
#include <boost/asio/buffer.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "server/transport/export_table.h"
#include "server/transport/frame.h"
#include "server/transport/frame_mac.h"

namespace weightwire::transport {

/// One frame under way to the peer, and what follows it.
struct TcpOutgoing {
  void SetFrame(const Frame& frame) { EncodeFrame(frame, std::span(header).first<kFrameBytes>()); }
  /// Once, just before it is sent, and before Seal.
  void Tell() const {
    if (exported) exported->Tell(offset, bytes);
  }
  /// Makes the tags, of a session that has MACs: once, in the order in which frames are sent. What
  /// is exported must not change from here until it was sent.
  void Seal(FrameMac& mac);
  /// What goes to the socket; good as long as this lives and stays where it is.
  void AppendTo(std::vector<boost::asio::const_buffer>* buffers) const;

  std::array<std::byte, kFrameBytes> header;
  std::vector<std::byte> small;              ///< of a notify
  std::shared_ptr<const Exported> exported;  ///< of a reply with payload: these bytes of it
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<PieceRange> ranges;
  bool bounded_notify = false;  ///< the endpoint counts it until it is sent
  std::optional<FrameTag> header_tag;
  std::optional<FrameTag> payload_tag;
};

}  // namespace weightwire::transport
