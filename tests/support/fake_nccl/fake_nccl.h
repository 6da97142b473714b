/* What tests may ask of the fake NCCL beside its NCCL functions. Symbols of one shared library, so
 * that a test and the code under test meet the same tables. */
#ifndef WEIGHTWIRE_TESTS_SUPPORT_FAKE_NCCL_FAKE_NCCL_H_
#define WEIGHTWIRE_TESTS_SUPPORT_FAKE_NCCL_FAKE_NCCL_H_

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FAKE_NCCL_HANG_INIT = 1,      /* the rank's communicator never becomes ready; nor do its peers' */
  FAKE_NCCL_HANG_OPERATION = 2, /* nothing that the rank enqueues ever moves */
  FAKE_NCCL_ASYNC_ERROR = 3,    /* the rank's next operation fails with ncclSystemError */
  FAKE_NCCL_HANG_ABORT = 4,     /* ncclCommAbort and Destroy wait until the faults are cleared */
  FAKE_NCCL_HANG_FLUSH = 5,     /* ncclCommFinalize never ends */
  FAKE_NCCL_WRONG_BYTES = 6 /* of fake_nccl_pair: a byte that the rank receives is another one */
};
void fake_nccl_fault(int rank, int fault);
/* The rank's process is gone: its communicators do nothing more, they and its peers get
 * ncclRemoteError. */
void fake_nccl_lose(int rank);
/* No faults, version 2.28.9. Waits until nobody hangs in a call any more. */
void fake_nccl_reset(void);
void fake_nccl_set_version(int version);

int fake_nccl_live_comms(void);
int fake_nccl_live_events(void);
/* Bytes of operations that were enqueued and have neither moved nor been given up. */
int fake_nccl_pending(void);

#ifdef __cplusplus
}
#endif

#endif /* WEIGHTWIRE_TESTS_SUPPORT_FAKE_NCCL_FAKE_NCCL_H_ */
