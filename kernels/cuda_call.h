#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda.h"

/// Internal to kernels/: what every call of kernels/cuda.h does around the runtime's.
namespace weightwire::kernels::internal {

/// Keeps "what: why" for the thread's ww_cuda_error; returns `code`.
int32_t Fail(int32_t code, const char* what, const char* why);
/// The interface's code for `error`, whose words are kept.
int32_t Checked(cudaError_t error, const char* what);

/// Makes `device` the thread's, and gives the thread its own back.
class DeviceScope {
 public:
  DeviceScope(int32_t device, const char* what);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  int32_t status() const { return status_; }

 private:
  int before_ = 0;
  int32_t status_ = WW_CUDA_OK;
  bool restore_ = false;
};

template <class Work>
int32_t OnDevice(int32_t device, const char* what, Work work) {
  DeviceScope scope(device, what);
  return scope.status() != WW_CUDA_OK ? scope.status() : Checked(work(), what);
}

inline cudaStream_t AsStream(ww_cuda_stream stream) { return static_cast<cudaStream_t>(stream); }
inline cudaEvent_t AsEvent(ww_cuda_event event) { return static_cast<cudaEvent_t>(event); }

}  // namespace weightwire::kernels::internal
