// What only cuda_ipc has: GPU memory of other processes, its leases, and peers that lie about it.
#include "server/transport/cuda_ipc/cuda_ipc_transport.h"

#include <sys/mman.h>

#include <chrono>
#include <sstream>

#include "server/transport/cuda_ipc/cuda_ipc_address.h"
#include "server/transport/little_endian.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/peer_process.h"
#include "tests/conformance/plain_socket.h"
#include "tests/conformance/raw_session.h"
#include "tests/conformance/rig.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::conformance {
namespace {

using testing::FakeDevice;
using testing::FakeSlabs;
using transport::DeviceRegion;

const Kind kCudaIpc{"cuda_ipc", "cuda_ipc"};

// ---- whom it reaches ---------------------------------------------------------------------------

TEST(CudaIpcViable, SaysWhatIsMissing) {
  transport::CudaIpcOptions options;
  options.none = Status(Code::kUnavailable, Reason::kIoError, "no such file: /nowhere.so")
                     .Remedy("name it with gpu_library");
  const Status viable = transport::MakeCudaIpcTransport(options)->Viable();
  EXPECT_EQ(viable.code(), Code::kFailedPrecondition);
  EXPECT_NE(viable.message().find("no such file: /nowhere.so"), std::string::npos);
  EXPECT_EQ(viable.remedy(), "name it with gpu_library");
}

TEST(CudaIpcAddress, StatesItsFactsInWhatTheWireTakes) {
  transport::CudaIpcAddress address{"/" + std::string(99, 'p'), "4026531836", {}};
  for (int i = 0; i < 20; ++i) address.gpus.push_back("0123456" + std::to_string(i % 10));
  const std::string text = FormatAddress(address);
  EXPECT_LE(text.size(), 256u);
  const transport::CudaIpcAddress parsed = transport::ParseCudaIpcAddress(text);
  EXPECT_EQ(parsed.socket, address.socket);
  EXPECT_EQ(parsed.pid_namespace, address.pid_namespace);
  EXPECT_EQ(parsed.gpus, std::vector(address.gpus.begin(), address.gpus.begin() + 15));
  for (const char* odd : {"", "?", "@a?", "@a?&&", "@a?gpu=", "@a?gpu=,,&pid", "@a?other=1"}) {
    EXPECT_TRUE(transport::ParseCudaIpcAddress(odd).pid_namespace.empty()) << odd;
  }
}

class CudaIpc : public ::testing::Test {
 protected:
  CudaIpc() : rig(kCudaIpc), sink(rig), here(rig.MakeSide({.metrics = &sink})) {}

  Status ReasonNotTo(const std::string& address) {
    auto call = rig.Connect(*here, address, rig.HelloFor(*here, here->self));
    EXPECT_TRUE(rig.WaitFor(call));
    EXPECT_FALSE(call->inside_post);
    EXPECT_EQ(call->completions, 1);
    EXPECT_EQ(call->status, here->transport->Reaches(address));
    return call->status;
  }

  Rig rig;
  CountingSink sink;
  std::unique_ptr<Side> here;
};

TEST_F(CudaIpc, DoesNotCallWhoIsInAnotherPidNamespaceOrHasOtherGpus) {
  const transport::CudaIpcAddress own = transport::ParseCudaIpcAddress(here->transport->address());
  ASSERT_FALSE(own.pid_namespace.empty());
  ASSERT_EQ(own.gpus.size(), 2u);
  EXPECT_EQ(here->transport->Reaches(here->transport->address()), OkStatus());
  EXPECT_EQ(here->transport->Reaches(own.socket), OkStatus()) << "nothing stated";

  transport::CudaIpcAddress other = own;
  other.pid_namespace += "1";
  const Status elsewhere = ReasonNotTo(FormatAddress(other));
  EXPECT_EQ(elsewhere.code(), Code::kFailedPrecondition);
  EXPECT_NE(elsewhere.message().find("PID namespace"), std::string::npos);
  EXPECT_FALSE(elsewhere.remedy().empty());

  other = own;
  other.gpus.push_back("89abcdef");
  const Status invisible = ReasonNotTo(FormatAddress(other));
  EXPECT_NE(invisible.message().find("89abcdef is not visible here"), std::string::npos);
  EXPECT_NE(invisible.message().find(FakeDevice(0)->name()), std::string::npos);
  EXPECT_FALSE(invisible.remedy().empty());
}

// ---- other processes ---------------------------------------------------------------------------

constexpr uint64_t kBytes = (1 << 20) + 4'099;

class CudaIpcProcesses : public CudaIpc {
 protected:
  std::unique_ptr<Peer> StartServer() {
    auto peer = std::make_unique<Peer>(
        std::vector<std::string>{"serve-gpu", "cuda_ipc", "1", std::to_string(kBytes)});
    uint64_t incarnation = 0;
    std::istringstream(peer->ReadLine()) >> address >> incarnation >> key.id >> key.generation;
    callee = Incarnation(incarnation);
    return peer;
  }
  std::shared_ptr<Endpoint> Open() {
    auto call = rig.Connect(*here, address, rig.HelloFor(*here, callee));
    EXPECT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
    return call->endpoint;
  }
  std::shared_ptr<Call> MapIt(const std::shared_ptr<Endpoint>& endpoint) {
    auto call = rig.Map(endpoint, key);
    EXPECT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
    return call;
  }
  static void ExpectThePattern(const transport::MappedList& mapped) {
    ASSERT_EQ(mapped.pieces.size(), 4u);
    EXPECT_EQ(mapped.pieces[0].at.device, FakeDevice(0).get());
    EXPECT_EQ(mapped.pieces[1].at.device, nullptr);
    EXPECT_EQ(mapped.pieces[2].at.device, FakeDevice(1).get());
    EXPECT_EQ(mapped.pieces[3].at.device, FakeDevice(0).get());
    for (const transport::MappedPiece& piece : mapped.pieces) {
      ASSERT_EQ(piece.bytes, kBytes);
      ASSERT_EQ(FirstDifference(BytesOf(piece), 0), -1);
    }
  }
  /// A reader of `slab` that has mapped it and keeps it.
  std::unique_ptr<Peer> StartReader(const std::shared_ptr<memory::MemoryRegion>& slab) {
    own = here->transport->Export({{slab, 0, slab->size()}});
    auto peer = std::make_unique<Peer>(std::vector<std::string>{
        "map", "cuda_ipc", "1", std::to_string(slab->size()), here->transport->address(),
        std::to_string(here->self.value), std::to_string(own.id), std::to_string(own.generation)});
    EXPECT_TRUE(rig.Wait([&] { return !here->recorder.notifies.empty(); }));
    EXPECT_EQ(here->recorder.notifies.front(), "mapped");
    return peer;
  }

  static uint64_t Opened() { return FAKE_CALL(fake_cuda_bytes_opened)(); }
  /// The rig's deadline, for what nobody reports.
  static bool Becomes(const std::function<bool()>& condition, Nanos limit = 30s) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  std::string address;
  Incarnation callee{};
  RegionKey key, own;
};

/// The pools of the peer's fake_gpus.h.
constexpr uint64_t kBothPools = 2 * (64 << 20);

TEST_F(CudaIpcProcesses, MapsEachAllocationOnceForAsLongAsThereIsASession) {
  auto peer = StartServer();
  auto first = Open();
  auto call = MapIt(first);
  ExpectThePattern(call->mapped);
  EXPECT_EQ(Opened(), kBothPools);
  auto second = Open();
  auto again = MapIt(second);
  ExpectThePattern(again->mapped);
  EXPECT_EQ(again->mapped.pieces[3].at.at, call->mapped.pieces[3].at.at);
  EXPECT_EQ(Opened(), kBothPools) << "mapped twice";
  call->mapped = {};
  again->mapped = {};
  EXPECT_EQ(Opened(), kBothPools) << "unmapped between two transfers";
  first->Close();
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(first->id()); }));
  EXPECT_EQ(Opened(), kBothPools) << "unmapped while there is another session";
  second->Close();
  EXPECT_TRUE(Becomes([] { return Opened() == 0; }));
}

TEST_F(CudaIpcProcesses, AnOwnerThatIsKilledIsNoticedAtOnceAndItsBytesStayWhileTheyAreMapped) {
  auto peer = StartServer();
  auto endpoint = Open();
  auto call = MapIt(endpoint);
  const auto killed = std::chrono::steady_clock::now();
  peer->Kill();
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(endpoint->id()); }));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, 1s);
  EXPECT_EQ(here->recorder.closed.at(endpoint->id()).code(), Code::kUnavailable);
  ExpectThePattern(call->mapped);
  EXPECT_EQ(Opened(), kBothPools);
  call->mapped = {};
  EXPECT_TRUE(Becomes([] { return Opened() == 0; }));
  auto late = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(late));
  EXPECT_EQ(late->status.code(), Code::kUnavailable);
}

TEST_F(CudaIpcProcesses, AStoppedOwnerMeetsTheDeadlineOfMap) {
  auto peer = StartServer();
  auto endpoint = Open();
  peer->Freeze();
  auto call = rig.Map(endpoint, key, 200ms);
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(call->completions, 1);
  EXPECT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(endpoint->id()); }));
}

TEST_F(CudaIpcProcesses, ASlabIsLentAgainWhenItsReaderIsKilledAndNotBefore) {
  const auto pool = memory::GpuMemoryPool::Make(FakeDevice(0), 1 << 20).value();
  auto slab = pool->Allocate("a rank", 1 << 20).value();
  std::vector<std::byte> content(slab->size());
  FillPattern(content, 0);
  ASSERT_EQ(device::CopyRun(slab->bytes(), content.data(), content.size()), OkStatus());
  auto reader = StartReader(slab);
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*here, own)));
  slab.reset();
  EXPECT_EQ(pool->bytes_used(), 1u << 20) << "its reader has it";
  EXPECT_FALSE(pool->Allocate("another rank", 1).has_value());
  reader->Freeze();
  here->recorder.accepted.front()->Close();
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.size() == 1; }));
  EXPECT_EQ(pool->bytes_used(), 1u << 20) << "it may go on reading when it wakes up";
  reader->Kill();
  EXPECT_TRUE(Becomes([&] { return pool->bytes_used() == 0; }, 1s));
  EXPECT_TRUE(pool->Allocate("another rank", 1 << 20).has_value());
}

TEST_F(CudaIpcProcesses, AReaderGivesTheLeaseBackWhenTheOwnerHasLetTheSlabGo) {
  const auto pool = memory::GpuMemoryPool::Make(FakeDevice(1), 1 << 20).value();
  auto source = rig.MakeSide();
  auto slab = pool->Allocate("a rank", 5'000).value();
  const RegionKey one = source->transport->Export({{slab, 0, 5'000}});
  auto endpoint = rig.Open(*here, *source);
  auto call = rig.Map(endpoint, one);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, one)));
  slab.reset();
  EXPECT_GT(pool->bytes_used(), 0u);
  call->mapped = {};
  ASSERT_TRUE(rig.WaitFor(rig.Map(endpoint, one)));  // tells the reader what it may forget
  EXPECT_EQ(pool->bytes_used(), 0u);
}

// What a reader keeps besides regions: here it is the allocation of an owner in the same process,
// which has nobody else left.
TEST_F(CudaIpcProcesses, AnAllocationIsKeptWithoutRegionsUntilTheLastSessionEnds) {
  auto source = rig.MakeSide();
  auto allocation = FakeDevice(0)->Allocate(5'000).value();
  const std::weak_ptr<device::Allocation> watch = allocation;
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  auto region = memory::MemoryRegion::OnDevice(std::move(allocation), 0, 5'000,
                                               memory::UniqueFd(ends[1]), nullptr);
  const RegionKey one = source->transport->Export({{region, 0, 5'000}});
  auto first = rig.Open(*here, *source);
  auto second = rig.Open(*here, *source);
  auto call = rig.Map(first, one);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, one)));
  region.reset();
  call->mapped = {};
  ASSERT_TRUE(rig.WaitFor(rig.Map(first, one)));
  EXPECT_FALSE(watch.expired());
  second->Close();
  ASSERT_TRUE(rig.Wait([&] { return here->recorder.closed.contains(second->id()); }));
  std::this_thread::sleep_for(50ms);  // it would be let go on another thread
  EXPECT_FALSE(watch.expired()) << "there is another session";
  first->Close();
  EXPECT_TRUE(Becomes([&] { return watch.expired(); }));
}

// ---- peers that lie ----------------------------------------------------------------------------

memory::UniqueFd Lease() {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  return memory::UniqueFd(ends[1]);
}

/// The test answers in a callee's place.
class CudaIpcLies : public CudaIpc {
 protected:
  CudaIpcLies() : listener(false) {
    auto connect = rig.Connect(*here, listener.address(), rig.HelloFor(*here, Incarnation(1)));
    plain.emplace(listener.Accept());
    EXPECT_TRUE(AnswerRaw(false, *plain, Incarnation(1), here->recorder));
    EXPECT_TRUE(rig.WaitFor(connect));
    EXPECT_EQ(connect->status, OkStatus());
    endpoint = connect->endpoint;
  }
  /// What is true of a region that this process has itself.
  static DeviceRegion True() {
    static const auto slab = PatternSlab(0, 5'000, 0);
    return transport::DescribeDeviceRegion(*slab);
  }
  void Tell(uint64_t id, const DeviceRegion& told, int fd) {
    EXPECT_TRUE(plain->TrySend({.type = FrameType::kDeviceRegion,
                                .request = id,
                                .offset = told.offset,
                                .length = told.bytes},
                               EncodeAllocationName(told), fd));
  }
  static Frame DeviceFrame(uint64_t id) {
    return {.type = FrameType::kDeviceRegion,
            .request = id,
            .offset = True().offset,
            .length = True().bytes};
  }
  /// Asks for a Map, tells of `regions`, and answers that each is a piece.
  std::shared_ptr<Call> MapOf(const std::vector<DeviceRegion>& regions, int fd) {
    auto call = rig.Map(endpoint, {1, 1});
    std::array<std::byte, kFrameBytes> request;
    EXPECT_TRUE(plain->Receive(request));
    const auto asked = transport::DecodeFrame(request);
    EXPECT_TRUE(asked.has_value() && asked->type == FrameType::kMap);
    std::vector<std::byte> payload(24 * regions.size());
    transport::LittleEndianWriter writer(payload);
    for (const DeviceRegion& told : regions) {
      Tell(++told_, told, fd);
      writer.Put(told_);
      writer.Put(uint64_t{0});
      writer.Put(told.bytes);
    }
    plain->Send(
        Frame{.type = FrameType::kMapReply, .request = asked->request, .length = payload.size()});
    plain->Send(payload);
    EXPECT_TRUE(rig.WaitFor(call));
    return call;
  }
  bool session_lives() {
    return rig.Read<bool>([&] { return !here->recorder.closed.contains(endpoint->id()); });
  }
  void ExpectGarbage(const std::shared_ptr<Call>& call) {
    EXPECT_EQ(call->status.code(), Code::kUnavailable) << call->status.ToString();
    EXPECT_TRUE(plain->SeesEnd());
    EXPECT_TRUE(rig.Wait([&] { return sink.counts["transport_closes_total garbage"] == 1; }));
  }

  RawListener listener;
  std::optional<Plain> plain;
  std::shared_ptr<Endpoint> endpoint;
  uint64_t told_ = 0;
};

TEST_F(CudaIpcLies, TheTruthIsMapped) {
  auto call = MapOf({True()}, Lease().get());
  ASSERT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(BytesOf(call->mapped.pieces.at(0)), 0), -1);
}

TEST_F(CudaIpcLies, AnUnknownGpuFailsTheMapByName) {
  DeviceRegion told = True();
  told.device.bytes[0] ^= 0xff;
  auto call = MapOf({told}, Lease().get());
  EXPECT_EQ(call->status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
  EXPECT_NE(call->status.message().find(ToString(told.device)), std::string::npos);
  EXPECT_NE(call->status.message().find(FakeDevice(0)->name()), std::string::npos);
  EXPECT_TRUE(session_lives());
  EXPECT_EQ(MapOf({True()}, Lease().get())->status, OkStatus());
}

TEST_F(CudaIpcLies, AHandleOfNobodyFailsTheMap) {
  DeviceRegion told = True();
  told.handle[3] ^= 0xff;
  auto call = MapOf({told}, Lease().get());
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_EQ(call->status.reason(), Reason::kMemoryInvalid);
  EXPECT_TRUE(session_lives());
}

TEST_F(CudaIpcLies, AHandleOfAnotherGpuFailsTheMap) {
  DeviceRegion told = True();
  told.device = FakeDevice(1)->uuid();
  EXPECT_EQ(MapOf({told}, Lease().get())->status.code(), Code::kUnavailable);
  EXPECT_TRUE(session_lives());
}

TEST_F(CudaIpcLies, MemoryBeyondTheAllocationEndsTheSession) {
  DeviceRegion told = True();
  told.offset = FakeSlabs(0)->bytes_total() - told.bytes + 1;
  ExpectGarbage(MapOf({told}, Lease().get()));
}

TEST_F(CudaIpcLies, AnImpossibleSizeEndsTheSession) {
  DeviceRegion told = True();
  told.offset = UINT64_MAX - 10;
  ExpectGarbage(MapOf({told}, Lease().get()));
}

TEST_F(CudaIpcLies, ARegionOfNothingEndsTheSession) {
  DeviceRegion told = True();
  told.bytes = 0;
  ExpectGarbage(MapOf({told}, Lease().get()));
}

TEST_F(CudaIpcLies, APieceThatLeavesItsRegionEndsTheSession) {
  auto call = rig.Map(endpoint, {1, 1});
  Tell(1, True(), Lease().get());
  std::vector<std::byte> payload(24);
  transport::LittleEndianWriter writer(payload);
  writer.Put(uint64_t{1});
  writer.Put(uint64_t{1});
  writer.Put(True().bytes);
  plain->Send(Frame{.type = FrameType::kMapReply, .request = 1, .length = payload.size()});
  plain->Send(payload);
  ASSERT_TRUE(rig.WaitFor(call));
  ExpectGarbage(call);
}

TEST_F(CudaIpcLies, ALeaseThatIsNoPipeEndsTheSession) {
  const memory::UniqueFd forged(memfd_create("forged", MFD_CLOEXEC));
  ExpectGarbage(MapOf({True()}, forged.get()));
}

TEST_F(CudaIpcLies, ARegionWithoutALeaseEndsTheSession) {
  auto call = rig.Map(endpoint, {1, 1});
  const DeviceRegion told = True();
  plain->Send(Frame{
      .type = FrameType::kDeviceRegion, .request = 1, .offset = told.offset, .length = told.bytes});
  plain->Send(EncodeAllocationName(told));
  ASSERT_TRUE(rig.WaitFor(call));
  ExpectGarbage(call);
}

TEST_F(CudaIpcLies, MoreRegionsThanOneMayShareEndTheSession) {
  const memory::UniqueFd lease = Lease();
  auto call = rig.Map(endpoint, {1, 1});
  for (uint64_t i = 1; i <= 4'097 && session_lives(); ++i) {
    if (!plain->TrySend(DeviceFrame(i), EncodeAllocationName(True()), lease.get())) break;
  }
  ASSERT_TRUE(rig.WaitFor(call));
  ExpectGarbage(call);
}

TEST_F(CudaIpcLies, MoreAllocationsThanOneMayShareFailTheMap) {
  std::vector<std::shared_ptr<device::Allocation>> many;
  std::vector<DeviceRegion> told;
  for (int i = 0; i < 65; ++i) {
    many.push_back(FakeDevice(0)->Allocate(64).value());
    told.push_back({FakeDevice(0)->uuid(), many.back()->handle(), 0, 64});
  }
  const memory::UniqueFd lease = Lease();
  auto call = MapOf(told, lease.get());
  EXPECT_EQ(call->status.code(), Code::kResourceExhausted);
  EXPECT_EQ(call->status.reason(), Reason::kLimitExceeded);
  EXPECT_TRUE(session_lives());
  told.pop_back();
  EXPECT_EQ(MapOf(told, lease.get())->status, OkStatus());
}

TEST_F(CudaIpcLies, GpuMemoryForAGetEndsTheSessionAndTouchesNothing) {
  const memory::UniqueFd lease = Lease();
  std::vector<std::byte> buffer(100, std::byte{0xee});
  auto call = rig.Get(endpoint, {1, 1}, 0, {buffer});
  Tell(1, True(), lease.get());
  std::vector<std::byte> payload(24);
  transport::LittleEndianWriter writer(payload);
  writer.Put(uint64_t{1});
  writer.Put(uint64_t{0});
  writer.Put(uint64_t{100});
  plain->Send(Frame{.type = FrameType::kGetReply, .request = 1, .length = payload.size()});
  plain->Send(payload);
  ASSERT_TRUE(rig.WaitFor(call));
  ExpectGarbage(call);
  EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte{0xee}));
}

TEST(ShmLies, GpuMemoryOverShmEndsTheSession) {
  Rig rig(Kind{"shm", "shm"});
  auto side = rig.MakeSide();
  RawListener listener(false);
  auto connect = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)));
  Plain plain = listener.Accept();
  ASSERT_TRUE(AnswerRaw(false, plain, Incarnation(1), side->recorder));
  ASSERT_TRUE(rig.WaitFor(connect));
  const auto slab = PatternSlab(0, 100, 0);
  const DeviceRegion told = transport::DescribeDeviceRegion(*slab);
  EXPECT_TRUE(plain.TrySend({.type = FrameType::kDeviceRegion, .request = 1, .length = 100},
                            EncodeAllocationName(told), Lease().get()));
  EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.closed.size() == 1; }));
}

}  // namespace
}  // namespace weightwire::conformance
