#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class Notifies : public Conformance {
 protected:
  Notifies()
      : callee(rig.MakeSide()), caller(rig.MakeSide()), endpoint(rig.Open(*caller, *callee)) {}
  std::unique_ptr<Side> callee;
  std::unique_ptr<Side> caller;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_P(Notifies, ArriveInOrderBesideLargeGets) {
  constexpr uint64_t kBytes = 2 << 20;
  auto region = PatternRegion(kBytes);
  const RegionKey key = callee->transport->Export({{region, 0, kBytes}});
  std::vector<std::vector<std::byte>> buffers(8, std::vector<std::byte>(kBytes));
  std::vector<std::shared_ptr<Call>> calls;
  std::vector<std::string> sent;
  for (size_t i = 0; i < 500; ++i) {
    if (i % 64 == 0) calls.push_back(rig.Get(endpoint, key, 0, {buffers[i / 64]}));
    sent.push_back(std::to_string(i) + std::string(i % 50, 'x'));
    ASSERT_EQ(endpoint->Notify(Bytes(sent.back())), OkStatus());
  }
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.notifies.size() == sent.size(); }));
  EXPECT_EQ(callee->recorder.notifies, sent);
  for (const auto& call : calls) {
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
  }
}

TEST_P(Notifies, TravelBothWaysAndCarryAnyBytes) {
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.accepted.size() == 1; }));
  const std::string longest(transport::kNotifyBytesMax, '\0');
  ASSERT_EQ(callee->recorder.accepted.front()->Notify(Bytes(longest)), OkStatus());
  ASSERT_EQ(callee->recorder.accepted.front()->Notify({}), OkStatus());
  ASSERT_TRUE(rig.Wait([&] { return caller->recorder.notifies.size() == 2; }));
  EXPECT_EQ(caller->recorder.notifies, (std::vector<std::string>{longest, ""}));
}

TEST_P(Notifies, RefusesMoreThan64Bytes) {
  const std::string too_long(transport::kNotifyBytesMax + 1, 'x');
  EXPECT_EQ(endpoint->Notify(Bytes(too_long)).code(), Code::kInvalidArgument);
  ASSERT_EQ(endpoint->Notify(Bytes("still open")), OkStatus());
  ASSERT_TRUE(rig.Wait([&] { return !callee->recorder.notifies.empty(); }));
  EXPECT_EQ(callee->recorder.notifies.front(), "still open");
}

TEST_P(Notifies, RefusesAboveTheQueueBound) {
  auto tight = rig.MakeSide({.notifies_queued_max = 0});
  auto full = rig.Open(*tight, *callee);
  const Status status = full->Notify(Bytes("x"));
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.reason(), Reason::kLimitExceeded);
}

TEST_P(Notifies, FailAfterTheEnd) {
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return caller->recorder.closed.contains(endpoint->id()); }));
  const Status status = endpoint->Notify(Bytes("x"));
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.reason(), Reason::kTransportFailed);
}

TEST_P(Notifies, ThoseSentBeforeCloseOfThePeerArriveBeforeItsEnd) {
  // The sender closes only when the last one has been answered, as transfer/ does with CLOSE.
  callee->recorder.after_notify = [](const std::shared_ptr<Endpoint>& from) {
    static_cast<void>(from->Notify(Bytes("got it")));
  };
  for (int i = 0; i < 10; ++i) ASSERT_EQ(endpoint->Notify(Bytes("n")), OkStatus());
  ASSERT_TRUE(rig.Wait([&] { return caller->recorder.notifies.size() == 10; }));
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.closed.size() == 1; }));
  EXPECT_EQ(callee->recorder.notifies.size(), 10u);
  EXPECT_EQ(callee->recorder.closed.begin()->second.code(), Code::kUnavailable);
}

INSTANTIATE_TEST_SUITE_P(Transports, Notifies, ::testing::ValuesIn(AllKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
