#include "server/device/device.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "server/device/bytes.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::device {
namespace {

using weightwire::testing::FakeDevice;
using weightwire::testing::FakeLibrary;

TEST(Device, FreesWhatItAllocates) {
  const auto device = FakeDevice(0);  // holds the memory of its lanes from here on
  const uint64_t before = FAKE_CALL(fake_cuda_bytes_allocated)();
  {
    const auto memory = device->Allocate(12'345).value();
    EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_allocated)(), before + 12'345);
  }
  EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_allocated)(), before);
}

TEST(Device, RefusesMoreThanTheGpuHasWithBytesAndName) {
  const auto memory = FakeDevice(1)->Allocate(uint64_t{3} << 30);
  ASSERT_FALSE(memory.has_value());
  EXPECT_EQ(memory.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(memory.error().reason(), Reason::kLimitExceeded);
  EXPECT_EQ(memory.error().message().rfind("3221225472 bytes on " + FakeDevice(1)->name(), 0), 0u)
      << memory.error().message();
  EXPECT_FALSE(memory.error().remedy().empty());
}

TEST(Device, FailsToOpenWithoutLeavingAnythingBehind) {
  const uint64_t before = FAKE_CALL(fake_cuda_bytes_allocated)();
  for (const char* call : {"ww_cuda_stream_create", "ww_cuda_event_create", "ww_cuda_alloc",
                           "ww_cuda_host_register"}) {
    FAKE_CALL(fake_cuda_fail)(call, 2);
    const auto device =
        Device::Open(FakeLibrary(), FakeLibrary()->devices()[0], LaneSizes{3, 4096});
    ASSERT_FALSE(device.has_value()) << call;
    EXPECT_EQ(device.error().reason(), Reason::kIoError);
    EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_allocated)(), before) << call;
  }
}

TEST(Device, GivesItsOwnAllocationInsteadOfMappingIt) {
  auto memory = FakeDevice(0)->Allocate(100).value();
  const IpcHandle handle = memory->handle();
  const auto opened = FakeDevice(0)->OpenIpc(handle);
  ASSERT_TRUE(opened.has_value()) << opened.error().ToString();
  EXPECT_EQ(*opened, memory);
  EXPECT_EQ(memory->bytes(), 100u);
  EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_opened)(), 0u);
}

TEST(Device, RefusesToMapWhatIsNobodysOrNoMoreThere) {
  auto memory = FakeDevice(0)->Allocate(100).value();
  const IpcHandle freed = memory->handle();
  memory.reset();
  for (const IpcHandle& handle : {freed, IpcHandle{}}) {
    const auto opened = FakeDevice(0)->OpenIpc(handle);
    ASSERT_FALSE(opened.has_value());
    EXPECT_EQ(opened.error().reason(), Reason::kMemoryInvalid);
  }
}

// Another process exports; its memory is read and written here, and stays while it is mapped.
TEST(Device, SharesAnAllocationWithAnotherProcess) {
  constexpr size_t kBytes = 70'001;
  int to_parent[2], to_child[2];
  ASSERT_EQ(pipe(to_parent), 0);
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    void* library = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW);
    const auto call = [library]<typename F>(const char* name, F*) {
      return reinterpret_cast<F*>(dlsym(library, name));
    };
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    void* memory = nullptr;
    IpcHandle handle{};
    const std::vector<char> content(kBytes, 'a');
    std::vector<char> seen(kBytes);
    char go;
    bool ok = call("ww_cuda_alloc", static_cast<decltype(&ww_cuda_alloc)>(nullptr))(0, kBytes,
                                                                                    &memory) == 0;
    call("fake_cuda_write", static_cast<decltype(&fake_cuda_write)>(nullptr))(
        memory, content.data(), kBytes);
    ok = ok && call("ww_cuda_ipc_export", static_cast<decltype(&ww_cuda_ipc_export)>(nullptr))(
                   0, memory, handle.data()) == 0;
    ok = ok && write(to_parent[1], handle.data(), handle.size()) == 64;
    ok = ok && read(to_child[0], &go, 1) == 1;
    call("fake_cuda_read", static_cast<decltype(&fake_cuda_read)>(nullptr))(memory, seen.data(),
                                                                            kBytes);
    _exit(ok && seen == std::vector<char>(kBytes, 'b') ? 0 : 1);
  }
  IpcHandle handle{};
  ASSERT_EQ(read(to_parent[0], handle.data(), handle.size()), 64);
  EXPECT_FALSE(FakeDevice(1)->OpenIpc(handle).has_value()) << "of the other GPU";
  auto memory = FakeDevice(0)->OpenIpc(handle);
  ASSERT_TRUE(memory.has_value()) << memory.error().ToString();
  EXPECT_EQ((*memory)->bytes(), kBytes);
  void* twice = nullptr;
  EXPECT_EQ(FakeLibrary()->calls().ipc_open(0, handle.data(), &twice), WW_CUDA_FAILED);
  EXPECT_EQ(FakeDevice(0)->OpenIpc(handle), memory) << "mapped twice";
  std::vector<std::byte> seen(kBytes);
  const Bytes shared{(*memory)->at(), FakeDevice(0).get()};
  EXPECT_EQ(CopyRun({seen.data()}, shared, kBytes), OkStatus());
  EXPECT_EQ(seen, std::vector<std::byte>(kBytes, std::byte{'a'}));
  const std::vector<std::byte> content(kBytes, std::byte{'b'});
  EXPECT_EQ(CopyRun(shared, content.data(), kBytes), OkStatus());
  ASSERT_EQ(write(to_child[1], "!", 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(CopyRun({seen.data()}, shared, kBytes), OkStatus());
  EXPECT_EQ(seen, content);
  EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_opened)(), kBytes);
  memory->reset();
  EXPECT_EQ(FAKE_CALL(fake_cuda_bytes_opened)(), 0u);
  for (int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) close(fd);
}

}  // namespace
}  // namespace weightwire::device
