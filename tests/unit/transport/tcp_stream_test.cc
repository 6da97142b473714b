#include "server/transport/tcp/tcp_stream.h"

#include <sys/mman.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/write.hpp>
#include <optional>

#include "gtest/gtest.h"
#include "tests/support/tls_for_tests.h"

namespace weightwire::transport {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

/// Memory that ends the process when it is touched.
class Untouchable {
 public:
  Untouchable()
      : at_(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    WW_CHECK(at_ != MAP_FAILED);
  }
  ~Untouchable() { munmap(at_, kBytes); }
  Untouchable(const Untouchable&) = delete;
  Untouchable& operator=(const Untouchable&) = delete;
  boost::asio::const_buffer buffer() const { return {at_, kBytes}; }
  boost::asio::mutable_buffer into() const { return {at_, kBytes}; }

 private:
  static constexpr size_t kBytes = 1 << 20;
  void* at_;
};

class TcpStreams : public ::testing::TestWithParam<Integrity> {
 protected:
  TcpStreams() : stream_(context_), peer_(context_) {
    tcp::acceptor acceptor(context_, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
    stream_.socket().connect(acceptor.local_endpoint());
    acceptor.accept(peer_);
    if (const auto tls = weightwire::testing::TlsPeersFor(GetParam())) {
      tls_ = tls->Context();
      stream_.AsyncSecure(tls_.get(), TlsSocket::Side::kCaller, [](const error_code&) {});
    }
  }

  boost::asio::io_context context_;
  std::shared_ptr<ssl_ctx_st> tls_;
  TcpStream stream_;
  tcp::socket peer_;
};

INSTANTIATE_TEST_SUITE_P(Sockets, TcpStreams, ::testing::Values(Integrity::kCrc, Integrity::kTls),
                         [](const auto& param) {
                           return param.param == Integrity::kTls ? "tls" : "plain";
                         });

// What is exported may be unmapped as soon as its session is closed, and Asio then still goes on
// with the rest of a write of which a part was sent.
TEST_P(TcpStreams, AClosedOneTouchesNoBuffer) {
  const Untouchable gone;
  stream_.Close();
  std::optional<error_code> wrote, read;
  boost::asio::async_write(stream_, gone.buffer(), [&](const error_code& e, size_t) { wrote = e; });
  stream_.async_read_some(gone.into(), [&](const error_code& e, size_t) { read = e; });
  context_.run();
  ASSERT_TRUE(wrote && read);
  EXPECT_TRUE(*wrote && *read) << *wrote << " " << *read;
}

}  // namespace
}  // namespace weightwire::transport
