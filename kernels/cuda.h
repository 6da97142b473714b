/* C interface of libweightwire_cuda.so: the kernels of kernels/kernels.h and kernels/quantize.h on
 * device memory, with the same results bit for bit. UNTESTED ON HARDWARE: the arithmetic is tested
 * on the CPU (tests/unit/kernels/device_test.cc), the launches on no GPU yet (`ctest -L gpu`).
 *
 * The library needs neither gRPC nor a driver to be loaded: dlopen works on any host, and where no
 * device can be used every call that needs one answers WW_CUDA_NO_DEVICE. No exception leaves it.
 *
 * Calls that take a stream only enqueue; they neither allocate nor wait, and order themselves
 * behind what is on the stream. Nothing here synchronises a device. The calling thread's current
 * device is the same before and after. Any thread may call; jobs are read before the call returns.
 * Pointers are of device memory, or host memory that the device can reach, and naturally aligned.
 */
#ifndef WEIGHTWIRE_KERNELS_CUDA_H_
#define WEIGHTWIRE_KERNELS_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of what is below. Compare it first. */
#define WW_CUDA_ABI_VERSION 1

enum {
  WW_CUDA_OK = 0,
  WW_CUDA_NO_DEVICE = 1, /* no driver, one older than the library, no device, or not this one */
  WW_CUDA_INVALID = 2,   /* an argument is wrong; nothing was enqueued */
  WW_CUDA_FAILED = 3,    /* CUDA refused; the device's context may be lost */
  WW_CUDA_NOT_READY = 4  /* ww_cuda_event_query: work before the event is unfinished */
};

/* Values of weightwire::kernels::Element. */
enum {
  WW_OPAQUE1 = 0,
  WW_OPAQUE2 = 1,
  WW_OPAQUE4 = 2,
  WW_OPAQUE8 = 3,
  WW_BF16 = 4,
  WW_F16 = 5,
  WW_F32 = 6
};

/* weightwire::kernels::StridedBox: row-major, strides in elements of each side. */
typedef struct {
  int32_t ndim;
  int64_t extent[8];
  int64_t source_stride[8];
  int64_t target_stride[8];
} ww_cuda_box;

typedef struct {
  void* target;
  const void* source;
  ww_cuda_box box;
  int32_t from;
  int32_t to;
} ww_cuda_copy_job;

typedef struct {
  uint64_t* sum; /* written by the device */
  const void* source;
  ww_cuda_box box; /* source strides only */
  int32_t from;
  int32_t to;
} ww_cuda_sum_job;

/* weightwire::kernels::QuantizeBox and its memories. */
typedef struct {
  void* codes;
  float* scale_inv;
  const void* source;
  int64_t rows;
  int64_t columns;
  int64_t block_rows;
  int64_t block_columns;
  int64_t source_stride[2];
  int64_t target_stride[2];
  int64_t scale_stride[2];
  int32_t from;
} ww_cuda_quantize_job;

typedef void* ww_cuda_stream; /* a cudaStream_t; torch's will do */
typedef void* ww_cuda_event;  /* a cudaEvent_t */

uint32_t ww_cuda_abi_version(void);
/* Why the calling thread's last call failed; "" before any did. Valid until its next call. */
const char* ww_cuda_error(void);
int32_t ww_cuda_device_count(int32_t* count);

/* A stream that does not wait for the default stream. Destroying it leaves enqueued work running.
 */
int32_t ww_cuda_stream_create(int32_t device, ww_cuda_stream* stream);
int32_t ww_cuda_stream_destroy(int32_t device, ww_cuda_stream stream);
/* An event stands for its last record: a slot that is reused needs its generations counted. */
int32_t ww_cuda_event_create(int32_t device, ww_cuda_event* event);
int32_t ww_cuda_event_destroy(int32_t device, ww_cuda_event event);
int32_t ww_cuda_event_record(int32_t device, ww_cuda_event event, ww_cuda_stream stream);
int32_t ww_cuda_event_query(int32_t device, ww_cuda_event event);
/* Work enqueued on `stream` after this starts when the event's last record is reached. */
int32_t ww_cuda_stream_wait(int32_t device, ww_cuda_stream stream, ww_cuda_event event);

/* kernels::Copy of each job. A packed target is a pack, a packed source an unpack. The jobs of one
 * call may run at once, so none may touch what another writes. */
int32_t ww_cuda_copy(int32_t device, ww_cuda_stream stream, const ww_cuda_copy_job* jobs,
                     size_t count);
/* kernels::SumSource of each job. One sum is read by one warp: speed comes from many of them. */
int32_t ww_cuda_sum(int32_t device, ww_cuda_stream stream, const ww_cuda_sum_job* jobs,
                    size_t count);
/* kernels::QuantizeE4M3 of each job. */
int32_t ww_cuda_quantize(int32_t device, ww_cuda_stream stream, const ww_cuda_quantize_job* jobs,
                         size_t count);

#ifdef __cplusplus
}
#endif

#endif /* WEIGHTWIRE_KERNELS_CUDA_H_ */
