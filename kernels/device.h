#pragma once

#include <cstdint>

#include "kernels/cuda.h"
#include "kernels/element.h"
#include "kernels/four_bit.h"
#include "kernels/quantize.h"
#include "kernels/xxh3.h"

/// Internal to kernels/: what each device thread does, as functions that the CPU tests run thread
/// by thread (tests/unit/kernels/device_test.cc). Only launches, shuffles and shared memory are
/// left to cuda_kernels.cu. Jobs go to a kernel by value; memory is naturally aligned.
namespace weightwire::kernels::internal {

/// Row-major indices of one side or two; steps in bytes.
struct DeviceBox {
  int64_t count;
  int32_t ndim;
  int64_t extent[kMaxDims];
  int64_t source_step[kMaxDims];
  int64_t target_step[kMaxDims];
};

struct DeviceCopy {
  unsigned char* target;
  const unsigned char* source;
  DeviceBox box;
  int32_t unit;  ///< bytes that one index moves unchanged; 0: one element, cast
  Element from;
  Element to;
};

struct DeviceSum {
  const unsigned char* source;
  uint64_t* sum;
  DeviceBox box;  ///< source steps only
  Element from;
  Element to;
  bool keeps_bits;
};

struct DeviceQuantize {
  unsigned char* codes;  ///< null: not made
  void* scale_inv;       ///< null: not made
  const unsigned char* source;
  QuantizeBox box;
  Element from;
};

struct DeviceFourBit {
  unsigned char* codes;   ///< null: not made
  unsigned char* scales;  ///< null: not made
  const unsigned char* source;
  int64_t rows;
  int64_t across;  ///< groups of a row
  int64_t group;
  int64_t source_stride[2];
  int64_t code_stride[2];  ///< in units of `code_bytes`
  int64_t scale_stride[2];
  int32_t code_bytes;
  Element from;
  FourBitKind kind;
  float global;
};

/// The copy in the widest units that alignment and contiguous runs allow.
DeviceCopy MakeDeviceCopy(void* target, const void* source, const StridedBox& box, Element from,
                          Element to);
DeviceSum MakeDeviceSum(uint64_t* sum, const void* source, const StridedBox& box, Element from,
                        Element to);
DeviceFourBit MakeDeviceFourBit(const ww_cuda_four_bit_job& job);

WW_HOST_DEVICE int DeviceBytes(Element element) {
  switch (element) {
    case Element::kOpaque1:
      return 1;
    case Element::kOpaque4:
    case Element::kF32:
      return 4;
    case Element::kOpaque8:
      return 8;
    default:
      return 2;
  }
}

// Naturally aligned, so one load or store each; as memcpy, because no object of type T is there.
template <class T>
WW_HOST_DEVICE T LoadAs(const unsigned char* at) {
  T value;
  memcpy(&value, __builtin_assume_aligned(at, sizeof(T)), sizeof(T));
  return value;
}
template <class T>
WW_HOST_DEVICE void StoreAs(unsigned char* at, T value) {
  memcpy(__builtin_assume_aligned(at, sizeof(T)), &value, sizeof(T));
}

WW_HOST_DEVICE uint64_t LoadElement(const unsigned char* at, Element from) {
  switch (DeviceBytes(from)) {
    case 1:
      return *at;
    case 2:
      return LoadAs<uint16_t>(at);
    case 4:
      return LoadAs<uint32_t>(at);
    default:
      return LoadAs<uint64_t>(at);
  }
}

WW_HOST_DEVICE uint32_t LoadF32(const unsigned char* at, Element from) {
  if (from == Element::kF32) return LoadAs<uint32_t>(at);
  uint32_t half = LoadAs<uint16_t>(at);
  return from == Element::kBF16 ? F32FromBF16(half) : F32FromF16(half);
}

WW_HOST_DEVICE uint32_t BitsFromF32(uint32_t bits, Element to) {
  if (to == Element::kBF16) return BF16FromF32(bits);
  return to == Element::kF16 ? F16FromF32(bits) : bits;
}

struct DeviceOffsets {
  int64_t source;
  int64_t target;
};

/// `Index` is 32 bits wide where the count allows: device division is several times cheaper.
template <class Index>
WW_HOST_DEVICE DeviceOffsets OffsetsAs(const DeviceBox& box, Index index) {
  DeviceOffsets at = {0, 0};
  for (int d = box.ndim - 1; d > 0; --d) {
    Index rest = index / static_cast<Index>(box.extent[d]);
    auto here = static_cast<int64_t>(index - rest * static_cast<Index>(box.extent[d]));
    at.source += here * box.source_step[d];
    at.target += here * box.target_step[d];
    index = rest;
  }
  if (box.ndim > 0) {
    at.source += static_cast<int64_t>(index) * box.source_step[0];
    at.target += static_cast<int64_t>(index) * box.target_step[0];
  }
  return at;
}

WW_HOST_DEVICE DeviceOffsets OffsetsOf(const DeviceBox& box, int64_t index) {
  return box.count <= UINT32_MAX ? OffsetsAs(box, static_cast<uint32_t>(index))
                                 : OffsetsAs(box, static_cast<uint64_t>(index));
}

struct alignas(16) SixteenBytes {
  uint64_t words[2];
};

/// Writes what index `index` of the copy covers.
WW_HOST_DEVICE void CopyAt(const DeviceCopy& job, int64_t index) {
  DeviceOffsets at = OffsetsOf(job.box, index);
  const unsigned char* source = job.source + at.source;
  unsigned char* target = job.target + at.target;
  switch (job.unit) {
    case 0: {
      uint32_t bits = BitsFromF32(LoadF32(source, job.from), job.to);
      if (job.to == Element::kF32) return StoreAs(target, bits);
      return StoreAs(target, static_cast<uint16_t>(bits));
    }
    case 1:
      return StoreAs(target, *source);
    case 2:
      return StoreAs(target, LoadAs<uint16_t>(source));
    case 4:
      return StoreAs(target, LoadAs<uint32_t>(source));
    case 8:
      return StoreAs(target, LoadAs<uint64_t>(source));
    default:
      return StoreAs(target, LoadAs<SixteenBytes>(source));
  }
}

/// The packed bytes of a sum's box, for kernels/xxh3.h. Offsets are multiples of the element's
/// size, but for At8 and At32, which serve boxes of up to 8 bytes.
struct PackedBytes {
  const DeviceSum& job;
  int64_t size;

  WW_HOST_DEVICE_MEMBER explicit PackedBytes(const DeviceSum& sum_job)
      : job(sum_job), size(sum_job.box.count * DeviceBytes(sum_job.to)) {}

  // Inlined wherever it is used, it would take ptxas a minute.
  WW_HOST_DEVICE_MEMBER WW_NOINLINE_ON_DEVICE uint64_t ElementAt(int64_t index) const {
    const unsigned char* at = job.source + OffsetsOf(job.box, index).source;
    if (job.keeps_bits) return LoadElement(at, job.from);
    return BitsFromF32(LoadF32(at, job.from), job.to);
  }

  WW_HOST_DEVICE_MEMBER WW_NOINLINE_ON_DEVICE uint64_t Gathered64(int64_t offset) const {
    const int bytes = DeviceBytes(job.to);
    uint64_t value = 0;
    for (int i = 0; i < 8; i += bytes) value |= ElementAt((offset + i) / bytes) << (8 * i);
    return value;
  }

  WW_HOST_DEVICE_MEMBER uint64_t At64(int64_t offset) const {
    const int bytes = DeviceBytes(job.to);
    const unsigned char* at = job.source + offset;
    bool packed = job.keeps_bits && job.box.ndim <= 1 &&
                  (job.box.ndim == 0 || job.box.source_step[0] == bytes);
    if (packed && reinterpret_cast<uintptr_t>(at) % 8 == 0) return LoadAs<uint64_t>(at);
    return Gathered64(offset);
  }

  WW_HOST_DEVICE_MEMBER uint32_t At8(int64_t offset) const {
    const int bytes = DeviceBytes(job.to);
    return static_cast<uint32_t>(ElementAt(offset / bytes) >> (8 * (offset % bytes)) & 0xff);
  }

  WW_HOST_DEVICE_MEMBER uint32_t At32(int64_t offset) const {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= At8(offset + i) << (8 * i);
    return value;
  }
};

/// One block of a quantization, its units of elements dealt out to threads in turn.
struct DeviceBlock {
  const unsigned char* source;
  unsigned char* codes;  ///< null: not made
  int64_t scale;         ///< where its scale is among them
  int64_t unit;          ///< elements that lie together and are read at once: 16 bytes, or 1
  int64_t units_across;
  int64_t units;
};

WW_HOST_DEVICE int64_t BlocksAcross(const QuantizeBox& box) {
  return (box.columns - 1) / box.block_columns + 1;
}
WW_HOST_DEVICE int64_t BlockCount(const QuantizeBox& box) {
  return ((box.rows - 1) / box.block_rows + 1) * BlocksAcross(box);
}

/// As many as 16 bytes hold where every row of the block allows it, on both sides.
WW_HOST_DEVICE int64_t UnitOf(const DeviceQuantize& job, const unsigned char* source,
                              const unsigned char* codes, int64_t columns) {
  const int64_t bytes = DeviceBytes(job.from);
  const int64_t unit = 16 / bytes;
  const QuantizeBox& box = job.box;
  if (box.source_stride[1] != 1 || columns % unit != 0) return 1;
  const uint64_t read =
      reinterpret_cast<uintptr_t>(source) | static_cast<uint64_t>(box.source_stride[0] * bytes);
  if (read % 16 != 0) return 1;
  if (job.codes == nullptr) return unit;
  const uint64_t written =
      reinterpret_cast<uintptr_t>(codes) | static_cast<uint64_t>(box.target_stride[0]);
  return box.target_stride[1] == 1 && written % static_cast<uint64_t>(unit) == 0 ? unit : 1;
}

WW_HOST_DEVICE DeviceBlock BlockAt(const DeviceQuantize& job, int64_t index) {
  const QuantizeBox& box = job.box;
  const int64_t block_row = index / BlocksAcross(box);
  const int64_t block_column = index % BlocksAcross(box);
  const int64_t row = block_row * box.block_rows;
  const int64_t column = block_column * box.block_columns;
  const int64_t rows = box.rows - row < box.block_rows ? box.rows - row : box.block_rows;
  const int64_t columns =
      box.columns - column < box.block_columns ? box.columns - column : box.block_columns;
  DeviceBlock block{};
  block.source = job.source + (row * box.source_stride[0] + column * box.source_stride[1]) *
                                  DeviceBytes(job.from);
  if (job.codes != nullptr) {
    block.codes = job.codes + row * box.target_stride[0] + column * box.target_stride[1];
  }
  block.scale = block_row * box.scale_stride[0] + block_column * box.scale_stride[1];
  block.unit = UnitOf(job, block.source, block.codes, columns);
  block.units_across = columns / block.unit;
  block.units = rows * block.units_across;
  return block;
}

/// visit(row, column) for the first element of every `threads`-th unit of the block, from `thread`:
/// threads that follow each other read what lies together.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Visit>
WW_HOST_DEVICE void ForUnitsOf(const DeviceBlock& block, int thread, int threads,
                               const Visit& visit) {
  const bool narrow = block.units <= INT32_MAX - threads;
  for (int64_t i = thread; i < block.units; i += threads) {
    int64_t row = narrow ? static_cast<uint32_t>(i) / static_cast<uint32_t>(block.units_across)
                         : i / block.units_across;
    visit(row, (i - row * block.units_across) * block.unit);
  }
}

/// visit(i, f32 bits) for each element of the unit of 16 bytes at `at`.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Visit>
WW_HOST_DEVICE void ForUnit(const unsigned char* at, Element from, const Visit& visit) {
  const auto unit = LoadAs<SixteenBytes>(at);
  if (from == Element::kF32) {
    for (int i = 0; i < 4; ++i) {
      visit(i, static_cast<uint32_t>(unit.words[i / 2] >> (32 * (i % 2))));
    }
    return;
  }
  for (int i = 0; i < 8; ++i) {
    const auto half = static_cast<uint32_t>(unit.words[i / 4] >> (16 * (i % 4))) & 0xffffu;
    visit(i, from == Element::kBF16 ? F32FromBF16(half) : F32FromF16(half));
  }
}

/// The largest magnitude among this thread's elements, as f32 bits.
WW_HOST_DEVICE uint32_t AmaxOfThread(const DeviceQuantize& job, const DeviceBlock& block,
                                     int thread, int threads) {
  uint32_t amax = 0;
  const auto take = [&](int, uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    amax = magnitude > amax ? magnitude : amax;
  };
  ForUnitsOf(block, thread, threads, [&](int64_t row, int64_t column) {
    const int64_t from = row * job.box.source_stride[0] + column * job.box.source_stride[1];
    const unsigned char* at = block.source + from * DeviceBytes(job.from);
    if (block.unit > 1) return ForUnit(at, job.from, take);
    take(0, LoadF32(at, job.from));
  });
  return amax;
}

/// Writes this thread's codes and, as thread 0, the scale, of which the job wants. `amax` is the
/// whole block's.
WW_HOST_DEVICE void QuantizeOfThread(const DeviceQuantize& job, const DeviceBlock& block,
                                     uint32_t amax, int thread, int threads) {
  const uint32_t scale = ScaleInv(amax, job.box.scale, job.from);
  if (thread == 0 && job.scale_inv != nullptr) {
    StoreScale(job.scale_inv, block.scale, scale, job.box.scale, job.from);
  }
  if (block.codes == nullptr) return;
  ForUnitsOf(block, thread, threads, [&](int64_t row, int64_t column) {
    const int64_t from = row * job.box.source_stride[0] + column * job.box.source_stride[1];
    const unsigned char* at = block.source + from * DeviceBytes(job.from);
    unsigned char* to =
        block.codes + row * job.box.target_stride[0] + column * job.box.target_stride[1];
    uint64_t codes = 0;
    const auto add = [&](int i, uint32_t bits) {
      const uint32_t code =
          amax >= kInfinityBits ? 0x7fu : Quantized(bits, AsFloat(scale), job.box.scale, job.from);
      codes |= static_cast<uint64_t>(code) << (8 * i);
    };
    if (block.unit == 1) {
      add(0, LoadF32(at, job.from));
      return StoreAs(to, static_cast<unsigned char>(codes));
    }
    ForUnit(at, job.from, add);
    block.unit == 8 ? StoreAs(to, codes) : StoreAs(to, static_cast<uint32_t>(codes));
  });
}

/// Of a group of four-bit elements what one thread makes: eight elements, the codes of which are
/// one number of 32 bits.
struct FourBitUnit {
  uint32_t bits[8];  ///< as f32
  int64_t row;
  int64_t group;  ///< of its row
  int64_t first;  ///< among the group's elements; the group's size or more: nothing is made
};

/// Threads that share a group: a power of two, as shuffles want it, so that some may make nothing.
WW_HOST_DEVICE int ThreadsOfGroup(int64_t group) {
  int threads = 1;
  while (threads * 8 < group) threads *= 2;
  return threads;
}

/// What `thread` of those that begin with group number `first_group` makes, read.
WW_HOST_DEVICE FourBitUnit FourBitUnitOf(const DeviceFourBit& job, int64_t first_group,
                                         int thread) {
  const int shared = ThreadsOfGroup(job.group);
  const int64_t index = first_group + thread / shared;
  FourBitUnit unit{};
  unit.first = index < job.rows * job.across ? int64_t{8} * (thread % shared) : job.group;
  if (unit.first >= job.group) return unit;
  unit.row = index <= UINT32_MAX && job.across <= UINT32_MAX
                 ? static_cast<uint32_t>(index) / static_cast<uint32_t>(job.across)
                 : index / job.across;
  unit.group = index - unit.row * job.across;
  const int64_t column = unit.group * job.group + unit.first;
  const int64_t bytes = DeviceBytes(job.from);
  const unsigned char* at =
      job.source + (unit.row * job.source_stride[0] + column * job.source_stride[1]) * bytes;
  if (job.source_stride[1] != 1 || reinterpret_cast<uintptr_t>(at) % 16 != 0) {
    for (int i = 0; i < 8; ++i) {
      unit.bits[i] = LoadF32(at + i * job.source_stride[1] * bytes, job.from);
    }
  } else if (job.from == Element::kF32) {
    const SixteenBytes halves[] = {LoadAs<SixteenBytes>(at), LoadAs<SixteenBytes>(at + 16)};
    for (int i = 0; i < 8; ++i) {
      unit.bits[i] = static_cast<uint32_t>(halves[i / 4].words[i / 2 % 2] >> (32 * (i % 2)));
    }
  } else {
    ForUnit(at, job.from, [&](int i, uint32_t bits) { unit.bits[i] = bits; });
  }
  return unit;
}

/// The largest magnitude, as f32 bits.
WW_HOST_DEVICE uint32_t AmaxOfUnit(const FourBitUnit& unit) {
  uint32_t amax = 0;
  for (uint32_t bits : unit.bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}

/// Writes the unit's codes and, of a group's first one, the scale, of which the job wants. `amax`
/// is the whole group's.
WW_HOST_DEVICE void QuantizeUnit(const DeviceFourBit& job, const FourBitUnit& unit, uint32_t amax) {
  if (unit.first >= job.group) return;
  const FourBitScale scale = FourBitScaleOf(amax, job.kind, job.from, job.global);
  if (unit.first == 0 && job.scales != nullptr) {
    const int bytes = job.kind == FourBitKind::kInt4 ? DeviceBytes(job.from) : 1;
    unsigned char* to =
        job.scales + (unit.row * job.scale_stride[0] + unit.group * job.scale_stride[1]) * bytes;
    if (bytes == 4) {
      StoreAs(to, scale.stored);
    } else if (bytes == 2) {
      StoreAs(to, static_cast<uint16_t>(scale.stored));
    } else {
      *to = static_cast<unsigned char>(scale.stored);
    }
  }
  if (job.codes == nullptr) return;
  const bool number = amax < kInfinityBits && job.global == job.global;
  uint32_t codes = job.kind == FourBitKind::kInt4 && !number ? 0x88888888u : 0;
  for (int i = 0; number && i < 8; ++i) {
    codes |= FourBits(unit.bits[i], scale.divisor, job.kind, job.from) << (4 * i);
  }
  const int64_t bytes = job.code_bytes;
  const int64_t step = job.code_stride[1] * bytes;
  unsigned char* to = job.codes + unit.row * job.code_stride[0] * bytes +
                      (unit.group * job.group + unit.first) / (2 * bytes) * step;
  const bool together = step == 1 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
  if (bytes == 4 || together) return StoreAs(to, codes);
  for (int i = 0; i < 4; ++i) to[i * step] = static_cast<unsigned char>(codes >> (8 * i));
}

}  // namespace weightwire::kernels::internal
