#include "bench/transfer/unsummed.h"

#include <cstring>

#include "kernels/kernels.h"

namespace weightwire::bench {
namespace {

bool sums_on = true;

}  // namespace

void SetSums(bool on) { sums_on = on; }

}  // namespace weightwire::bench

namespace weightwire::kernels {

// The linker's names for what was there before (`--wrap`).
#define REAL(name) __asm__("__real_" name)
#define WRAPPED(name) __asm__("__wrap_" name)
#define SUM_SOURCE "_ZN10weightwire7kernels9SumSourceEPKvRKNS0_10StridedBoxENS0_7ElementES6_"
#define SUM_TARGET "_ZN10weightwire7kernels9SumTargetEPKvRKNS0_10StridedBoxENS0_7ElementE"
#define COPY_AND_SUM \
  "_ZN10weightwire7kernels16CopyAndSumTargetEPvPKvRKNS0_10StridedBoxENS0_7ElementES7_"
#define COPY_AND_SUM_BOTH \
  "_ZN10weightwire7kernels14CopyAndSumBothEPvPKvS3_RKNS0_10StridedBoxENS0_7ElementES7_"
#define RUNNING_ADD "_ZN10weightwire7kernels10RunningSum10CopyAndAddEPvPKvm"
#define RUNNING_END "_ZNK10weightwire7kernels10RunningSum3EndEv"

uint64_t RealSumSource(const void*, const StridedBox&, Element, Element) REAL(SUM_SOURCE);
uint64_t RealSumTarget(const void*, const StridedBox&, Element) REAL(SUM_TARGET);
uint64_t RealCopyAndSum(void*, const void*, const StridedBox&, Element, Element) REAL(COPY_AND_SUM);
BothSums RealCopyAndSumBoth(void*, const void*, const void*, const StridedBox&, Element, Element)
    REAL(COPY_AND_SUM_BOTH);
void RealAdd(RunningSum*, void*, const void*, size_t) REAL(RUNNING_ADD);
uint64_t RealEnd(const RunningSum*) REAL(RUNNING_END);
uint64_t SumSourceOrNot(const void*, const StridedBox&, Element, Element) WRAPPED(SUM_SOURCE);
uint64_t SumTargetOrNot(const void*, const StridedBox&, Element) WRAPPED(SUM_TARGET);
uint64_t CopyAndSumOrNot(void*, const void*, const StridedBox&, Element, Element)
    WRAPPED(COPY_AND_SUM);
BothSums CopyAndSumBothOrNot(void*, const void*, const void*, const StridedBox&, Element, Element)
    WRAPPED(COPY_AND_SUM_BOTH);
void AddOrNot(RunningSum*, void*, const void*, size_t) WRAPPED(RUNNING_ADD);
uint64_t EndOrNot(const RunningSum*) WRAPPED(RUNNING_END);

uint64_t SumSourceOrNot(const void* source, const StridedBox& box, Element from, Element to) {
  return bench::sums_on ? RealSumSource(source, box, from, to) : 0;
}

uint64_t SumTargetOrNot(const void* target, const StridedBox& box, Element element) {
  return bench::sums_on ? RealSumTarget(target, box, element) : 0;
}

void AddOrNot(RunningSum* sum, void* target, const void* source, size_t bytes) {
  if (bench::sums_on) return RealAdd(sum, target, source, bytes);
  std::memcpy(target, source, bytes);
}

uint64_t EndOrNot(const RunningSum* sum) { return bench::sums_on ? RealEnd(sum) : 0; }

uint64_t CopyAndSumOrNot(void* target, const void* source, const StridedBox& box, Element from,
                         Element to) {
  if (bench::sums_on) return RealCopyAndSum(target, source, box, from, to);
  Copy(target, source, box, from, to);
  return 0;
}

BothSums CopyAndSumBothOrNot(void* target, const void* source, const void* seen,
                             const StridedBox& box, Element from, Element to) {
  if (bench::sums_on) return RealCopyAndSumBoth(target, source, seen, box, from, to);
  Copy(target, source, box, from, to);
  return {};
}

}  // namespace weightwire::kernels
