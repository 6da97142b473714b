// Peers that speak UCX and do not keep to our protocol: a bare worker of the plug-in, driven here.
#include <netinet/in.h>
#include <poll.h>

#include "gmock/gmock.h"
#include "server/transport/address.h"
#include "server/transport/handshake.h"
#include "server/transport/ucx/ucx_library.h"
#include "server/transport/ucx/ucx_messages.h"
#include "server/transport/ucx/ucx_self_test.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

using ::testing::HasSubstr;
using transport::EncodeUcxMessage;
using transport::Frame;
using transport::FrameType;
using transport::UcxRange;
using transport::UcxWorker;

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// No test's own.
constexpr uint64_t kRegionHeld = 99;

/// One worker with at most one connection that matters.
class Plain final : public transport::UcxEvents {
 public:
  explicit Plain(const std::string& tls) {
    auto worker = transport::MakeUcxWorker({.tls = tls});
    EXPECT_TRUE(worker.has_value());
    worker_ = std::move(*worker);
  }
  ~Plain() override {
    for (uint64_t connection : made_) worker_->Close(connection);
    EXPECT_TRUE(Await([&] { return closed_ == made_.size(); }));
    if (memory_.handle != nullptr) worker_->Release(memory_);
  }

  /// Its part of a session's self-test: shows the pattern of `holder`, reads nothing, and says
  /// `verdict`. False when the peer's part was not as it should be.
  [[nodiscard]] bool TakeSelfTest(Incarnation holder, Code verdict = Code::kOk) {
    held_.resize(transport::kUcxSelfTestBytes);
    transport::FillUcxSelfTest(held_, holder);
    EXPECT_EQ(worker_->Register(held_.data(), held_.size(), transport::UcxKind::kHost, memory_),
              "");
    Send(Frame{.type = FrameType::kSelfTest, .key = {1, 1}});
    Send(Frame{.type = FrameType::kRegion, .request = kRegionHeld},
         std::as_bytes(std::span(memory_.remote_key)));
    bool told = false;
    for (size_t next = 1; !told; ++next) {
      if (!Await([&] { return received_.size() > next || broken_; }) || broken_) return false;
      const auto message = transport::DecodeUcxMessage(received_[next]);
      if (!message.has_value()) return false;
      const uint64_t request = message->frame.request;
      if (message->frame.type == FrameType::kGet) {
        const std::vector<UcxRange> ranges = {
            {kRegionHeld, reinterpret_cast<uintptr_t>(held_.data()), held_.size()}};
        Send(Frame{.type = FrameType::kGetReply, .request = request},
             transport::EncodeUcxRanges(ranges));
      }
      told = message->frame.type == FrameType::kSelfTestEnd;
      if (told && message->frame.code != Code::kOk) return false;
    }
    Send(Frame{.type = FrameType::kSelfTestEnd, .code = verdict});
    received_.resize(1);
    return true;
  }

  void ConnectTo(const std::string& address) {
    const auto parts = transport::SplitAddress(address);
    sockaddr_in inet = Loopback(parts->second);
    std::string failure;
    connection_ = worker_->Connect(reinterpret_cast<const sockaddr*>(&inet), sizeof(inet), failure);
    EXPECT_NE(connection_, 0u) << failure;
    made_.push_back(connection_);
  }
  std::string Listen() {
    const sockaddr_in inet = Loopback(0);
    uint16_t port = 0;
    EXPECT_EQ(worker_->Listen(reinterpret_cast<const sockaddr*>(&inet), sizeof(inet), port), "");
    return "127.0.0.1:" + std::to_string(port);
  }
  void Send(std::span<const std::byte> bytes) { worker_->Send(connection_, bytes, false); }
  void Send(Frame frame, std::span<const std::byte> payload = {}) {
    Send(EncodeUcxMessage(frame, payload));
  }
  /// Drives the worker until `condition`; false when that takes as long as only a failure does.
  [[nodiscard]] bool Await(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + 30s;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      if (worker_->Progress(*this) || !worker_->Arm()) continue;
      pollfd event{worker_->event_fd(), POLLIN, 0};
      poll(&event, 1, 20);
    }
    return true;
  }
  void HangUp() {
    worker_->Close(connection_);
    EXPECT_TRUE(Await([&] { return closed_ > 0; }));
    made_.clear();
    closed_ = 0;
    broken_ = true;
  }
  [[nodiscard]] bool SeesEnd() {
    return Await([&] { return broken_; });
  }
  [[nodiscard]] bool Receives(size_t messages) {
    return Await([&] { return received_.size() >= messages; });
  }

  std::vector<std::vector<std::byte>> received_;
  bool broken_ = false;

 private:
  static sockaddr_in Loopback(uint16_t port) {
    sockaddr_in inet{};
    inet.sin_family = AF_INET;
    inet.sin_port = htons(port);
    inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return inet;
  }
  void OnCaller(void* request) override {
    std::string failure;
    connection_ = worker_->Accept(request, failure);
    EXPECT_NE(connection_, 0u) << failure;
    made_.push_back(connection_);
  }
  void OnMessage(uint64_t, std::span<const std::byte> message) override {
    received_.emplace_back(message.begin(), message.end());
  }
  void OnSent(uint64_t) override {}
  void OnRead(uint64_t, uint64_t, const std::string&) override {}
  void OnBroken(uint64_t connection, const std::string&) override {
    broken_ |= connection == connection_;
  }
  void OnClosed(uint64_t) override { ++closed_; }

  std::unique_ptr<UcxWorker> worker_;
  std::vector<std::byte> held_;
  transport::UcxMemory memory_;
  uint64_t connection_ = 0;
  std::vector<uint64_t> made_;
  size_t closed_ = 0;
};

class RawUcx : public Conformance {
 protected:
  RawUcx() : sink(rig) { Listen(kLong); }
  /// Who waits for the timeout has a short one; others might not be done within it on a busy host.
  void Listen(Nanos handshake_timeout) {
    side = rig.MakeSide(
        {.handshake_timeout = handshake_timeout, .inbound_handshakes_max = 4, .metrics = &sink});
  }
  std::unique_ptr<Plain> Visit() {
    auto plain = std::make_unique<Plain>(rig.kind().tls);
    plain->ConnectTo(side->transport->address());
    return plain;
  }
  std::unique_ptr<Plain> OpenSession() {
    auto plain = Visit();
    Prove(*plain);
    EXPECT_TRUE(plain->TakeSelfTest(side->self));
    return plain;
  }
  /// All that a caller says before its self-test.
  void Prove(Plain& plain) {
    transport::CallerHandshake handshake(rig.HelloFor(*side, side->self));
    const auto first = transport::EncodeCallerHello(handshake.caller_hello());
    plain.Send(first);
    ASSERT_TRUE(plain.Receives(1));
    const auto proof = handshake.OnCalleeProof(first, plain.received_[0]);
    ASSERT_TRUE(proof.has_value());
    plain.Send(*proof);
    ASSERT_TRUE(plain.Receives(2));
    plain.received_.erase(plain.received_.begin());
  }
  bool Counted(const std::string& what, double count = 1) {
    return rig.Wait([&] { return sink.counts[what] >= count; });
  }
  /// A session of ours with a callee that is the test, before its self-test.
  std::shared_ptr<Call> Dial(Plain& plain, Nanos timeout = kLong) {
    auto call = rig.Connect(*side, plain.Listen(), rig.HelloFor(*side, kCallee), timeout);
    EXPECT_TRUE(plain.Receives(1));
    const auto said = transport::DecodeCallerHello(plain.received_[0]);
    EXPECT_TRUE(said.has_value());
    const transport::CalleeHandshake handshake(*said, plain.received_[0], kCallee, side->recorder);
    plain.Send(handshake.callee_proof());
    EXPECT_TRUE(plain.Receives(2));
    const auto verdict = handshake.OnProof(plain.received_[1]);
    EXPECT_TRUE(verdict.has_value() && verdict->code == Code::kOk);
    plain.Send(transport::EncodeCalleeReply(*verdict));
    plain.received_.erase(plain.received_.begin());
    return call;
  }
  std::shared_ptr<Endpoint> Open(Plain& plain) {
    auto call = Dial(plain);
    EXPECT_TRUE(plain.TakeSelfTest(kCallee));
    EXPECT_TRUE(plain.Await([&] { return rig.Read<bool>([&] { return call->completions > 0; }); }));
    EXPECT_EQ(call->status, OkStatus());
    return call->endpoint;
  }

  /// The failure of a call whose self-test cannot end well.
  Status Failure(Plain& plain, const std::shared_ptr<Call>& call) {
    EXPECT_TRUE(plain.SeesEnd());
    EXPECT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->endpoint, nullptr);
    EXPECT_THAT(call->status.message(), HasSubstr("self-test of ucx with 127.0.0.1:"));
    EXPECT_THAT(call->status.message(),
                HasSubstr(rig.kind().tls == "tcp" ? "tcp/lo" : "cma/memory"));
    EXPECT_THAT(call->status.remedy(), HasSubstr("ucx_tls"));
    EXPECT_TRUE(side->recorder.closed.empty());
    return call->status;
  }

  static constexpr Incarnation kCallee{1};
  CountingSink sink;
  std::unique_ptr<Side> side;
};

// Where UCX knows no CUDA, memory that is said to be a GPU's is refused in words, before UCX looks.
TEST(RawUcxMemory, OfCudaIsRefusedWhereUcxKnowsNone) {
  if (UcxKinds().empty()) GTEST_SKIP() << "the plug-in is not built";
  auto worker = transport::MakeUcxWorker({.tls = "tcp,posix,cma"});
  ASSERT_TRUE(worker.has_value());
  ASSERT_FALSE((*worker)->KnowsCuda());
  std::vector<std::byte> bytes(4096);
  transport::UcxMemory memory;
  EXPECT_EQ((*worker)->Register(bytes.data(), bytes.size(), transport::UcxKind::kCuda, memory),
            "this libucp reaches no CUDA memory");
  EXPECT_EQ(memory.handle, nullptr);
  ASSERT_EQ((*worker)->Register(bytes.data(), bytes.size(), transport::UcxKind::kHost, memory), "");
  EXPECT_EQ(memory.kind, transport::UcxKind::kHost);
  (*worker)->Release(memory);
}

TEST_P(RawUcx, GarbageInsteadOfAHelloIsClosedAndCounted) {
  auto plain = Visit();
  plain->Send(std::vector<std::byte>(200, std::byte{'G'}));
  EXPECT_TRUE(plain->SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total garbage"));
  EXPECT_TRUE(side->recorder.hellos.empty());
}

TEST_P(RawUcx, SilenceIsClosedAfterTheHandshakeTimeout) {
  Listen(300ms);
  auto plain = Visit();
  EXPECT_TRUE(plain->SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total handshake_timeout"));
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["connections handshaking"] == 0; }));
}

TEST_P(RawUcx, SilentVisitorsAreBounded) {
  Listen(1s);
  std::vector<std::unique_ptr<Plain>> silent;
  for (int i = 0; i < 5; ++i) silent.push_back(Visit());
  for (const auto& plain : silent) EXPECT_TRUE(plain->SeesEnd());
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["connections handshaking"] == 0; }));
  auto good = OpenSession();
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
}

TEST_P(RawUcx, GarbageOnASessionEndsIt) {
  const std::string longest(65, 'x');
  std::vector<std::function<void(Plain&)>> offences = {
      [](Plain& plain) { plain.Send(std::vector<std::byte>(64, std::byte{'G'})); },
      [](Plain& plain) { plain.Send(std::vector<std::byte>(3)); },
      [](Plain& plain) { plain.Send(Frame{.type = FrameType::kGetReply, .request = 1}); },
      [](Plain& plain) { plain.Send(Frame{.type = FrameType::kMapReply, .request = 1}); },
      [](Plain& plain) { plain.Send(Frame{.type = FrameType::kRegionGone, .request = 1}); },
      [](Plain& plain) { plain.Send(Frame{.type = FrameType::kGetEnd, .request = 1}); },
      [&](Plain& plain) {
        plain.Send(Frame{.type = FrameType::kNotify, .request = 1}, Bytes(longest));
      },
      [](Plain& plain) {
        plain.Send(Frame{.type = FrameType::kNotify, .request = 2}, Bytes("out of order"));
      },
      [](Plain& plain) {
        auto message = EncodeUcxMessage({.type = FrameType::kNotify, .request = 1}, Bytes("abc"));
        message.back() ^= std::byte{1};
        plain.Send(message);
      },
      [](Plain& plain) {
        auto message = EncodeUcxMessage({.type = FrameType::kNotify, .request = 1}, Bytes("abc"));
        message.pop_back();
        plain.Send(message);
      },
  };
  double offence_count = 0;
  for (const auto& offend : offences) {
    auto plain = OpenSession();
    offend(*plain);
    EXPECT_TRUE(plain->SeesEnd()) << "offence " << offence_count;
    EXPECT_TRUE(Counted("transport_closes_total garbage", ++offence_count));
  }
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.closed.size() == offences.size(); }));
  EXPECT_TRUE(side->recorder.notifies.empty());
}

TEST_P(RawUcx, WhoReplaysAnotherOnesOpeningIsRefused) {
  transport::CallerHandshake handshake(rig.HelloFor(*side, side->self));
  const auto first = transport::EncodeCallerHello(handshake.caller_hello());
  std::vector<std::byte> proof;
  for (const bool replay : {false, true}) {
    auto plain = Visit();
    plain->Send(first);
    ASSERT_TRUE(plain->Receives(1));
    if (!replay) {
      const auto made = handshake.OnCalleeProof(first, plain->received_[0]);
      ASSERT_TRUE(made.has_value());
      proof.assign(made->begin(), made->end());
    }
    plain->Send(proof);
    ASSERT_TRUE(plain->Receives(2));
    const auto verdict = transport::DecodeCalleeReply(plain->received_[1]);
    ASSERT_TRUE(verdict.has_value());
    EXPECT_EQ(verdict->reason, replay ? Reason::kTicketRejected : Reason::kNone);
  }
  EXPECT_TRUE(Counted("auth_failures_total proof"));
  EXPECT_TRUE(side->recorder.accepted.empty());
}

TEST_P(RawUcx, MoreRequestsThanAllowedEndTheSession) {
  auto region = PatternRegion(8 << 20);
  const RegionKey key = side->transport->Export({{region, 0, region->size()}});
  auto plain = OpenSession();
  for (uint64_t request = 1; request <= 400; ++request) {
    plain->Send(Frame{.type = FrameType::kGet, .request = request, .key = key, .length = 8 << 20});
  }
  EXPECT_TRUE(plain->SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total garbage"));
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*side, key)));
}

TEST_P(RawUcx, AnyFramesAfterAGoodHelloLeaveTheOthersAlone) {
  std::mt19937_64 random(Seed());
  auto region = PatternRegion(100'000);
  const RegionKey key = side->transport->Export({{region, 0, region->size()}});
  auto reader = rig.MakeSide();
  auto endpoint = rig.Open(*reader, *side);
  for (int round = 0; round < 10; ++round) {
    auto plain = OpenSession();
    for (int i = 0; i < 8; ++i) {
      auto message =
          EncodeUcxMessage({.type = static_cast<FrameType>(1 + random() % 8),
                            .request = random() % 3,
                            .key = {key.id - random() % 2, key.generation - random() % 2},
                            .offset = random() % 3 == 0 ? random() : random() % 1000,
                            .length = random() % 3 == 0 ? random() : random() % 70},
                           {});
      if (random() % 4 == 0) message[random() % message.size()] ^= std::byte{1};
      plain->Send(message);
    }
  }
  std::vector<std::byte> buffer(100'000);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(buffer, 0), -1);
}

TEST_P(RawUcx, RefusesMoreSessionsThanItsBound) {
  auto tight = rig.MakeSide({.inbound_sessions_max = 1});
  auto caller = rig.MakeSide();
  auto first = rig.Open(*caller, *tight);
  auto second =
      rig.Connect(*caller, tight->transport->address(), rig.HelloFor(*caller, tight->self));
  ASSERT_TRUE(rig.WaitFor(second));
  EXPECT_EQ(second->status.code(), Code::kResourceExhausted);
  EXPECT_EQ(second->status.reason(), Reason::kLimitExceeded);
}

TEST_P(RawUcx, ACalleeThatNeverAnswersMeetsTheDeadline) {
  Plain plain(rig.kind().tls);
  const std::string address = plain.Listen();
  auto call = rig.Connect(*side, address, rig.HelloFor(*side, kCallee), 200ms);
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kDeadlineExceeded);
}

TEST_P(RawUcx, ACalleeThatAnswersGarbageIsLeft) {
  Plain plain(rig.kind().tls);
  const std::string address = plain.Listen();
  auto call = rig.Connect(*side, address, rig.HelloFor(*side, kCallee));
  ASSERT_TRUE(plain.Receives(1));
  plain.Send(std::vector<std::byte>(100, std::byte{'G'}));
  EXPECT_TRUE(plain.SeesEnd());
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
}

TEST_P(RawUcx, ACalleeWhoseMemoryHoldsOtherBytesIsNotUsed) {
  Plain plain(rig.kind().tls);
  auto call = Dial(plain);
  EXPECT_FALSE(plain.TakeSelfTest(Incarnation(2)));
  plain.HangUp();
  const Status why = Failure(plain, call);
  EXPECT_EQ(why.reason(), Reason::kTransportFailed);
  EXPECT_THAT(why.message(), HasSubstr("other bytes arrived"));
  EXPECT_TRUE(Counted("ucx_self_tests_total wrong_bytes"));
}

TEST_P(RawUcx, ACalleeThatCannotReadFromHereIsNotUsed) {
  Plain plain(rig.kind().tls);
  auto call = Dial(plain);
  EXPECT_TRUE(plain.TakeSelfTest(kCallee, Code::kUnavailable));
  EXPECT_THAT(Failure(plain, call).message(), HasSubstr("could not read from here"));
  EXPECT_TRUE(Counted("ucx_self_tests_total failed"));
}

TEST_P(RawUcx, ASelfTestThatDoesNotBeginMeetsTheDeadline) {
  Plain plain(rig.kind().tls);
  auto call = Dial(plain, 500ms);
  const Status why = Failure(plain, call);
  EXPECT_EQ(why.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(why.message(), HasSubstr("did not begin its part"));
  EXPECT_TRUE(Counted("ucx_self_tests_total timeout"));
}

TEST_P(RawUcx, ACallerThatFailsItsSelfTestIsNeverAccepted) {
  Listen(300ms);
  for (const bool silent : {true, false}) {
    auto plain = Visit();
    Prove(*plain);
    if (silent) {
      EXPECT_TRUE(plain->SeesEnd());
      EXPECT_TRUE(Counted("ucx_self_tests_total timeout"));
    } else {
      EXPECT_FALSE(plain->TakeSelfTest(Incarnation(2)));
      plain->HangUp();
      EXPECT_TRUE(Counted("ucx_self_tests_total wrong_bytes"));
    }
  }
  EXPECT_TRUE(side->recorder.accepted.empty());
  EXPECT_TRUE(side->recorder.closed.empty());
}

TEST_P(RawUcx, WhatUcxChoseAndItsRateAreCounted) {
  auto reader = rig.MakeSide();
  auto endpoint = rig.Open(*reader, *side);
  ASSERT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
  EXPECT_TRUE(Counted("ucx_self_tests_total passed"));
  const std::string lanes = rig.Read<std::string>([&] {
    for (const auto& [key, value] : sink.counts) {
      if (key.starts_with("ucx_sessions ") && value == 1) return key.substr(13);
    }
    return std::string();
  });
  EXPECT_THAT(lanes, HasSubstr(rig.kind().tls == "tcp" ? "tcp/lo" : "cma/memory"));
  EXPECT_TRUE(Counted("ucx_self_test_bytes_per_second " + lanes, 1e6));
  endpoint->Close();
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["ucx_sessions " + lanes] == 0; }));
}

/// Ranges that are not what was asked for, or of memory that was never shown.
TEST_P(RawUcx, AReplyThatDoesNotFitItsGetTouchesNothing) {
  const std::vector<std::vector<UcxRange>> lies = {{},
                                                   {{1, 4096, 99}},
                                                   {{1, 4096, 120}},
                                                   {{1, 4096, 100}},
                                                   {{1, 4096, UINT64_MAX}, {1, 1, 101}}};
  for (const auto& lie : lies) {
    Plain plain(rig.kind().tls);
    auto endpoint = Open(plain);
    std::vector<std::byte> buffer(100, std::byte{0xee});
    auto get = rig.Get(endpoint, {1, 1}, 0, {buffer});
    ASSERT_TRUE(plain.Receives(2));
    auto request = transport::DecodeUcxMessage(plain.received_[1]);
    ASSERT_TRUE(request.has_value());
    EXPECT_EQ(request->frame.length, 100u);
    plain.Send(Frame{.type = FrameType::kGetReply, .request = request->frame.request},
               transport::EncodeUcxRanges(lie));
    EXPECT_TRUE(plain.SeesEnd());
    ASSERT_TRUE(rig.WaitFor(get));
    EXPECT_EQ(get->status.code(), Code::kUnavailable);
    EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte{0xee}));
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RawUcx);  // where the plug-in is not built
INSTANTIATE_TEST_SUITE_P(Transports, RawUcx, ::testing::ValuesIn(UcxKinds()), KindName);

/// Says what of the transport ucx was not tested here, and why.
TEST(Ucx, IsTestedOverAll) {
#ifndef WEIGHTWIRE_UCX
  GTEST_SKIP() << "the transport ucx was not tested: " WEIGHTWIRE_UCX_WHY;
#else
  if (!UcxSurvivesTcp()) GTEST_SKIP() << "ucx over tcp alone was not tested: libucp before 1.22";
#endif
}

}  // namespace
}  // namespace weightwire::conformance
