// Devices, streams and events of the C interface. The device is set and restored around each call,
// and an error leaves its words for the thread that made it.
#include "kernels/cuda_call.h"

#include <cstdio>
#include <cstring>

namespace weightwire::kernels::internal {
namespace {

thread_local char last_error[512] = "";

}  // namespace

int32_t Fail(int32_t code, const char* what, const char* why) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", what, why);
  return code;
}

int32_t Checked(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return WW_CUDA_OK;
  cudaGetLastError();  // the next call must not report it again
  switch (error) {
    case cudaErrorInsufficientDriver:
      return Fail(WW_CUDA_NO_DEVICE, what,
                  "no device: this host has no CUDA driver, or one older than the library");
    case cudaErrorMemoryAllocation:
      return Fail(WW_CUDA_NO_MEMORY, what, "the device has not so much memory left");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
      break;
    default:
      return Fail(WW_CUDA_FAILED, what, cudaGetErrorString(error));
  }
  char why[256];
  std::snprintf(why, sizeof why, "no device: %s", cudaGetErrorString(error));
  return Fail(WW_CUDA_NO_DEVICE, what, why);
}

DeviceScope::DeviceScope(int32_t device, const char* what) {
  status_ = Checked(cudaGetDevice(&before_), what);
  if (status_ != WW_CUDA_OK || before_ == device) return;
  status_ = Checked(cudaSetDevice(device), what);
  restore_ = status_ == WW_CUDA_OK;
}

DeviceScope::~DeviceScope() {
  if (restore_) cudaSetDevice(before_);
}

}  // namespace weightwire::kernels::internal

using namespace weightwire::kernels::internal;  // NOLINT: the interface itself has no namespace

uint32_t ww_cuda_abi_version(void) { return WW_CUDA_ABI_VERSION; }

const char* ww_cuda_error(void) { return last_error; }

int32_t ww_cuda_device_count(int32_t* count) {
  *count = 0;
  return Checked(cudaGetDeviceCount(count), "ww_cuda_device_count");
}

int32_t ww_cuda_device_uuid(int32_t device, uint8_t* uuid) {
  cudaDeviceProp properties;
  if (int32_t bad = Checked(cudaGetDeviceProperties(&properties, device), "ww_cuda_device_uuid")) {
    return bad;
  }
  static_assert(sizeof properties.uuid.bytes == WW_CUDA_UUID_BYTES);
  std::memcpy(uuid, properties.uuid.bytes, WW_CUDA_UUID_BYTES);
  return WW_CUDA_OK;
}

int32_t ww_cuda_device_use(int32_t device) {
  return Checked(cudaSetDevice(device), "ww_cuda_device_use");
}

int32_t ww_cuda_stream_create(int32_t device, ww_cuda_stream* stream) {
  return OnDevice(device, "ww_cuda_stream_create", [&] {
    return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream),
                                     cudaStreamNonBlocking);
  });
}

int32_t ww_cuda_stream_destroy(int32_t device, ww_cuda_stream stream) {
  return OnDevice(device, "ww_cuda_stream_destroy",
                  [&] { return cudaStreamDestroy(AsStream(stream)); });
}

int32_t ww_cuda_event_create(int32_t device, ww_cuda_event* event) {
  return OnDevice(device, "ww_cuda_event_create", [&] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                    cudaEventDisableTiming | cudaEventBlockingSync);
  });
}

int32_t ww_cuda_event_destroy(int32_t device, ww_cuda_event event) {
  return OnDevice(device, "ww_cuda_event_destroy",
                  [&] { return cudaEventDestroy(AsEvent(event)); });
}

int32_t ww_cuda_event_record(int32_t device, ww_cuda_event event, ww_cuda_stream stream) {
  return OnDevice(device, "ww_cuda_event_record",
                  [&] { return cudaEventRecord(AsEvent(event), AsStream(stream)); });
}

int32_t ww_cuda_event_query(int32_t device, ww_cuda_event event) {
  bool ready = true;
  int32_t status = OnDevice(device, "ww_cuda_event_query", [&] {
    cudaError_t error = cudaEventQuery(AsEvent(event));
    ready = error != cudaErrorNotReady;
    return ready ? error : cudaSuccess;
  });
  return ready ? status : WW_CUDA_NOT_READY;
}

int32_t ww_cuda_event_wait(int32_t device, ww_cuda_event event) {
  return OnDevice(device, "ww_cuda_event_wait",
                  [&] { return cudaEventSynchronize(AsEvent(event)); });
}

int32_t ww_cuda_stream_wait(int32_t device, ww_cuda_stream stream, ww_cuda_event event) {
  return OnDevice(device, "ww_cuda_stream_wait",
                  [&] { return cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0); });
}
