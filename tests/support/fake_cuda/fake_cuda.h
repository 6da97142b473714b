#pragma once

#include <cstddef>
#include <cstdint>

/// libfake_cuda.so has the interface of kernels/cuda.h without a GPU, and is as strict as one:
///  - "device memory" is memory of the host that only the library's own calls reach: who follows
///    one of its pointers elsewhere gets a SIGSEGV;
///  - what was enqueued runs when somebody waits for it and not before, so that a missing wait
///    shows every time;
///  - what a NIC has written is seen after a flush only (fake_cuda_write_late);
///  - kernels reach their own device, and host memory only where it is registered; an access
///    outside of what is allocated, mapped or registered breaks the device for good, as on a GPU;
///  - an allocation can be opened by another process, once, and not by its own; it outlives its
///    owner while it is mapped.
///
/// Environment: FAKE_CUDA_DEVICES, the devices that this process sees, in its order ("1,0"; default
/// "0"; empty: none); FAKE_CUDA_BYTES, memory of each (default 1 GiB, of each process);
/// FAKE_CUDA_HOST_BYTES=forbidden, or a number: a copy between a device and the host, sums apart,
/// that goes beyond so many bytes in all breaks the device, which proves of what still works that
/// nothing went that way.
extern "C" {

/// What a test does with device memory: anything, at once, after all that was enqueued.
void fake_cuda_read(const void* device_memory, void* into, size_t bytes);
void fake_cuda_write(void* device_memory, const void* from, size_t bytes);

/// As a NIC writes: work of the device sees the bytes once somebody has called ww_cuda_flush_writes
/// for it after this, and not before.
void fake_cuda_write_late(void* device_memory, const void* from, size_t bytes);
/// Calls of ww_cuda_flush_writes for any device so far.
uint64_t fake_cuda_flushes(void);

/// Bytes of all devices that this process has allocated (and not freed), or mapped.
uint64_t fake_cuda_bytes_allocated(void);
uint64_t fake_cuda_bytes_opened(void);

/// Bytes that this process has copied between a device and the host, sums apart.
uint64_t fake_cuda_host_bytes(void);

/// Host memory of this process that stands for memory of `device` from now on, as torch's does on a
/// GPU: kernels reach it there, the host does too. Not twice; to be forgotten before it is freed.
/// Nonzero: it has been adopted.
int32_t fake_cuda_adopt(int32_t device, void* memory, size_t bytes);
int32_t fake_cuda_forget(void* memory);

/// Where this process finds the bytes of device memory, for what stands for work of a GPU that is
/// not the library's (torch's); null: it is no device memory.
void* fake_cuda_alias(void* device_memory, size_t bytes);

/// Calls of ww_cuda_copy so far, and of ww_cuda_host_register less ww_cuda_host_unregister.
uint64_t fake_cuda_launches(void);
uint64_t fake_cuda_registered(void);

/// Whose memory it is, by index; -1: no device's.
int32_t fake_cuda_index_of(const void* memory);
/// The calling thread's current device, by index.
int32_t fake_cuda_current_device(void);

/// The `calls`-th next call named `name` ("ww_cuda_copy") fails with WW_CUDA_FAILED, once.
void fake_cuda_fail(const char* name, uint32_t calls);
}
