#include <future>
#include <mutex>
#include <set>

#include "gtest/gtest.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"

namespace weightwire::transport {
namespace {

class Accepts final : public Handler {
 public:
  Result<Ticket> OnHello(const CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<Endpoint> endpoint) override {
    accepted_.set_value(endpoint->id());
  }
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}
  uint64_t AwaitId() { return accepted_.get_future().get(); }

 private:
  std::promise<uint64_t> accepted_;
};

/// A session of an agent with itself: the ids of both ends.
void AddSession(Transport& transport, Accepts& handler, std::set<uint64_t>& ids) {
  ASSERT_EQ(transport.Start(&handler, Incarnation(5)), OkStatus());
  Hello hello;
  hello.caller = hello.callee = Incarnation(5);
  std::promise<Result<std::shared_ptr<Endpoint>>> connected;
  transport.Connect(transport.address(), hello, std::chrono::seconds(60),
                    [&](auto result) { connected.set_value(std::move(result)); });
  const auto endpoint = connected.get_future().get();
  ASSERT_TRUE(endpoint.has_value()) << endpoint.error().ToString();
  ids.insert((*endpoint)->id());
  ids.insert(handler.AwaitId());
}

TEST(EndpointId, IsUniqueAcrossTransports) {
  Accepts of_shm;
  Accepts of_tcp;
  const auto shm = MakeShmTransport({});
  const auto tcp = MakeTcpTransport({});
  std::set<uint64_t> ids;
  AddSession(*shm, of_shm, ids);
  AddSession(*tcp, of_tcp, ids);
  EXPECT_EQ(ids.size(), 4u);
}

}  // namespace
}  // namespace weightwire::transport
