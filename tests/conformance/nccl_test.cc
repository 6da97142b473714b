// What nccl does beyond the contract: NCCL that hangs, fails, or does not let go, several GPUs, and
// peers that it does not reach.
#include <dlfcn.h>

#include <algorithm>
#include <random>

#include "server/transport/nccl/nccl_messages.h"
#include "tests/conformance/fake_nccl_transport.h"
#include "tests/conformance/gpu_side.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"
#include "tests/support/fake_nccl/fake_nccl.h"

namespace weightwire::conformance {
namespace {

constexpr uint64_t kBytes = (4 << 20) + 13;

template <typename Function>
Function* NcclCall(const char* name, Function*) {
  void* library = dlopen(FAKE_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}
#define NCCL_CALL(name) NcclCall(#name, static_cast<decltype(&::name)>(nullptr))

std::shared_ptr<device::Device> Gpu(size_t index) { return testing::WideFakeDevice(index); }

std::shared_ptr<memory::MemoryRegion> Slab(size_t gpu) {
  return memory::MemoryRegion::OnDevice(Gpu(gpu)->Allocate(kBytes).value(), 0, kBytes, {}, {});
}

std::shared_ptr<memory::MemoryRegion> PatternOn(size_t gpu, uint64_t first_index) {
  auto region = Slab(gpu);
  std::vector<std::byte> content(kBytes);
  FillPattern(content, first_index);
  EXPECT_EQ(device::CopyRun(region->bytes(), content.data(), kBytes), OkStatus());
  return region;
}

class Nccl : public ::testing::Test {
 protected:
  Nccl() : rig({"nccl", "nccl", 1}) {}
  ~Nccl() override { Reset(); }

  static void Fault(int rank, int fault) { NCCL_CALL(fake_nccl_fault)(rank, fault); }
  static void Reset() { NCCL_CALL(fake_nccl_reset)(); }
  static int LiveComms() { return NCCL_CALL(fake_nccl_live_comms)(); }

  std::unique_ptr<Side> MakeSide(transport::NcclOptions options) {
    auto side = std::make_unique<Side>(rig, Incarnation(5000 + ++made_));
    side->transport = transport::MakeNcclTransport(std::move(options));
    EXPECT_EQ(side->transport->Viable(), OkStatus());
    EXPECT_EQ(side->transport->Start(&side->recorder, side->self), OkStatus());
    return side;
  }
  static transport::NcclOptions OptionsOf(size_t gpu) { return FakeNcclOptions({}, gpu); }
  /// Of kBytes of the pattern, in memory of the fake GPU `gpu` that the export keeps.
  static RegionKey ExportPattern(Side& side, size_t gpu, uint64_t first_index) {
    return side.transport->Export({{PatternOn(gpu, first_index), 0, kBytes}});
  }
  /// Reads `key` into memory of the fake GPU `gpu`, and gives the bytes.
  std::vector<std::byte> Read(const std::shared_ptr<Endpoint>& endpoint, RegionKey key, size_t gpu,
                              Status* status, Nanos timeout = kLong) {
    auto target = Slab(gpu);
    auto call = rig.Get(endpoint, key, 0, {{*target, 0, kBytes}}, timeout);
    EXPECT_TRUE(rig.WaitFor(call));
    *status = call->status;
    return BytesOf({target->bytes(), kBytes});
  }

  Rig rig;

 private:
  uint64_t made_ = 0;
};

TEST_F(Nccl, NoByteOfAPayloadPassesTheHost) {
  auto source = MakeSide(OptionsOf(0));
  auto reader = MakeSide(OptionsOf(1));
  const RegionKey key = ExportPattern(*source, 0, 5);
  auto endpoint = rig.Open(*reader, *source);
  auto target = Slab(1);
  const auto host_bytes = FAKE_CALL(fake_cuda_host_bytes);
  const uint64_t before = host_bytes();
  auto call = rig.Get(endpoint, key, 0, {{*target, 0, kBytes}});
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  EXPECT_EQ(host_bytes(), before);
  EXPECT_EQ(FirstDifference(BytesOf({target->bytes(), kBytes}), 5), -1);
}

TEST_F(Nccl, EachGpuReadsOverALaneOfItsOwn) {
  transport::NcclOptions both = OptionsOf(0);
  both.devices.emplace(Gpu(1)->uuid(), Gpu(1));
  auto source = MakeSide(both);
  auto reader = MakeSide(both);
  const size_t first = both.devices.begin()->second == Gpu(0) ? 0 : 1;
  auto endpoint = rig.Open(*reader, *source);
  EXPECT_EQ(LiveComms(), 2) << "one lane: a communicator on each side";
  bool both_lanes = false;
  for (const size_t gpu : {first, 1 - first, first}) {
    const RegionKey key = ExportPattern(*source, 1 - gpu, gpu);
    Status status;
    const auto bytes = Read(endpoint, key, gpu, &status);
    ASSERT_EQ(status, OkStatus());
    EXPECT_EQ(FirstDifference(bytes, gpu), -1);
    both_lanes |= gpu != first;
    EXPECT_EQ(LiveComms(), both_lanes ? 4 : 2);
  }
}

/// Each side's rounds hold a buffer while they wait for one of the other side.
TEST_F(Nccl, TwoThatReadFromEachOtherWithOneBufferEachDoNotStandStill) {
  transport::NcclOptions options[] = {OptionsOf(0), OptionsOf(1)};
  std::unique_ptr<Side> sides[2];
  RegionKey keys[2];
  for (size_t i = 0; i < 2; ++i) {
    options[i].rounds_max = 1;
    options[i].buffer_bytes = 100'003;
    sides[i] = MakeSide(options[i]);
    keys[i] = ExportPattern(*sides[i], i, 100 * i);
  }
  // Two sessions in each direction, so that rounds of several wait for the one buffer.
  std::vector<std::shared_ptr<Call>> calls;
  std::vector<std::vector<std::byte>> buffers(24, std::vector<std::byte>(kBytes));
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  for (size_t i = 0; i < 4; ++i) endpoints.push_back(rig.Open(*sides[i % 2], *sides[1 - i % 2]));
  for (size_t i = 0; i < buffers.size(); ++i) {
    calls.push_back(rig.Get(endpoints[i % 4], keys[1 - i % 2], 0, {buffers[i]}));
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_TRUE(rig.WaitFor(calls[i]));
    ASSERT_EQ(calls[i]->status, OkStatus());
    EXPECT_EQ(FirstDifference(buffers[i], 100 * (1 - i % 2)), -1);
  }
}

TEST_F(Nccl, ACommunicatorThatDoesNotFormFailsTheConnectInItsTime) {
  auto source = MakeSide(OptionsOf(0));
  transport::NcclOptions options = OptionsOf(1);
  options.form_timeout = 300ms;
  auto reader = MakeSide(options);
  Fault(1, FAKE_NCCL_HANG_INIT);
  auto call =
      rig.Connect(*reader, source->transport->address(), rig.HelloFor(*reader, source->self));
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
  EXPECT_NE(call->status.message().find("NCCL: forming did not end in time"), std::string::npos)
      << call->status.ToString();
  Reset();
  auto again = rig.Open(*reader, *source);  // nothing is left of the first try
  ASSERT_NE(again, nullptr);
  EXPECT_TRUE(rig.Wait([&] { return source->recorder.accepted.size() == 1; }));
}

/// The first lane is there; the one of the other GPU is asked for, and never formed.
TEST_F(Nccl, AGetKeepsItsDeadlineWhileItsLaneForms) {
  transport::NcclOptions both = OptionsOf(0);
  both.devices.emplace(Gpu(1)->uuid(), Gpu(1));
  auto source = MakeSide(both);
  auto reader = MakeSide(both);
  const size_t first = both.devices.begin()->second == Gpu(0) ? 0 : 1;
  const RegionKey key = ExportPattern(*source, 0, 0);
  auto endpoint = rig.Open(*reader, *source);
  Fault(1, FAKE_NCCL_HANG_INIT);
  Status status;
  const auto began = std::chrono::steady_clock::now();
  Read(endpoint, key, 1 - first, &status, 300ms);
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  EXPECT_LT(std::chrono::steady_clock::now() - began, both.form_timeout);
}

TEST_F(Nccl, ALaneThatCarriesOtherBytesIsNotUsed) {
  auto source = MakeSide(OptionsOf(0));
  auto reader = MakeSide(OptionsOf(1));
  Fault(0, FAKE_NCCL_WRONG_BYTES);
  auto call =
      rig.Connect(*reader, source->transport->address(), rig.HelloFor(*reader, source->self));
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_NE(call->status.message().find("came as something else"), std::string::npos)
      << call->status.ToString();
}

/// Whoever is at fault, the Get ends in its time, its memory is its own again, and the next session
/// works.
TEST_F(Nccl, ARoundThatFailsOrHangsEndsTheSessionAndTheNextOneWorks) {
  for (const int fault : {FAKE_NCCL_HANG_OPERATION, FAKE_NCCL_ASYNC_ERROR}) {
    for (const int rank : {0, 1}) {
      auto source = MakeSide(OptionsOf(0));
      auto reader = MakeSide(OptionsOf(1));
      const RegionKey key = ExportPattern(*source, 0, 9);
      auto endpoint = rig.Open(*reader, *source);
      Fault(rank, fault);
      Status status;
      Read(endpoint, key, 1, &status, 500ms);
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(status.code(),
                fault == FAKE_NCCL_HANG_OPERATION ? Code::kDeadlineExceeded : Code::kUnavailable)
          << status.ToString();
      ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
      ASSERT_TRUE(rig.Wait([&] { return source->recorder.closed.size() == 1; }));
      EXPECT_EQ(LiveComms(), 0);
      Reset();
      const auto bytes = Read(rig.Open(*reader, *source), key, 1, &status);
      EXPECT_EQ(status, OkStatus());
      EXPECT_EQ(FirstDifference(bytes, 9), -1);
    }
  }
}

TEST_F(Nccl, ARankThatNcclLosesEndsTheSessionAtOnce) {
  auto source = MakeSide(OptionsOf(0));
  auto reader = MakeSide(OptionsOf(1));
  const RegionKey key = ExportPattern(*source, 0, 9);
  auto endpoint = rig.Open(*reader, *source);
  NCCL_CALL(fake_nccl_lose)(1);
  Status status;
  Read(endpoint, key, 1, &status);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  ASSERT_TRUE(rig.Wait([&] { return source->recorder.closed.size() == 1; }));
  // Who notices first says why; the other one may hear of the end of the session first.
  const std::string said =
      status.ToString() + "; " + source->recorder.closed.begin()->second.ToString();
  EXPECT_NE(said.find("NCCL: exchange: fake remote error"), std::string::npos) << said;
}

/// The fake writes to what it was given long after the abort. That is no memory of a tensor, and
/// nobody has it again.
TEST_F(Nccl, WhatNcclDoesNotLetGoOfIsNoMemoryOfAnybody) {
  auto source = MakeSide(OptionsOf(0));
  transport::NcclOptions options = OptionsOf(1);
  options.release_grace = 200ms;
  options.rounds_max = 2;
  auto reader = MakeSide(options);
  const RegionKey key = ExportPattern(*source, 0, 9);
  auto endpoint = rig.Open(*reader, *source);
  const std::string address = source->transport->address();
  EXPECT_EQ(reader->transport->Reaches(address), OkStatus());
  auto target = Slab(1);
  const std::vector<std::byte> ours(kBytes, std::byte{0x5a});
  ASSERT_EQ(device::CopyRun(target->bytes(), ours.data(), kBytes), OkStatus());
  Fault(1, FAKE_NCCL_HANG_OPERATION);  // the source sends nothing
  Fault(0, FAKE_NCCL_HANG_ABORT);
  auto call = rig.Get(endpoint, key, 0, {{*target, 0, kBytes}}, 300ms);
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kDeadlineExceeded);
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  // Peers are read over another transport from now on.
  const Status refused = reader->transport->Reaches(address);
  EXPECT_EQ(refused.reason(), Reason::kTransportFailed);
  EXPECT_NE(refused.message().find("has not given a communicator back"), std::string::npos);
  EXPECT_NE(refused.remedy().find("restart this agent"), std::string::npos);
  auto late = rig.Connect(*reader, address, rig.HelloFor(*reader, source->self));
  ASSERT_TRUE(rig.WaitFor(late));
  EXPECT_EQ(late->status.reason(), Reason::kTransportFailed);
  endpoint.reset();
  reader->transport.reset();
  Reset();  // now it writes, and lets go: what is freed would be a SIGSEGV
  EXPECT_EQ(BytesOf({target->bytes(), kBytes}), ours);
}

TEST_F(Nccl, APeerWithAnotherNcclOrOurOwnGpuIsNotReached) {
  auto source = MakeSide(OptionsOf(0));
  auto reader = MakeSide(OptionsOf(1));
  auto same = MakeSide(OptionsOf(0));
  EXPECT_EQ(reader->transport->Reaches(source->transport->address()), OkStatus());
  const Status shared = same->transport->Reaches(source->transport->address());
  EXPECT_NE(shared.message().find("has our GPU"), std::string::npos) << shared.ToString();
  NCCL_CALL(fake_nccl_set_version)(21805);
  auto older = MakeSide(OptionsOf(1));
  const Status other = older->transport->Reaches(source->transport->address());
  EXPECT_NE(other.message().find("NCCL 22809, we have 21805"), std::string::npos)
      << other.ToString();
}

TEST_F(Nccl, WhatIsMissingIsSaid) {
  transport::NcclOptions options = OptionsOf(0);
  options.nccl_library = "/nowhere/libnccl.so.2";
  Status missing = transport::MakeNcclTransport(options)->Viable();
  EXPECT_EQ(missing.reason(), Reason::kTransportFailed);
  EXPECT_NE(missing.message().find("/nowhere/libnccl.so.2"), std::string::npos);
  options = OptionsOf(0);
  options.library = "/nowhere/ours.so";
  missing = transport::MakeNcclTransport(options)->Viable();
  EXPECT_NE(missing.message().find("/nowhere/ours.so"), std::string::npos);
  options = OptionsOf(0);
  options.devices.clear();
  options.none = Status(Code::kFailedPrecondition, Reason::kConfigInvalid, "gpu is off");
  missing = transport::MakeNcclTransport(options)->Viable();
  EXPECT_NE(missing.message().find("gpu is off"), std::string::npos);
}

/// Sessions, Gets and both ends of NCCL fail at random: each Get ends once, with its bytes or with
/// a failure, and whatever fails is over in time.
TEST_F(Nccl, RandomFaultsGiveTheRightBytesOrAFailure) {
  std::mt19937_64 random(Seed());
  auto region = PatternOn(0, 1);
  int right = 0, failed = 0;
  for (int round = 0; round < 12; ++round) {
    transport::NcclOptions options[] = {OptionsOf(0), OptionsOf(1)};
    for (auto& one : options) one.form_timeout = 500ms;
    auto source = MakeSide(options[0]);
    auto reader = MakeSide(options[1]);
    const RegionKey key = source->transport->Export({{region, 0, kBytes}});
    auto opened =
        rig.Connect(*reader, source->transport->address(), rig.HelloFor(*reader, source->self));
    ASSERT_TRUE(rig.WaitFor(opened));
    if (opened->endpoint == nullptr) continue;
    std::vector<std::vector<std::byte>> buffers(16);
    std::vector<uint64_t> offsets;
    std::vector<std::shared_ptr<Call>> calls;
    for (auto& buffer : buffers) {
      buffer.resize(1 + random() % (kBytes / 2));
      offsets.push_back(random() % (kBytes - buffer.size()));
      calls.push_back(rig.Get(opened->endpoint, key, offsets.back(),
                              CutSpans(buffer, 1 + random() % 5, random), 2s));
    }
    const size_t wait_for = random() % calls.size();
    ASSERT_TRUE(rig.WaitFor(calls[wait_for]));
    switch (round % 4) {
      case 0:
        NCCL_CALL(fake_nccl_lose)(static_cast<int>(random() % 2));
        break;
      case 1:
        Fault(static_cast<int>(random() % 2), FAKE_NCCL_ASYNC_ERROR);
        break;
      case 2:
        opened->endpoint->Close();
        break;
      case 3:
        break;
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      ASSERT_TRUE(rig.WaitFor(calls[i]));
      EXPECT_EQ(calls[i]->completions, 1);
      ++(calls[i]->status.ok() ? right : failed);
      if (calls[i]->status.ok()) {
        ASSERT_EQ(FirstDifference(buffers[i], 1 + offsets[i]), -1);
      }
    }
    reader->transport.reset();
    source->transport.reset();
    Reset();
    EXPECT_EQ(LiveComms(), 0);
  }
  EXPECT_GT(right, 0);
  EXPECT_GT(failed, 0);
}

/// A peer that has a ticket, and then says what it likes.
class RogueNccl : public Nccl {
 protected:
  RogueNccl() : side(MakeSide(OptionsOf(0))), rogue_recorder(rig), rogue_self(99) {
    transport::TcpOptions options;
    options.connections = options.near_connections = 1;
    options.notify_bytes_max = transport::kTcpNotifyBytesMax;
    rogue = transport::MakeTcpTransport(options);
    EXPECT_EQ(rogue->Start(&rogue_recorder, rogue_self), OkStatus());
    auto call = std::make_shared<Call>();
    Hello hello;
    hello.caller = rogue_self;
    hello.callee = side->self;
    hello.ticket = TheTicket();
    const std::string address = side->transport->address();
    rogue->Connect(address.substr(0, address.find('?')), hello, kLong, [&, call](auto result) {
      rig.Update([&] {
        call->endpoint = *result;
        ++call->completions;
      });
    });
    EXPECT_TRUE(rig.WaitFor(call));
    endpoint = call->endpoint;
  }
  void SayAndExpectTheEnd(const std::vector<std::byte>& message) {
    EXPECT_EQ(endpoint->Notify(message), OkStatus());
    ASSERT_TRUE(rig.Wait([&] { return rogue_recorder.closed.contains(endpoint->id()); }));
    EXPECT_TRUE(side->recorder.accepted.empty());
    EXPECT_TRUE(side->recorder.notifies.empty());
  }

  std::unique_ptr<Side> side;
  Recorder rogue_recorder;
  const Incarnation rogue_self;
  std::unique_ptr<Transport> rogue;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_F(RogueNccl, AnUnknownMessageEndsTheSession) { SayAndExpectTheEnd({std::byte{7}}); }
TEST_F(RogueNccl, ANotifyThatIsTooLongEndsTheSession) {
  SayAndExpectTheEnd(std::vector<std::byte>(100));
}
TEST_F(RogueNccl, NotifiesWithoutEndBeforeTheFirstLaneEndTheSession) {
  const auto notify = transport::EncodeNotify({});
  const auto closed = [&] { return rogue_recorder.closed.contains(endpoint->id()); };
  for (int i = 0; i < 200'000 && !rig.Read<bool>(closed); ++i) {
    static_cast<void>(endpoint->Notify(notify));
  }
  ASSERT_TRUE(rig.Wait(closed));
  EXPECT_TRUE(side->recorder.accepted.empty());
}
TEST_F(RogueNccl, ARequestOnNoLaneEndsTheSession) {
  transport::NcclRequest request;
  request.lane = 3;
  request.frame = {.type = transport::FrameType::kGet, .request = 1, .length = 10};
  SayAndExpectTheEnd(Encode(request));
}
TEST_F(RogueNccl, AFrameOfAnotherTransportEndsTheSession) {
  transport::NcclRequest request;
  request.frame = {.type = transport::FrameType::kMap, .request = 1};
  SayAndExpectTheEnd(Encode(request));
}
TEST_F(RogueNccl, AReplyToNothingEndsTheSession) {
  transport::NcclRequest request;
  request.frame = {.type = transport::FrameType::kGetReply, .request = 1, .length = 1 << 30};
  SayAndExpectTheEnd(Encode(request));
}
/// One that forms a lane of which NCCL knows nothing gets no session, and holds up nobody.
TEST_F(RogueNccl, AnIdThatNobodyMadeEndsTheSession) {
  transport::NcclForm form;
  form.buffer_bytes = 1000;
  SayAndExpectTheEnd(Encode(form));
}

TEST(NcclMessages, AreReadAsTheyWereWrittenAndNothingElseIs) {
  using transport::NcclForm;
  using transport::NcclNotify;
  using transport::NcclRequest;
  NcclForm form{15, 123'456'789, {}};
  for (size_t i = 0; i < form.unique_id.size(); ++i) form.unique_id[i] = static_cast<uint8_t>(i);
  NcclRequest request;
  request.lane = 2;
  request.frame = {.type = transport::FrameType::kGetReply,
                   .code = Code::kNotFound,
                   .reason = Reason::kStaleIncarnation,
                   .request = 77,
                   .key = {},
                   .offset = 1,
                   .length = 12};
  const NcclNotify notify(64, std::byte{9});
  EXPECT_EQ(std::get<NcclForm>(transport::DecodeNcclMessage(Encode(form)).value()), form);
  EXPECT_EQ(std::get<NcclRequest>(transport::DecodeNcclMessage(Encode(request)).value()), request);
  EXPECT_EQ(
      std::get<NcclNotify>(transport::DecodeNcclMessage(transport::EncodeNotify(notify)).value()),
      notify);
  std::mt19937_64 random(Seed());
  for (const auto& good : {Encode(form), Encode(request)}) {
    for (size_t size = 0; size < good.size(); ++size) {
      EXPECT_FALSE(transport::DecodeNcclMessage(std::span(good).first(size)).has_value()) << size;
    }
    for (int i = 0; i < 2000; ++i) {  // total: no bytes make it read beyond them
      std::vector<std::byte> bad = good;
      bad[random() % bad.size()] = static_cast<std::byte>(random());
      bad.resize(bad.size() - random() % 3);
      static_cast<void>(transport::DecodeNcclMessage(bad));
    }
  }
}

}  // namespace
}  // namespace weightwire::conformance
