#if defined(__x86_64__)
#define WW_SIMD_KERNELS kSimdAvx512
#define WW_SIMD_NAME "avx512"
#include "kernels/simd_body.inc"
#endif
