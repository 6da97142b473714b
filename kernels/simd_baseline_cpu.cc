#define WW_SIMD_KERNELS kSimdBaseline
#define WW_SIMD_NAME "baseline"
#include "kernels/simd_body.inc"
