#include "server/daemon/http_server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace weightwire::daemon {
namespace {

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    for (const char* path : {"/healthz", "/metrics"}) {
      pages_[path] = [](HttpRespond respond) { respond({.body = "fine\n"}); };
    }
    pages_["/long"] = [](HttpRespond respond) { respond({.body = std::string(8 << 20, 'x')}); };
    pages_["/stuck"] = [this](HttpRespond respond) { stuck_.push_back(std::move(respond)); };
    server_ = HttpServer::Make(io_, pages_, nullptr);
  }

  /// What came in on `fd` by now, up to `bytes_max`; the server has done all that it can.
  std::string Heard(const memory::UniqueFd& fd, size_t bytes_max = 4096) {
    io_.restart();
    io_.poll();
    std::string out(bytes_max, '\0');
    const ssize_t got = recv(fd.get(), out.data(), out.size(), MSG_DONTWAIT);
    out.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return out;
  }
  static bool Ended(const memory::UniqueFd& fd) {
    char byte;
    return recv(fd.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0;
  }

  memory::UniqueFd Connect() {
    int pair[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    server_->Serve(memory::UniqueFd(pair[1]));
    return memory::UniqueFd(pair[0]);
  }
  static void Ask(const memory::UniqueFd& fd, const std::string& path) {
    const std::string request = "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n";
    EXPECT_EQ(send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
  }
  std::string Get(const std::string& path) {
    const memory::UniqueFd fd = Connect();
    Ask(fd, path);
    return Heard(fd);
  }
  void ExpectHealthy() {
    for (const char* path : {"/healthz", "/metrics"}) {
      EXPECT_TRUE(Get(path).starts_with("HTTP/1.1 200")) << path;
    }
  }

  boost::asio::io_context io_{1};
  std::map<std::string, HttpPage> pages_;
  std::vector<HttpRespond> stuck_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, SilentConnectionsKeepNobodyFromItsHealth) {
  std::vector<memory::UniqueFd> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(Connect());
  ExpectHealthy();
  EXPECT_TRUE(Ended(silent.front())) << "the oldest go first";
  EXPECT_FALSE(Ended(silent.back()));
}

TEST_F(HttpServerTest, AConnectionThatJustAskedIsNewAgain) {
  const memory::UniqueFd first = Connect();
  std::vector<memory::UniqueFd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(Connect());
  Ask(first, "/healthz");
  EXPECT_FALSE(Heard(first).empty());
  for (int i = 0; i < 200; ++i) silent.push_back(Connect());
  EXPECT_FALSE(Ended(first));
  EXPECT_TRUE(Ended(silent.front()));
}

TEST_F(HttpServerTest, ReadersThatTakeNothingKeepNobodyFromItsHealth) {
  std::vector<memory::UniqueFd> readers;
  for (int i = 0; i < 300; ++i) {
    readers.push_back(Connect());
    Ask(readers.back(), "/long");
    io_.restart();
    io_.poll();
  }
  ExpectHealthy();
}

TEST_F(HttpServerTest, PagesThatDoNotAnswerKeepNobodyFromItsHealth) {
  std::vector<memory::UniqueFd> readers;
  for (int i = 0; i < 300; ++i) {
    readers.push_back(Connect());
    Ask(readers.back(), "/stuck");
    io_.restart();
    io_.poll();
  }
  EXPECT_EQ(stuck_.size(), 64u);
  EXPECT_TRUE(Heard(readers.back()).starts_with("HTTP/1.1 503"));
  ExpectHealthy();
  for (HttpRespond& respond : std::exchange(stuck_, {})) respond({.body = "late\n"});
  EXPECT_TRUE(Heard(readers.front()).ends_with("late\n")) << "nobody who is answered is closed";
  const memory::UniqueFd next = Connect();
  Ask(next, "/stuck");
  EXPECT_TRUE(Heard(next).empty());
  EXPECT_EQ(stuck_.size(), 1u) << "their places are free again";
}

}  // namespace
}  // namespace weightwire::daemon
