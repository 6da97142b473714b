#pragma once

#include <memory>

#include "server/memory/region.h"
#include "server/rpc/fd_table.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace weightwire::rpc {

/// Speaks wire/fd_protocol.h on accepted connections: puts fds into a table, redeems them.
///
/// A connection that sends a malformed frame, a put without exactly one fd, or a get with one is
/// answered with the reason and closed. At most 256 connections are served at a time: one more
/// closes the oldest of the process that has most of them. Belongs to the io_context's thread.
class FdServer {
 public:
  static std::unique_ptr<FdServer> Make(boost::asio::io_context& io, FdTable& table);
  virtual ~FdServer() = default;
  /// A connected Unix stream socket, its peer's uid checked.
  virtual void Serve(memory::UniqueFd connection) = 0;
  virtual void CloseAll() = 0;
};

}  // namespace weightwire::rpc
