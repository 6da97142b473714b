// Two ranks on one GPU over the real NCCL: two processes that NCCL takes for two hosts. Skipped,
// with the reason, where there is no GPU. Untested on hardware until a machine with a GPU has run
// it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "client/collective/collective.h"

namespace weightwire::collective {
namespace {

constexpr size_t kBytes = size_t{8} << 20;
constexpr Nanos kDeadline = std::chrono::seconds(60);

// How a rank's process ends.
constexpr int kPassed = 0, kFailed = 1, kNoGpu = 77, kNoNccl = 78;

int Fail(const char* what, const std::string& why) {
  std::fprintf(stderr, "pid %d: %s: %s\n", getpid(), what, why.c_str());
  return kFailed;
}

std::vector<char> Pattern(int seed) {
  std::vector<char> out(kBytes);
  for (size_t i = 0; i < kBytes; ++i) out[i] = static_cast<char>(i * 31 + i / 4096 + seed);
  return out;
}

bool Holds(const void* device, int seed) {
  std::vector<char> got(kBytes);
  return cudaMemcpy(got.data(), device, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess &&
         got == Pattern(seed);
}

/// The life of one rank. CUDA begins here: it does not survive a fork. Rank 0 writes its id to
/// `pipe`, rank 1 reads it.
int Rank(uint32_t rank, int pipe) {
  // NCCL refuses two ranks of one host on one GPU.
  setenv("NCCL_HOSTID", rank == 0 ? "weightwire-test-0" : "weightwire-test-1", 1);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  int devices = 0;
  if (const auto error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: %s\n", cudaGetErrorString(error));
    return kNoGpu;
  }
  auto collective = Collective::Open({.cuda_library = WEIGHTWIRE_CUDA_LIBRARY});
  if (!collective) {
    std::fprintf(stderr, "%s\n", collective.error().ToString().c_str());
    return kNoNccl;
  }
  nccl::UniqueId id;
  if (rank == 0) {
    auto made = (*collective)->MakeUniqueId();
    if (!made) return Fail("unique id", made.error().ToString());
    id = *made;
    if (write(pipe, &id, sizeof(id)) != sizeof(id)) return Fail("pipe", "write");
  } else if (read(pipe, &id, sizeof(id)) != sizeof(id)) {
    return Fail("pipe", "rank 0 gave no id");
  }
  if (Status s = (*collective)->Form(id, rank, 2, 1, kDeadline); !s.ok()) {
    return Fail("form", s.ToString());
  }
  cudaStream_t stream = nullptr;
  void *mine = nullptr, *other = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
      cudaMalloc(&mine, kBytes) != cudaSuccess || cudaMalloc(&other, kBytes) != cudaSuccess) {
    return Fail("memory", cudaGetErrorString(cudaGetLastError()));
  }
  const int seed = static_cast<int>(rank) + 1;
  cudaMemcpy(mine, Pattern(seed).data(), kBytes, cudaMemcpyHostToDevice);
  const Piece send{mine, kBytes, 1 - rank}, receive{other, kBytes, 1 - rank};
  if (Status s = (*collective)->Exchange({&send, 1}, {&receive, 1}, stream, kDeadline); !s.ok()) {
    return Fail("exchange", s.ToString());
  }
  if (!Holds(other, 3 - seed)) return Fail("exchange", "the bytes differ");
  if (Status s = (*collective)->Broadcast(mine, kBytes, 1, stream, kDeadline); !s.ok()) {
    return Fail("broadcast", s.ToString());
  }
  if (!Holds(mine, 2)) return Fail("broadcast", "the bytes differ");
  if (Status s = (*collective)->Close(kDeadline); !s.ok()) return Fail("close", s.ToString());
  cudaFree(mine);
  cudaFree(other);
  cudaStreamDestroy(stream);
  return kPassed;
}

TEST(CollectiveOnDevice, TwoRanksOfOneGpuMoveBytes) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  pid_t pids[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    pids[rank] = fork();
    ASSERT_GE(pids[rank], 0);
    if (pids[rank] == 0) {
      close(ends[rank]);  // rank 0 keeps the writing end: when it dies, rank 1 reads no id
      _exit(Rank(rank, ends[1 - rank]));
    }
  }
  close(ends[0]);
  close(ends[1]);
  int codes[2];
  for (int rank = 0; rank < 2; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(pids[rank], &status, 0), pids[rank]);
    codes[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
  }
  if (codes[0] == kNoGpu) GTEST_SKIP() << "no GPU on this machine (its reason is above)";
  if (codes[0] == kNoNccl) GTEST_SKIP() << "no libnccl.so.2 on this machine (see above)";
  EXPECT_EQ(codes[0], kPassed);
  EXPECT_EQ(codes[1], kPassed);
}

}  // namespace
}  // namespace weightwire::collective
