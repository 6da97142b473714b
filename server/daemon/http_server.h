#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "server/memory/region.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace weightwire::daemon {

class HttpTls;

struct HttpReply {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  /// Content-Security-Policy: nothing may be loaded or run unless the page says what.
  std::string policy = "default-src 'none'; frame-ancestors 'none'";
};
/// Called once, from any thread.
using HttpRespond = std::function<void(HttpReply)>;
/// Runs on the io_context's thread and must not block: it may answer later.
using HttpPage = std::function<void(HttpRespond)>;

/// A small HTTP/1.1 server for GET and HEAD on fixed paths. Limits: 256 connections, 8 KiB of
/// header, no body, 5 s for each request and for TLS's handshake (a page that does not answer in
/// time is a 503). One connection more closes the one that has waited for its peer longest. Of
/// other pages than /healthz, /readyz and /metrics 64 requests are under way at a time (one more
/// is a 503), so that nobody keeps probes from theirs. Belongs to the io_context's thread.
class HttpServer {
 public:
  /// `tls` says who may see what (401, 403), and outlives the server; null: plaintext, everybody.
  static std::unique_ptr<HttpServer> Make(boost::asio::io_context& io,
                                          std::map<std::string, HttpPage> pages, HttpTls* tls);
  virtual ~HttpServer() = default;
  /// A connected socket.
  virtual void Serve(memory::UniqueFd connection) = 0;
  virtual void CloseAll() = 0;
};

}  // namespace weightwire::daemon
