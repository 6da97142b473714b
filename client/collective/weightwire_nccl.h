/* C interface of libweightwire_nccl.so: NCCL communicators that end in time, one after the other
 * under communicator epochs that the coordinator hands out (weightwire.v1.Communicators). For the
 * application's process. UNTESTED ON HARDWARE: tested over a fake NCCL on the CPU.
 *
 * It is loaded anywhere: NCCL and libweightwire_cuda.so are looked for by ww_nccl_open. Every call
 * that returns int32_t answers 0 or the number of a weightwire Code (gRPC's canonical codes);
 * ww_nccl_last then says more. No exception leaves it.
 *
 * form, broadcast, exchange and close block, asleep, at most deadline_ms and, when they fail,
 * release_grace_ms more. They end exactly once. After a failure the communicator is aborted, no
 * buffer is touched any more and the state is UNFORMED, so form again under a higher epoch; or the
 * state is STUCK: NCCL did not let go, buffers must stay until the process ends. One of them at a
 * time; abort, state and epoch from any thread while the handle is open. The caller's current CUDA
 * device is options.device; work is ordered behind what is on its stream.
 */
#ifndef WEIGHTWIRE_CLIENT_COLLECTIVE_WEIGHTWIRE_NCCL_H_
#define WEIGHTWIRE_CLIENT_COLLECTIVE_WEIGHTWIRE_NCCL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of what is below. Compare it first. */
#define WW_NCCL_ABI_VERSION 2
#define WW_NCCL_UNIQUE_ID_BYTES 128

enum {
  WW_NCCL_UNFORMED = 0,
  WW_NCCL_FORMING = 1,
  WW_NCCL_READY = 2,
  WW_NCCL_RUNNING = 3,
  WW_NCCL_ABORTING = 4,
  WW_NCCL_STUCK = 5,
  WW_NCCL_CLOSED = 6
};

typedef struct ww_nccl ww_nccl;

typedef struct {
  const char* nccl_library; /* NULL: "libnccl.so.2", by the loader's search */
  const char* cuda_library; /* NULL: "libweightwire_cuda.so" */
  int32_t device;
  uint32_t release_grace_ms; /* 0: 10000 */
} ww_nccl_options;

typedef struct {
  void* data;
  size_t bytes;
  uint32_t peer;
} ww_nccl_piece;

/* Of the calling thread's last call; code 0 when it went well. Valid until its next call. */
typedef struct {
  int32_t code;   /* weightwire Code */
  int32_t reason; /* weightwire.v1.Reason */
  const char* message;
  const char* rank;
  const char* remedy;
} ww_nccl_status;

uint32_t ww_nccl_abi_version(void);
ww_nccl_status ww_nccl_last(void);

int32_t ww_nccl_open(const ww_nccl_options* options, ww_nccl** collective);
/* Aborts what is formed. No other call is under way. NULL is ignored. */
void ww_nccl_free(ww_nccl* collective);

/* Of the NCCL that was loaded, as NCCL counts: 22809 is 2.28.9. */
int32_t ww_nccl_version(const ww_nccl* collective);
/* By rank 0, for one form of all. */
int32_t ww_nccl_unique_id(ww_nccl* collective, uint8_t id[WW_NCCL_UNIQUE_ID_BYTES]);
int32_t ww_nccl_form(ww_nccl* collective, const uint8_t id[WW_NCCL_UNIQUE_ID_BYTES], uint32_t rank,
                     uint32_t size, uint64_t epoch, uint32_t deadline_ms);
/* The root's bytes to everybody's data. `stream` is a cudaStream_t; torch's will do. */
int32_t ww_nccl_broadcast(ww_nccl* collective, void* data, size_t bytes, uint32_t root,
                          void* stream, uint32_t deadline_ms);
/* All at once; each send meets the peer's receive of the same size, in order per pair. */
int32_t ww_nccl_exchange(ww_nccl* collective, const ww_nccl_piece* sends, size_t send_count,
                         const ww_nccl_piece* receives, size_t receive_count, void* stream,
                         uint32_t deadline_ms);
/* What runs ends with ABORTED; a ready communicator is given back. */
int32_t ww_nccl_abort(ww_nccl* collective, const char* why);
int32_t ww_nccl_close(ww_nccl* collective, uint32_t deadline_ms);

int32_t ww_nccl_state(const ww_nccl* collective);
/* The newest epoch that was formed or tried; 0: none. */
uint64_t ww_nccl_epoch(const ww_nccl* collective);

#ifdef __cplusplus
}
#endif

#endif /* WEIGHTWIRE_CLIENT_COLLECTIVE_WEIGHTWIRE_NCCL_H_ */
