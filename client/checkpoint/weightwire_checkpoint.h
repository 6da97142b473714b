/* C interface of libweightwire_checkpoint.so: what `wwctl layout` and `wwctl plan` compute, without
 * a process, the copies of a load, without Python, and what the steps between two versions take.
 * For the process that loads, converts or compares.
 *
 * Pure but for the memory and the file it is given: no thread, no network. Any thread, any time.
 * Calls that return int32_t answer 0 or the number of a weightwire Code (gRPC's canonical codes);
 * ww_checkpoint_last then says more. No exception leaves it.
 */
#ifndef WEIGHTWIRE_CLIENT_CHECKPOINT_WEIGHTWIRE_CHECKPOINT_H_
#define WEIGHTWIRE_CLIENT_CHECKPOINT_WEIGHTWIRE_CHECKPOINT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of what is below. Compare it first. */
#define WW_CHECKPOINT_ABI_VERSION 6
#define WW_CHECKPOINT_DIMS_MAX 8
/* Instead of a rank. */
#define WW_CHECKPOINT_ALL_RANKS UINT32_MAX

/* Of the calling thread's last call; code 0 when it went well. Valid until its next call. */
typedef struct {
  int32_t code;   /* weightwire Code */
  int32_t reason; /* weightwire.v1.Reason */
  const char* message;
  const char* rank;
  const char* tensor;
  const char* remedy;
} ww_checkpoint_status;

/* Of the calling thread's last call that went well. Valid until its next call. */
typedef struct {
  const char* data;
  size_t bytes;
} ww_checkpoint_answer;

/* A strided block, in elements of 1, 2, 4 or 8 bytes; extents >= 1, strides >= 0. */
typedef struct {
  uint32_t element_bytes;
  uint32_t dims; /* 0: one element */
  int64_t extent[WW_CHECKPOINT_DIMS_MAX];
  int64_t source_stride[WW_CHECKPOINT_DIMS_MAX];
  int64_t target_stride[WW_CHECKPOINT_DIMS_MAX];
} ww_checkpoint_block;

uint32_t ww_checkpoint_abi_version(void);
ww_checkpoint_status ww_checkpoint_last(void);

/* What the ranks of `spec` (one, or all of them) hold of the model with this config.json: JSON,
 * {"ranks": N, "tensors": [client/checkpoint/layout_json.h]}, in the order that plans number.
 * `pieces`: say what lies in each tensor, too (most of the work). */
int32_t ww_checkpoint_layout(const char* config, const char* spec, uint32_t rank, uint32_t pieces,
                             ww_checkpoint_answer* answer);

/* The plan that fills the ranks of `to` (one, or all of them) from those of `from`, proved: the
 * bytes of server/plan/plan_bytes.h, which `wwctl plan --out` writes. */
int32_t ww_checkpoint_plan(const char* config, const char* from, const char* to, uint32_t rank,
                           ww_checkpoint_answer* answer);

/* Copies the block's bits from `source` on to `target` on, past the caches: nobody reads a weight
 * as soon as it is loaded. The caller knows that the block stays inside of both memories. */
int32_t ww_checkpoint_copy(void* target, const void* source, const ww_checkpoint_block* block);

/* The same, from the bytes of the open file `fd` that begin at `offset`; they are read, not mapped.
 * `name`: of the file, for errors: code DATA_LOSS when it ends before the block does, however large
 * it was when it was opened; UNAVAILABLE when the disk fails. */
int32_t ww_checkpoint_read(void* target, int32_t fd, int64_t offset, const char* name,
                           const ww_checkpoint_block* block);

/* What a checkpoint in `format` (wwctl convert --quantize; or the text of a quantization_config)
 * holds of the model with this config.json: JSON, {"config": the other config.json, "weights":
 * [{"name": of a weight, "codes", "scales": of what is made of it, "block": [rows, columns] that
 * share a scale, "rule": a layout::ScaleRule, "packed": elements in one of the codes, "turned":
 * each expert's matrix has inputs first, its codes outputs}]}. */
int32_t ww_checkpoint_quantized(const char* config, const char* format,
                                ww_checkpoint_answer* answer);

/* A row-major matrix of whole blocks that share one scale; those at its end may be smaller, but not
 * where the rule is of four bits: then block_rows is 1, and block_columns a multiple of 8 up to
 * 256.
 */
typedef struct {
  int64_t rows;
  int64_t columns;
  int64_t block_rows;
  int64_t block_columns;
  int32_t rule;        /* a layout::ScaleRule */
  int32_t scale_bytes; /* of one scale */
  float global;        /* of NVFP4: ww_checkpoint_global's of the whole tensor */
} ww_checkpoint_matrix;

/* Codes (a byte for each element, or for two of four bits) and scales (one for each block) of the
 * matrix at `source`, whose elements are of `dtype`: BF16, F16 or F32. INVALID_ARGUMENT: of others,
 * or no such scales. */
int32_t ww_checkpoint_quantize(const char* dtype, const ww_checkpoint_matrix* matrix,
                               const void* source, void* codes, void* scales);

/* NVFP4's global scale by `rule` (as of a matrix) of a tensor, or of several, that are given in
 * parts: `amax`, 0 at first, is the largest magnitude so far, and `global` the scale by it.
 * INVALID_ARGUMENT: as ww_checkpoint_quantize. */
int32_t ww_checkpoint_global(const char* dtype, int32_t rule, const void* source, uint64_t elements,
                             float* amax, float* global);

/* Of blocks of WW_CHECKPOINT_DELTA_BLOCK bytes, the last one shorter. */
#define WW_CHECKPOINT_DELTA_BLOCK (1 << 20)
typedef struct {
  uint64_t changed;     /* elements that differ */
  uint64_t coded_bytes; /* of each block the shorter of its code (delta/coder.h) and itself */
} ww_checkpoint_delta;

/* Adds to `sum` what makes `now` of `base`, both `bytes` of elements of `dtype` (safetensors' name
 * of it, "BF16"). Each code is applied and its result compared: INTERNAL when it is not `now`. */
int32_t ww_checkpoint_delta_size(const char* dtype, const void* base, const void* now,
                                 uint64_t bytes, ww_checkpoint_delta* sum);

/* The code that makes `now` of `base` (at most a block), into `code`, which has room for `bytes`.
 * `code_bytes` becomes 0 where the code would not be shorter than `now`. */
int32_t ww_checkpoint_delta_encode(const char* dtype, const void* base, const void* now,
                                   uint64_t bytes, void* code, uint64_t* code_bytes);

/* `target` holds the older version and gets the newer one. DATA_LOSS: not the code of such a block;
 * nothing outside of `target` was written. */
int32_t ww_checkpoint_delta_apply(const char* dtype, const void* code, uint64_t code_bytes,
                                  void* target, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* WEIGHTWIRE_CLIENT_CHECKPOINT_WEIGHTWIRE_CHECKPOINT_H_ */
