// Two processes and one GPU over cuda_ipc. Untested on hardware until a machine with a GPU has run
// it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>
#include <vector>

#include "server/memory/gpu_memory_pool.h"
#include "server/transport/cuda_ipc/cuda_ipc_transport.h"

namespace weightwire::transport {
namespace {

using namespace std::chrono_literals;  // NOLINT: a test

constexpr uint64_t kBytes = (16 << 20) + 4'096;
constexpr uint64_t kSlab = kBytes + 1'024;
constexpr uint64_t kOffset = 512;  // of the piece in its slab
const Ticket kTicket = {3, 1, 4};

/// Of another library than the one that is built beside us: how this test itself was tried.
const char* LibraryFile() {
  const char* given = std::getenv("WEIGHTWIRE_GPU_TEST_LIBRARY");
  return given != nullptr ? given : WEIGHTWIRE_CUDA_LIBRARY;
}

std::vector<std::byte> Content() {
  std::vector<std::byte> content(kBytes);
  for (uint64_t i = 0; i < kBytes; ++i)
    content[i] = static_cast<std::byte>((i * 2'654'435'761u) >> 13);
  return content;
}

class AcceptAll final : public Handler {
 public:
  Result<Ticket> OnHello(const CallerHello&) override { return kTicket; }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {
    if (!closed_once_) closed.set_value();
    closed_once_ = true;
  }
  std::promise<void> closed;

 private:
  bool closed_once_ = false;
};

struct Gpu {
  std::shared_ptr<device::Device> device;
  std::unique_ptr<Transport> transport;
};
Result<Gpu> OpenGpu() {
  WW_ASSIGN(auto library, device::Library::Load(LibraryFile()));
  Gpu gpu;
  WW_ASSIGN(gpu.device, device::Device::Open(library, library->devices().front(), {2, 1 << 20}));
  gpu.transport = MakeCudaIpcTransport({{}, {{gpu.device->uuid(), gpu.device}}, {}});
  return gpu;
}

struct Told {
  char address[256] = {};
  RegionKey key;
};

/// Exports a slab, tells of it, and lives until it is killed or `stay` ends.
[[noreturn]] void Serve(int tell, int stay) {
  auto gpu = OpenGpu();
  if (!gpu) _exit(3);
  auto slab =
      memory::GpuMemoryPool::Make(gpu->device, kSlab).value()->Allocate("the test", kSlab).value();
  const auto content = Content();
  if (!device::CopyRun(slab->bytes() + kOffset, content.data(), kBytes).ok()) _exit(4);
  AcceptAll handler;
  if (!gpu->transport->Start(&handler, Incarnation(1)).ok()) _exit(5);
  Told told;
  told.key = gpu->transport->Export({{slab, kOffset, kBytes}});
  std::strncpy(told.address, gpu->transport->address().c_str(), sizeof(told.address) - 1);
  if (write(tell, &told, sizeof told) != sizeof told) _exit(6);
  char ignored;
  while (read(stay, &ignored, 1) > 0) {
  }
  _exit(0);
}

// CUDA is initialised in neither process before the fork.
TEST(CudaIpcOnHardware, MapsAnotherProcessesMemoryAndCopiesOnTheGpu) {
  int tell[2], stay[2];
  ASSERT_EQ(pipe(tell), 0);
  ASSERT_EQ(pipe(stay), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(tell[0]);
    close(stay[1]);
    Serve(tell[1], stay[0]);
  }
  close(tell[1]);
  close(stay[0]);
  Told told;
  ASSERT_EQ(read(tell[0], &told, sizeof told), static_cast<ssize_t>(sizeof told))
      << "tests with the label gpu need a GPU";
  auto gpu = OpenGpu();
  ASSERT_TRUE(gpu.has_value()) << gpu.error().ToString();
  AcceptAll handler;
  ASSERT_EQ(gpu->transport->Start(&handler, Incarnation(2)), OkStatus());
  ASSERT_EQ(gpu->transport->Reaches(told.address), OkStatus());
  Hello hello;
  hello.caller = Incarnation(2);
  hello.callee = Incarnation(1);
  hello.ticket = kTicket;
  std::promise<Result<std::shared_ptr<Endpoint>>> connected;
  gpu->transport->Connect(told.address, hello, 10s,
                          [&](auto result) { connected.set_value(std::move(result)); });
  auto endpoint = connected.get_future().get();
  ASSERT_TRUE(endpoint.has_value()) << endpoint.error().ToString();
  const auto map = [&] {
    std::promise<Result<MappedList>> mapped;
    (*endpoint)->Map(told.key, 10s, [&](auto result) { mapped.set_value(std::move(result)); });
    return mapped.get_future().get();
  };
  auto mapped = map();
  ASSERT_TRUE(mapped.has_value()) << mapped.error().ToString();
  ASSERT_EQ(mapped->pieces.size(), 1u);
  ASSERT_EQ(mapped->pieces[0].bytes, kBytes);
  EXPECT_EQ(map()->pieces[0].at.at, mapped->pieces[0].at.at) << "mapped twice";

  const auto content = Content();
  const auto mine = gpu->device->Allocate(kBytes).value();
  const device::Bytes target{mine->at(), gpu->device.get()};
  const kernels::StridedBox box{1, {static_cast<int64_t>(kBytes)}, {1}, {1}};
  const auto sum = device::CopyAndSumTarget(target, mapped->pieces[0].at, box,
                                            kernels::Element::kOpaque1, kernels::Element::kOpaque1);
  ASSERT_TRUE(sum.has_value()) << sum.error().ToString();
  EXPECT_EQ(*sum, kernels::SumContiguous(content.data(), kBytes));
  std::vector<std::byte> seen(kBytes);
  ASSERT_EQ(device::CopyRun({seen.data()}, target, kBytes), OkStatus());
  EXPECT_TRUE(seen == content);

  // What CUDA does with the memory of a process that is killed is not documented. It must not cost
  // us the GPU: either the bytes are still there, or reading them fails.
  auto closed = handler.closed.get_future();
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(closed.wait_for(1s), std::future_status::ready);
  if (device::CopyRun({seen.data()}, mapped->pieces[0].at, kBytes).ok()) {
    EXPECT_TRUE(seen == content);
  } else {
    ADD_FAILURE() << "the memory of a killed process cannot be read: say so in docs/gotchas.md";
  }
  *mapped = {};
  EXPECT_EQ(device::CopyRun({seen.data()}, target, kBytes), OkStatus());
  endpoint->reset();
  gpu->transport.reset();
}

}  // namespace
}  // namespace weightwire::transport
