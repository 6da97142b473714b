#include "server/daemon/http_server.h"

#include <algorithm>
#include <array>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <chrono>
#include <ctime>
#include <list>
#include <optional>
#include <type_traits>
#include <utility>

#include "server/daemon/http_tls.h"

namespace weightwire::daemon {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;
using Stream = beast::basic_stream<asio::generic::stream_protocol>;
using SecureStream = beast::ssl_stream<Stream>;

constexpr size_t kConnectionsMax = 256;
constexpr size_t kPagesMax = 64;  ///< requests of other pages than kHealthPages under way
constexpr size_t kHeaderBytesMax = 8 << 10;
constexpr std::chrono::seconds kRequestTimeout(5);

/// What probes and Prometheus ask for: readers of other pages cannot keep them from it.
constexpr std::array kHealthPages = {"/healthz", "/readyz", "/metrics"};

/// "Sun, 06 Nov 1994 08:49:37 GMT": readers compute ages with it, whatever their own clock says.
std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[40];
  return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

class Connection {
 public:
  virtual ~Connection() = default;
  virtual void Start() = 0;
  virtual void Close() = 0;
};

/// Connections that wait for their peer, for a request or until it has read, longest first.
using Idle = std::list<Connection*>;

struct Serving {
  asio::io_context& io;
  const std::map<std::string, HttpPage>& pages;
  HttpTls* tls;
  Idle idle = {};
  size_t pages_under_way = 0;
};

template <typename Over>
class ConnectionOver final : public Connection,
                             public std::enable_shared_from_this<ConnectionOver<Over>> {
 public:
  /// `context`: of TLS, and null without.
  ConnectionOver(Serving& serving, std::shared_ptr<asio::ssl::context> context, memory::UniqueFd fd,
                 std::function<void()> closed)
      : serving_(serving),
        context_(std::move(context)),
        stream_(MakeStream(serving.io, context_.get())),
        patience_(serving.io),
        closed_(std::move(closed)) {
    Lowest().socket().assign({AF_INET, SOCK_STREAM}, fd.Release());
  }

  void Start() override {
    if constexpr (kSecure) {
      AwaitPeer();
      stream_.async_handshake(asio::ssl::stream_base::server,
                              [self = this->shared_from_this()](error_code error) {
                                if (error) return self->Close();
                                self->Read();
                              });
    } else {
      Read();
    }
  }

  void Close() override {
    error_code ignored;
    patience_.cancel();
    Lowest().socket().close(ignored);
    LeaveIdle();
    EndPage();
    if (auto closed = std::exchange(closed_, nullptr)) closed();
  }

 private:
  static constexpr bool kSecure = std::is_same_v<Over, SecureStream>;

  static Over MakeStream(asio::io_context& io, asio::ssl::context* context) {
    if constexpr (kSecure) {
      return Over(io, *context);
    } else {
      return Over(io);
    }
  }
  Stream& Lowest() { return beast::get_lowest_layer(stream_); }

  /// From now on it is the peer's turn.
  void AwaitPeer() {
    Lowest().expires_after(kRequestTimeout);
    LeaveIdle();
    idle_ = serving_.idle.insert(serving_.idle.end(), this);
  }
  void LeaveIdle() {
    if (idle_) serving_.idle.erase(*idle_);
    idle_.reset();
  }

  /// False when as many are under way as may be.
  bool BeginPage(const std::string& path) {
    if (std::ranges::find(kHealthPages, path) != kHealthPages.end()) return true;
    if (serving_.pages_under_way >= kPagesMax) return false;
    ++serving_.pages_under_way;
    in_page_ = true;
    return true;
  }
  void EndPage() {
    if (std::exchange(in_page_, false)) --serving_.pages_under_way;
  }

  Status MaySee(const std::string& path) {
    if constexpr (kSecure) {
      const std::unique_ptr<X509, void (*)(X509*)> shown(
          SSL_get1_peer_certificate(stream_.native_handle()), X509_free);
      return serving_.tls->MaySee(path, shown.get());
    } else {
      return OkStatus();
    }
  }

  void Read() {
    parser_.emplace();
    parser_->header_limit(kHeaderBytesMax);
    parser_->body_limit(0);
    AwaitPeer();
    http::async_read(stream_, buffer_, *parser_,
                     [self = this->shared_from_this()](error_code error, size_t) {
                       if (error || !self->closed_) return self->Close();
                       self->LeaveIdle();
                       self->Answer();
                     });
  }

  void Answer() {
    const auto& request = parser_->get();
    if (request.method() != http::verb::get && request.method() != http::verb::head) {
      return Write({405, "text/plain; charset=utf-8", "only GET and HEAD are served\n"});
    }
    const std::string path(request.target().substr(0, request.target().find('?')));
    if (Status may = MaySee(path); !may.ok()) {
      const int status = may.code() == Code::kUnauthenticated ? 401 : 403;
      return Write({.status = status, .body = may.ToString() + "\n"});
    }
    const auto page = serving_.pages.find(path);
    if (page == serving_.pages.end()) {
      return Write({404, "text/plain; charset=utf-8", "no such page\n"});
    }
    if (!BeginPage(path)) {
      return Write({503, "text/plain; charset=utf-8", "too many requests are being answered\n"});
    }
    const uint64_t number = ++request_number_;
    patience_.expires_after(kRequestTimeout);
    patience_.async_wait([self = this->shared_from_this(), number](error_code aborted) {
      if (!aborted)
        self->Respond(number, {503, "text/plain; charset=utf-8", "no answer in time\n"});
    });
    page->second([self = this->shared_from_this(), number](HttpReply reply) {
      asio::post(self->serving_.io, [self, number, reply = std::move(reply)]() mutable {
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
    AwaitPeer();
    http::async_write(stream_, *response_,
                      [self = this->shared_from_this()](error_code error, size_t) {
                        if (error || !self->closed_) return self->Close();
                        self->EndPage();
                        if (!self->response_->keep_alive()) return self->End();
                        self->Read();
                      });
  }

  /// With TLS's own end, so that a reader can tell it from a cut.
  void End() {
    if constexpr (kSecure) {
      stream_.async_shutdown([self = this->shared_from_this()](error_code) { self->Close(); });
    } else {
      Close();
    }
  }

  Serving& serving_;
  const std::shared_ptr<asio::ssl::context> context_;
  Over stream_;
  asio::steady_timer patience_;
  std::function<void()> closed_;  ///< null: it is
  std::optional<Idle::iterator> idle_;
  bool in_page_ = false;  ///< one of those that kPagesMax bounds
  uint64_t request_number_ = 0;
  beast::flat_buffer buffer_{kHeaderBytesMax};
  std::optional<http::request_parser<http::empty_body>> parser_;
  std::optional<http::response<http::string_body>> response_;
};

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(asio::io_context& io, std::map<std::string, HttpPage> pages, HttpTls* tls)
      : pages_(std::move(pages)), serving_{io, pages_, tls} {}
  ~HttpServerImpl() override { CloseAll(); }

  void Serve(memory::UniqueFd fd) override {
    if (connections_.size() >= kConnectionsMax) {
      // Whoever is being answered stays, for 5 s at most.
      if (serving_.idle.empty()) return;
      serving_.idle.front()->Close();
    }
    const uint64_t id = ++next_;
    auto closed = [this, id] { connections_.erase(id); };
    std::shared_ptr<Connection> connection;
    if (serving_.tls == nullptr) {
      connection =
          std::make_shared<ConnectionOver<Stream>>(serving_, nullptr, std::move(fd), closed);
    } else {
      connection = std::make_shared<ConnectionOver<SecureStream>>(serving_, serving_.tls->Context(),
                                                                  std::move(fd), closed);
    }
    connections_.emplace(id, connection);
    connection->Start();
  }

  void CloseAll() override {
    const auto connections = connections_;
    for (const auto& [id, connection] : connections) connection->Close();
  }

 private:
  const std::map<std::string, HttpPage> pages_;
  Serving serving_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::shared_ptr<Connection>> connections_;
};

}  // namespace

std::unique_ptr<HttpServer> HttpServer::Make(asio::io_context& io,
                                             std::map<std::string, HttpPage> pages, HttpTls* tls) {
  return std::make_unique<HttpServerImpl>(io, std::move(pages), tls);
}

}  // namespace weightwire::daemon
