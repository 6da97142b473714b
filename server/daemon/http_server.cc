#include "server/daemon/http_server.h"

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <ctime>
#include <optional>
#include <utility>

namespace weightwire::daemon {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;
using Stream = beast::basic_stream<asio::generic::stream_protocol>;

constexpr size_t kConnectionsMax = 64;
constexpr size_t kHeaderBytesMax = 8 << 10;
constexpr std::chrono::seconds kRequestTimeout(5);

/// "Sun, 06 Nov 1994 08:49:37 GMT": readers compute ages with it, whatever their own clock says.
std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[40];
  return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::io_context& io, memory::UniqueFd fd,
             const std::map<std::string, HttpPage>& pages, std::function<void()> closed)
      : io_(io), stream_(io), patience_(io), pages_(pages), closed_(std::move(closed)) {
    stream_.socket().assign({AF_INET, SOCK_STREAM}, fd.Release());
  }

  void Read() {
    parser_.emplace();
    parser_->header_limit(kHeaderBytesMax);
    parser_->body_limit(0);
    stream_.expires_after(kRequestTimeout);
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](error_code error, size_t) {
                       if (error) return self->Close();
                       self->Answer();
                     });
  }

  void Close() {
    error_code ignored;
    patience_.cancel();
    stream_.socket().close(ignored);
    if (auto closed = std::exchange(closed_, nullptr)) closed();
  }

 private:
  void Answer() {
    const auto& request = parser_->get();
    if (request.method() != http::verb::get && request.method() != http::verb::head) {
      return Write({405, "text/plain; charset=utf-8", "only GET and HEAD are served\n"});
    }
    const auto page =
        pages_.find(std::string(request.target().substr(0, request.target().find('?'))));
    if (page == pages_.end()) {
      return Write({404, "text/plain; charset=utf-8", "no such page\n"});
    }
    const uint64_t number = ++request_number_;
    patience_.expires_after(kRequestTimeout);
    patience_.async_wait([self = shared_from_this(), number](error_code aborted) {
      if (!aborted)
        self->Respond(number, {503, "text/plain; charset=utf-8", "no answer in time\n"});
    });
    page->second([self = shared_from_this(), number](HttpReply reply) {
      asio::post(self->io_, [self, number, reply = std::move(reply)]() mutable {
        self->Respond(number, std::move(reply));
      });
    });
  }

  /// The page's answer or the lack of one, whichever comes first.
  void Respond(uint64_t number, HttpReply reply) {
    if (number != request_number_ || !closed_) return;
    ++request_number_;
    patience_.cancel();
    Write(std::move(reply));
  }

  void Write(HttpReply reply) {
    const auto& request = parser_->get();
    response_.emplace(static_cast<http::status>(reply.status), request.version());
    response_->set(http::field::content_type, reply.content_type);
    response_->set(http::field::cache_control, "no-store");
    response_->set(http::field::date, HttpDate());
    response_->set("Content-Security-Policy", reply.policy);
    response_->set("X-Content-Type-Options", "nosniff");
    response_->set("Referrer-Policy", "no-referrer");
    response_->keep_alive(request.keep_alive());
    response_->body() = std::move(reply.body);
    response_->prepare_payload();
    if (request.method() == http::verb::head) response_->body().clear();
    stream_.expires_after(kRequestTimeout);
    http::async_write(stream_, *response_, [self = shared_from_this()](error_code error, size_t) {
      if (error || !self->response_->keep_alive()) return self->Close();
      self->Read();
    });
  }

  asio::io_context& io_;
  Stream stream_;
  asio::steady_timer patience_;
  const std::map<std::string, HttpPage>& pages_;
  std::function<void()> closed_;
  uint64_t request_number_ = 0;
  beast::flat_buffer buffer_{kHeaderBytesMax};
  std::optional<http::request_parser<http::empty_body>> parser_;
  std::optional<http::response<http::string_body>> response_;
};

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(asio::io_context& io, std::map<std::string, HttpPage> pages)
      : io_(io), pages_(std::move(pages)) {}
  ~HttpServerImpl() override { CloseAll(); }

  void Serve(memory::UniqueFd fd) override {
    if (connections_.size() >= kConnectionsMax) return;
    const uint64_t id = ++next_;
    auto connection = std::make_shared<Connection>(io_, std::move(fd), pages_,
                                                   [this, id] { connections_.erase(id); });
    connections_.emplace(id, connection);
    connection->Read();
  }

  void CloseAll() override {
    const auto connections = connections_;
    for (const auto& [id, connection] : connections) connection->Close();
  }

 private:
  asio::io_context& io_;
  const std::map<std::string, HttpPage> pages_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::shared_ptr<Connection>> connections_;
};

}  // namespace

std::unique_ptr<HttpServer> HttpServer::Make(asio::io_context& io,
                                             std::map<std::string, HttpPage> pages) {
  return std::make_unique<HttpServerImpl>(io, std::move(pages));
}

}  // namespace weightwire::daemon
