#pragma once

#include <climits>
#include <cstddef>

/// What of NCCL's C interface is used, declared here so that no CUDA toolkit is needed to build.
/// tests/unit/collective/real_nccl_test.cc compares it with nccl.h where there is one.
namespace weightwire::collective::nccl {

inline constexpr int kSuccess = 0;
inline constexpr int kSystemError = 2;
inline constexpr int kInvalidArgument = 4;
inline constexpr int kInvalidUsage = 5;
inline constexpr int kRemoteError = 6;
inline constexpr int kInProgress = 7;
inline constexpr int kUint8 = 1;
/// 2.18: communicators that do not block, and the configuration below.
inline constexpr int kVersionMin = 21800;

using Comm = struct OpaqueComm*;
using Stream = void*;

struct UniqueId {
  char bytes[128];
};

/// The configuration as of 2.18, which later versions accept; `unused` lies where 2.26 began its
/// next field and says "not set" to it.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kVersionMin;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int unused = INT_MIN;
};

struct Functions {
  int (*ncclGetVersion)(int* version) = nullptr;
  int (*ncclGetUniqueId)(UniqueId* id) = nullptr;
  int (*ncclCommInitRankConfig)(Comm* comm, int size, UniqueId id, int rank,
                                Config* config) = nullptr;
  int (*ncclCommGetAsyncError)(Comm comm, int* error) = nullptr;
  int (*ncclCommFinalize)(Comm comm) = nullptr;
  int (*ncclCommDestroy)(Comm comm) = nullptr;
  int (*ncclCommAbort)(Comm comm) = nullptr;
  int (*ncclBroadcast)(const void* from, void* to, size_t count, int type, int root, Comm comm,
                       Stream stream) = nullptr;
  int (*ncclSend)(const void* from, size_t count, int type, int peer, Comm comm,
                  Stream stream) = nullptr;
  int (*ncclRecv)(void* to, size_t count, int type, int peer, Comm comm, Stream stream) = nullptr;
  int (*ncclGroupStart)() = nullptr;
  int (*ncclGroupEnd)() = nullptr;
  const char* (*ncclGetErrorString)(int result) = nullptr;
  const char* (*ncclGetLastError)(Comm comm) = nullptr;
};

}  // namespace weightwire::collective::nccl
