/* A wall clock that jumps, for one process tree: LD_PRELOAD. The file WEIGHTWIRE_TEST_CLOCK holds by how much it is off.
 *
 * What a kernel does to a real jump is done here to those who ask libc: whoever reads CLOCK_REALTIME sees the jump, and who
 * waits until an instant of it wakes at once when that is past, and only then: 400 days later when the clock went back.
 * CLOCK_MONOTONIC does not jump, by its definition. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE (SECOND / 20) /* after so long a wait looks at the clock again */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

struct shared {
  int64_t offset_ns;
  uint64_t reads; /* since it was set to 0: of a clock that is off */
  uint64_t waits; /* until an instant of such a clock */
};
static struct shared nobody, *shared = &nobody;

__attribute__((constructor)) static void open_clock(void) {
  const char* path = getenv("WEIGHTWIRE_TEST_CLOCK");
  const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  void* map = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (map == MAP_FAILED) abort();
  close(file);
  shared = map;
}

static int64_t ns_of(const struct timespec* t) { return t->tv_sec * SECOND + t->tv_nsec; }
static struct timespec time_of(int64_t ns) {
  if (ns < 0) ns = 0;
  return (struct timespec){ns / SECOND, ns % SECOND};
}
static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }
static int64_t offset(void) { return __atomic_load_n(&shared->offset_ns, __ATOMIC_SEQ_CST); }
static void count(uint64_t* what) {
  if (offset() != 0) __atomic_fetch_add(what, 1, __ATOMIC_SEQ_CST);
}

int clock_gettime(clockid_t clock, struct timespec* out) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  const int rc = real(clock, out);
  if (rc == 0 && is_wall(clock)) {
    *out = time_of(ns_of(out) + offset());
    count(&shared->reads);
  }
  return rc;
}

int gettimeofday(struct timeval* restrict out, void* restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static int64_t left_until(const struct timespec* until) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return ns_of(until) - ns_of(&now);
}
static int64_t slice_of(int64_t left) { return left < SLICE ? (left < 0 ? 0 : left) : SLICE; }

static int wait_for_condition(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
  static __typeof__(&pthread_cond_clockwait) real;
  if (!real) real = REAL(pthread_cond_clockwait);
  count(&shared->waits);
  for (;;) {
    const int64_t left = left_until(until);
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end = time_of(ns_of(&end) + slice_of(left));
    const int rc = real(condition, mutex, CLOCK_MONOTONIC, &end);
    if (rc != ETIMEDOUT || left_until(until) <= 0) return rc;
  }
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  static __typeof__(&pthread_cond_clockwait) real;
  if (!real) real = REAL(pthread_cond_clockwait);
  return is_wall(clock) ? wait_for_condition(condition, mutex, until) : real(condition, mutex, clock, until);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
  static __typeof__(&pthread_cond_timedwait) real;
  if (!real) real = REAL(pthread_cond_timedwait);
  /* Of which clock it is only the condition knows: the other one counts from the machine's start. */
  const int wall = until->tv_sec > 600000000;
  return wall ? wait_for_condition(condition, mutex, until) : real(condition, mutex, until);
}

/* futex(2) until an instant of the wall clock: what waits of abseil, and so of gRPC, are. */
long syscall(long number, ...) {
  static __typeof__(&syscall) real;
  if (!real) real = REAL(syscall);
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a[0], (struct timespec*)a[1]);
  const struct timespec* until = (const struct timespec*)a[3];
  const int waits = number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && until != NULL;
  if (!waits || !(a[1] & FUTEX_CLOCK_REALTIME)) return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  count(&shared->waits);
  for (;;) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end = time_of(ns_of(&end) + slice_of(left_until(until)));
    const long rc = real(number, a[0], a[1] & ~FUTEX_CLOCK_REALTIME, a[2], &end, a[4], a[5]);
    if (rc == 0 || errno != ETIMEDOUT || left_until(until) <= 0) return rc;
  }
}
