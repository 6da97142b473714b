/* C interface of libweightwire_cuda.so: device memory that processes of one host share, and the
 * kernels of kernels/kernels.h, kernels/quantize.h, kernels/four_bit.h and kernels/delta.h on it,
 * with the same results bit for bit. UNTESTED ON HARDWARE: the arithmetic is tested on the CPU
 * (tests/unit/kernels/device_test.cc), the launches on no GPU yet (`ctest -L gpu`).
 * tests/support/fake_cuda is the same interface without a GPU.
 *
 * The library needs neither gRPC nor a driver to be loaded: dlopen works on any host, and where no
 * device can be used every call that needs one answers WW_CUDA_NO_DEVICE. No exception leaves it.
 *
 * Calls that take a stream only enqueue; they neither allocate nor wait, and order themselves
 * behind what is on the stream. Of the others, only ww_cuda_event_wait waits for what was enqueued,
 * ww_cuda_flush_writes for what other devices of the bus wrote, and what frees or unmaps may
 * synchronise the device: keep it out of a transfer. The calling thread's current device is the
 * same before and after, but for ww_cuda_device_use. Any thread may call; jobs are read before the
 * call returns. Pointers are of device memory, or host memory that the device can reach, and
 * naturally aligned.
 */
#ifndef WEIGHTWIRE_KERNELS_CUDA_H_
#define WEIGHTWIRE_KERNELS_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of what is below. Compare it first. */
#define WW_CUDA_ABI_VERSION 6

enum {
  WW_CUDA_OK = 0,
  WW_CUDA_NO_DEVICE = 1, /* no driver, one older than the library, no device, or not this one */
  WW_CUDA_INVALID = 2,   /* an argument is wrong; nothing was enqueued */
  WW_CUDA_FAILED = 3,    /* CUDA refused; the device's context may be lost */
  WW_CUDA_NOT_READY = 4, /* ww_cuda_event_query: work before the event is unfinished */
  WW_CUDA_NO_MEMORY = 5  /* the device has less; nothing was allocated */
};

enum { WW_CUDA_UUID_BYTES = 16, WW_CUDA_IPC_BYTES = 64 };

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

/* weightwire::kernels::QuantizeBox and its memories. One of codes and scale_inv may be null: it is
 * not made then. */
typedef struct {
  void* codes;
  void* scale_inv;
  const void* source;
  int64_t rows;
  int64_t columns;
  int64_t block_rows;
  int64_t block_columns;
  int64_t source_stride[2];
  int64_t target_stride[2];
  int64_t scale_stride[2];
  int32_t from;
  int32_t scale; /* a kernels::ScaleKind */
} ww_cuda_quantize_job;

/* Groups of four bits along the rows of a matrix, as kernels/four_bit.h has them. One of codes and
 * scales may be null: it is not made then. Strides: of rows and of what follows in a row, in
 * elements of the source, in units of code_bytes, and in scales. */
typedef struct {
  void* codes;
  void* scales;
  const void* source;
  int64_t rows;
  int64_t columns; /* a multiple of `group` */
  int64_t group;   /* a multiple of 8, at most 256 */
  int64_t source_stride[2];
  int64_t code_stride[2];
  int64_t scale_stride[2];
  int32_t code_bytes; /* 1: units of two codes; 4: of eight, as one little-endian number */
  int32_t from;
  int32_t kind; /* a kernels::FourBitKind */
  float global; /* of NVFP4: above 0 (kNvFp4Modelopt: or 0), or NaN; of others ignored */
} ww_cuda_four_bit_job;

typedef struct {
  int64_t gap_bytes;
  int64_t changes;
  int64_t escapes; /* as many, times the element's bytes */
} ww_cuda_delta_counts;

/* kernels::DeltaScan. gaps, steps and escapes have the room that kernels::DeltaStreams needs. */
typedef struct {
  int32_t order; /* weightwire::kernels::DeltaOrder */
  const void* base;
  const void* now;
  void* copy; /* null, or gets `now`: `base` itself, or memory apart */
  int64_t elements;
  int64_t changes_max;
  uint8_t* gaps;
  uint8_t* steps;
  uint8_t* escapes;             /* aligned to an element */
  ww_cuda_delta_counts* counts; /* written by the device; more changes than changes_max: the
                                 * streams are not made */
  void* scratch;                /* ww_cuda_delta_scratch_bytes, aligned to 8 */
} ww_cuda_delta_scan_job;

/* kernels::DeltaApply. */
typedef struct {
  int32_t order;
  void* target;
  int64_t elements;
  const uint8_t* gaps;
  const uint8_t* steps;
  const uint8_t* escapes;
  ww_cuda_delta_counts counts;
  uint32_t* applied; /* written by the device: 1, or 0 where the streams do not end together within
                      * the array, of which nothing has changed then */
  void* scratch;     /* as of the scan */
} ww_cuda_delta_apply_job;

typedef void* ww_cuda_stream; /* a cudaStream_t; torch's will do */
typedef void* ww_cuda_event;  /* a cudaEvent_t */

uint32_t ww_cuda_abi_version(void);
/* Why the calling thread's last call failed; "" before any did. Valid until its next call. */
const char* ww_cuda_error(void);
int32_t ww_cuda_device_count(int32_t* count);
/* What names a device in every process: indices do not. WW_CUDA_UUID_BYTES. */
int32_t ww_cuda_device_uuid(int32_t device, uint8_t* uuid);
/* Makes `device` the calling thread's current one, for libraries that go by it (NCCL). */
int32_t ww_cuda_device_use(int32_t device);

/* Device memory of `bytes` (at least 1), aligned to 256, with undefined content. */
int32_t ww_cuda_alloc(int32_t device, size_t bytes, void** memory);
int32_t ww_cuda_free(int32_t device, void* memory);
/* Names an allocation, by the pointer that ww_cuda_alloc gave, to other processes of this host:
 * WW_CUDA_IPC_BYTES. It is always the whole allocation; what lies inside is found by its offset. */
int32_t ww_cuda_ipc_export(int32_t device, void* memory, uint8_t* handle);
/* Maps another process's allocation. Not for an allocation of one's own, and not twice at once. */
int32_t ww_cuda_ipc_open(int32_t device, const uint8_t* handle, void** memory);
int32_t ww_cuda_ipc_close(int32_t device, void* memory);
/* How many bytes an allocation or a mapping has, by the pointer that made it: what is said of
 * another process's memory need not be true, and a kernel that leaves it loses the context. */
int32_t ww_cuda_ipc_bytes(int32_t device, const void* memory, size_t* bytes);
/* Lets copies between the two devices' memories go directly; without it, or where it is refused,
 * they go through host memory. Both ways, once or more often. */
int32_t ww_cuda_peer_enable(int32_t device, int32_t peer);
/* Makes host memory one that every device reaches, and copies of which run by themselves. */
int32_t ww_cuda_host_register(void* memory, size_t bytes);
int32_t ww_cuda_host_unregister(void* memory);
/* What another device of the bus (a NIC) has written to `device`'s memory before the call is seen
 * by work that is enqueued on `device` after it. Blocks until then where the device does not order
 * such writes by itself, else does nothing. WW_CUDA_FAILED: it neither does nor can be told to. */
int32_t ww_cuda_flush_writes(int32_t device);

/* A stream that does not wait for the default stream. Destroying it leaves enqueued work running.
 */
int32_t ww_cuda_stream_create(int32_t device, ww_cuda_stream* stream);
int32_t ww_cuda_stream_destroy(int32_t device, ww_cuda_stream stream);
/* An event stands for its last record: a slot that is reused needs its generations counted. */
int32_t ww_cuda_event_create(int32_t device, ww_cuda_event* event);
int32_t ww_cuda_event_destroy(int32_t device, ww_cuda_event event);
int32_t ww_cuda_event_record(int32_t device, ww_cuda_event event, ww_cuda_stream stream);
int32_t ww_cuda_event_query(int32_t device, ww_cuda_event event);
/* Blocks the calling thread, which sleeps, until the event's last record is reached. */
int32_t ww_cuda_event_wait(int32_t device, ww_cuda_event event);
/* Work enqueued on `stream` after this starts when the event's last record is reached. */
int32_t ww_cuda_stream_wait(int32_t device, ww_cuda_stream stream, ww_cuda_event event);

/* Bytes between any two memories, host or device, this one or another. Where host memory is not
 * registered the call may wait for the copy; the host must keep it as it is until then anyhow. */
int32_t ww_cuda_copy_bytes(int32_t device, ww_cuda_stream stream, void* target, const void* source,
                           size_t bytes);
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
/* kernels::QuantizeFourBit of each job, whose rows may lie apart. */
int32_t ww_cuda_quantize_four_bit(int32_t device, ww_cuda_stream stream,
                                  const ww_cuda_four_bit_job* jobs, size_t count);

/* Of the scratch memory of one job, for a known order and elements from 0; else 0. */
int64_t ww_cuda_delta_scratch_bytes(int32_t order, int64_t elements);
/* kernels::DeltaScan and kernels::DeltaApply of each job. The jobs of one call run one after the
 * other, so that they may share their scratch memory. */
int32_t ww_cuda_delta_scan(int32_t device, ww_cuda_stream stream,
                           const ww_cuda_delta_scan_job* jobs, size_t count);
int32_t ww_cuda_delta_apply(int32_t device, ww_cuda_stream stream,
                            const ww_cuda_delta_apply_job* jobs, size_t count);

#ifdef __cplusplus
}
#endif

#endif /* WEIGHTWIRE_KERNELS_CUDA_H_ */
