#if defined(__x86_64__)
#define WW_SIMD_KERNELS kSimdAvx2
#define WW_SIMD_NAME "avx2"
#include "kernels/simd_body.inc"
#endif
