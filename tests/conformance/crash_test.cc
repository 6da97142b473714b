// Peers in another process that are killed or stopped in the middle of something.
#include <sstream>

#include "tests/conformance/pattern.h"
#include "tests/conformance/peer_process.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

constexpr uint64_t kBytes = 16 << 20;

class Crashes : public Conformance {
 protected:
  Crashes() : here(rig.MakeSide()) {}

  std::vector<std::string> Arguments(const std::string& role) {
    const Kind& kind = rig.kind();
    std::string sockets = std::to_string(kind.connections);
    if (kind.integrity == transport::Integrity::kMac) sockets += "+mac";
    if (kind.integrity == transport::Integrity::kTls) sockets += "+tls";
    return {role, kind.backend, kind.backend == "ucx" ? kind.tls : sockets, std::to_string(kBytes)};
  }
  std::unique_ptr<Peer> StartServer() {
    auto peer = std::make_unique<Peer>(Arguments("serve"));
    uint64_t incarnation = 0;
    std::istringstream(peer->ReadLine()) >> address >> incarnation >> key.id >> key.generation;
    callee = Incarnation(incarnation);
    return peer;
  }
  void Open() {
    auto call = rig.Connect(*here, address, rig.HelloFor(*here, callee));
    ASSERT_TRUE(rig.WaitFor(call));
    ASSERT_EQ(call->status, OkStatus());
    endpoint = call->endpoint;
  }
  std::vector<std::shared_ptr<Call>> PostGets(size_t count, Nanos timeout) {
    buffers.assign(count, std::vector<std::byte>(kBytes));
    std::vector<std::shared_ptr<Call>> calls;
    for (auto& buffer : buffers) calls.push_back(rig.Get(endpoint, key, 0, {buffer}, timeout));
    return calls;
  }

  std::unique_ptr<Side> here;
  std::string address;
  Incarnation callee{};
  RegionKey key;
  std::shared_ptr<Endpoint> endpoint;
  std::vector<std::vector<std::byte>> buffers;
};

TEST_P(Crashes, SourceKilledWhileItIsRead) {
  auto peer = StartServer();
  ASSERT_NO_FATAL_FAILURE(Open());
  auto calls = PostGets(24, kLong);
  ASSERT_TRUE(rig.WaitFor(calls.front()));
  peer->Kill();
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(endpoint->id()); }));
  EXPECT_EQ(here->recorder.closed.at(endpoint->id()).code(), Code::kUnavailable);
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_EQ(calls[i]->completions, 1);
    if (calls[i]->status.ok()) {
      EXPECT_EQ(FirstDifference(buffers[i], 0), -1);
    } else {
      EXPECT_EQ(calls[i]->status.code(), Code::kUnavailable);
    }
  }
  EXPECT_EQ(calls.front()->status, OkStatus());
}

TEST_P(Crashes, ReaderKilledWhileItReadsFreesTheExport) {
  auto region = PatternRegion(kBytes);
  const RegionKey own = here->transport->Export({{region, 0, kBytes}});
  auto arguments = Arguments("read");
  for (const std::string& more : {here->transport->address(), std::to_string(here->self.value),
                                  std::to_string(own.id), std::to_string(own.generation)}) {
    arguments.push_back(more);
  }
  Peer peer(arguments);
  ASSERT_TRUE(rig.Wait([&] { return !here->recorder.notifies.empty(); }));
  EXPECT_EQ(here->recorder.notifies.front(), "reading");
  peer.Kill();
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*here, own)));
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.size() == 1; }));
}

TEST_P(Crashes, FrozenReaderDelaysRevokeUntilItsSessionIsClosed) {
  auto region = PatternRegion(kBytes);
  const RegionKey own = here->transport->Export({{region, 0, kBytes}});
  auto arguments = Arguments("read");
  for (const std::string& more : {here->transport->address(), std::to_string(here->self.value),
                                  std::to_string(own.id), std::to_string(own.generation)}) {
    arguments.push_back(more);
  }
  Peer peer(arguments);
  ASSERT_TRUE(rig.Wait([&] { return !here->recorder.notifies.empty(); }));
  peer.Freeze();
  auto revoked = rig.Revoke(*here, own);
  here->recorder.accepted.front()->Close();
  ASSERT_TRUE(rig.WaitFor(revoked));
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.size() == 1; }));
}

TEST_P(Crashes, FrozenSourceMeetsTheDeadline) {
  auto peer = StartServer();
  ASSERT_NO_FATAL_FAILURE(Open());
  peer->Freeze();
  // Last, the one that expires: the session that it ends has all of them, however slow we post.
  auto patient = PostGets(3, kLong);
  std::vector<std::byte> hasty_buffer(1000);
  auto hasty = rig.Get(endpoint, key, 0, {hasty_buffer}, 200ms);
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(endpoint->id()); }));
  EXPECT_EQ(hasty->completions, 1);
  EXPECT_EQ(hasty->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(hasty->status.reason(), Reason::kDeadlineExceeded);
  // One expired operation ends the session, and with it those that had time left.
  for (const auto& call : patient) {
    EXPECT_EQ(call->completions, 1);
    EXPECT_EQ(call->status.code(), Code::kUnavailable);
    EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
  }
  EXPECT_EQ(here->recorder.closed.at(endpoint->id()).code(), Code::kUnavailable);
}

TEST_P(Crashes, FrozenCalleeMeetsTheDeadlineOfConnect) {
  auto peer = StartServer();
  peer->Freeze();
  auto call = rig.Connect(*here, address, rig.HelloFor(*here, callee), 200ms);
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(call->completions, 1);
}

INSTANTIATE_TEST_SUITE_P(Transports, Crashes, ::testing::ValuesIn(RealKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
