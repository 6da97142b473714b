// One lock around everything. A stream is a list of tasks that runs when an event of it is waited
// for; an event is a place in such a list.
#include "tests/support/fake_cuda/fake_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/delta.h"
#include "kernels/kernels.h"
#include "kernels/quantize.h"
#include "tests/support/fake_cuda/fake_memory.h"
#include "tests/unit/kernels/device_four_bit.h"

namespace weightwire::fake_cuda {
namespace {

using kernels::Element;
using kernels::StridedBox;
using Reach = Memory::Reach;

struct Stream {
  std::vector<std::function<bool()>> tasks;
  size_t done = 0;
};
struct Event {
  Stream* stream = nullptr;
  size_t place = 0;
};

/// Of a NIC, on its way to `device`.
struct LateWrite {
  int device = 0;
  void* target = nullptr;
  std::vector<std::byte> bytes;
};

struct State {
  std::recursive_mutex mutex;
  std::vector<LateWrite> late;
  uint64_t flushes = 0;
  uint64_t launches = 0;
  Memory memory;
  std::vector<int> devices;
  uint64_t bytes_each = uint64_t{1} << 30;
  bool broken = false;
  uint64_t host_bytes_max = UINT64_MAX;
  uint64_t host_bytes = 0;
  std::map<std::string, uint32_t> faults;
};

State& Global() {
  static State* state = [] {
    auto* made = new State();
    const char* devices = std::getenv("FAKE_CUDA_DEVICES");
    std::istringstream in(devices != nullptr ? devices : "0");
    for (std::string item; std::getline(in, item, ',');) made->devices.push_back(std::stoi(item));
    if (const char* bytes = std::getenv("FAKE_CUDA_BYTES")) made->bytes_each = std::stoull(bytes);
    const char* host = std::getenv("FAKE_CUDA_HOST_BYTES");
    if (host != nullptr)
      made->host_bytes_max = std::string(host) == "forbidden" ? 0 : std::stoull(host);
    return made;
  }();
  return *state;
}

thread_local std::string last_error;
thread_local int32_t current_device = 0;

int32_t Fail(int32_t code, const char* what, const std::string& why) {
  last_error = std::string(what) + ": " + why;
  return code;
}

int32_t Enter(int32_t device, const char* what) {
  State& state = Global();
  if (state.devices.empty()) {
    return Fail(WW_CUDA_NO_DEVICE, what, "no device: FAKE_CUDA_DEVICES is empty");
  }
  if (device < 0 || static_cast<size_t>(device) >= state.devices.size()) {
    return Fail(WW_CUDA_NO_DEVICE, what, "no device: invalid device ordinal");
  }
  if (state.broken) {
    return Fail(WW_CUDA_FAILED, what, "an illegal memory access was encountered");
  }
  auto fault = state.faults.find(what);
  if (fault != state.faults.end() && --fault->second == 0) {
    state.faults.erase(fault);
    return Fail(WW_CUDA_FAILED, what, "a failure that the test asked for");
  }
  return WW_CUDA_OK;
}

int32_t Done(bool ok, const char* what, const char* why) {
  return ok ? int32_t{WW_CUDA_OK} : Fail(WW_CUDA_FAILED, what, why);
}

int Number(int32_t device) { return Global().devices[static_cast<size_t>(device)]; }

void RunUntil(Stream& stream, size_t place) {
  for (; stream.done < place; ++stream.done) {
    if (!Global().broken && !stream.tasks[stream.done]()) Global().broken = true;
    stream.tasks[stream.done] = nullptr;
  }
}

Stream* AsStream(ww_cuda_stream stream) { return static_cast<Stream*>(stream); }
Event* AsEvent(ww_cuda_event event) { return static_cast<Event*>(event); }

StridedBox ToBox(const ww_cuda_box& given) {
  StridedBox box;
  box.ndim = given.ndim;
  std::copy(given.extent, given.extent + given.ndim, box.extent);
  std::copy(given.source_stride, given.source_stride + given.ndim, box.source_stride);
  std::copy(given.target_stride, given.target_stride + given.ndim, box.target_stride);
  return box;
}

size_t ReachOf(const StridedBox& box, const int64_t* stride, Element element) {
  int64_t last = 0;
  for (int d = 0; d < box.ndim; ++d) last += (box.extent[d] - 1) * stride[d];
  return static_cast<size_t>((last + 1) * kernels::ElementBytes(element));
}

bool Aligned(const void* at, Element element) {
  const auto size = static_cast<uintptr_t>(kernels::ElementBytes(element));
  return at != nullptr && reinterpret_cast<uintptr_t>(at) % size == 0;
}

/// False: a payload went between a device and the host where that is forbidden.
bool Count(const void* target, const void* source, size_t bytes) {
  State& state = Global();
  if (state.memory.DeviceOf(target).has_value() == state.memory.DeviceOf(source).has_value()) {
    return true;
  }
  state.host_bytes += bytes;
  return state.host_bytes <= state.host_bytes_max;
}

/// A kernel reaches its own device and, where it is registered, the host.
bool OnDevice(int device, const void* at) {
  return Global().memory.DeviceOf(at).value_or(device) == device;
}

size_t BytesOf(const StridedBox& box, Element element) {
  auto bytes = static_cast<size_t>(kernels::ElementBytes(element));
  for (int d = 0; d < box.ndim; ++d) bytes *= static_cast<size_t>(box.extent[d]);
  return bytes;
}

bool Copy(int device, const ww_cuda_copy_job& job) {
  const StridedBox box = ToBox(job.box);
  const auto from = static_cast<Element>(job.from), to = static_cast<Element>(job.to);
  const Memory& memory = Global().memory;
  std::byte* source =
      memory.Translate(job.source, ReachOf(box, box.source_stride, from), Reach::kRegistered);
  std::byte* target =
      memory.Translate(job.target, ReachOf(box, box.target_stride, to), Reach::kRegistered);
  if (source == nullptr || target == nullptr) return false;
  if (!OnDevice(device, job.source) || !OnDevice(device, job.target)) return false;
  if (!Count(job.target, job.source, BytesOf(box, to))) return false;
  kernels::Copy(target, source, box, from, to);
  return true;
}

bool Sum(int device, const ww_cuda_sum_job& job) {
  const StridedBox box = ToBox(job.box);
  const auto from = static_cast<Element>(job.from), to = static_cast<Element>(job.to);
  const Memory& memory = Global().memory;
  std::byte* source =
      memory.Translate(job.source, ReachOf(box, box.source_stride, from), Reach::kRegistered);
  std::byte* sum = memory.Translate(job.sum, sizeof(uint64_t), Reach::kRegistered);
  if (source == nullptr || sum == nullptr || !OnDevice(device, job.source)) return false;
  const uint64_t value = kernels::SumSource(source, box, from, to);
  std::memcpy(sum, &value, sizeof value);
  return true;
}

bool Quantize(const ww_cuda_quantize_job& job) {
  const auto from = static_cast<Element>(job.from);
  const kernels::QuantizeBox box{job.rows,
                                 job.columns,
                                 job.block_rows,
                                 job.block_columns,
                                 {job.source_stride[0], job.source_stride[1]},
                                 {job.target_stride[0], job.target_stride[1]},
                                 {job.scale_stride[0], job.scale_stride[1]},
                                 static_cast<kernels::ScaleKind>(job.scale)};
  const auto reach = [](int64_t rows, int64_t columns, const int64_t* stride, Element element) {
    return ReachOf({2, {rows, columns}, {stride[0], stride[1]}, {}}, stride, element);
  };
  const int64_t down = (job.rows - 1) / job.block_rows + 1;
  const int64_t across = (job.columns - 1) / job.block_columns + 1;
  const Memory& memory = Global().memory;
  const std::byte* source = memory.Translate(
      job.source, reach(job.rows, job.columns, job.source_stride, from), Reach::kRegistered);
  std::byte* codes = nullptr;
  if (job.codes != nullptr) {
    codes = memory.Translate(job.codes,
                             reach(job.rows, job.columns, job.target_stride, Element::kOpaque1),
                             Reach::kRegistered);
  }
  std::byte* scales = nullptr;
  if (job.scale_inv != nullptr) {
    const int bytes = kernels::ScaleBytes(box.scale, from);
    const auto stored = bytes == 1   ? Element::kOpaque1
                        : bytes == 2 ? Element::kOpaque2
                                     : Element::kF32;
    scales = memory.Translate(job.scale_inv, reach(down, across, job.scale_stride, stored),
                              Reach::kRegistered);
  }
  if (source == nullptr || (codes == nullptr) != (job.codes == nullptr) ||
      (scales == nullptr) != (job.scale_inv == nullptr)) {
    return false;
  }
  kernels::QuantizeE4M3(codes, scales, source, box, from);
  return true;
}

/// With the device's own code, thread by thread.
bool QuantizeFourBit(const ww_cuda_four_bit_job& job) {
  const auto from = static_cast<Element>(job.from);
  const auto kind = static_cast<kernels::FourBitKind>(job.kind);
  const auto at = [&](const void* pointer, int64_t columns, const int64_t* stride, int64_t bytes) {
    const int64_t last = (job.rows - 1) * stride[0] + (columns - 1) * stride[1];
    return reinterpret_cast<unsigned char*>(Global().memory.Translate(
        pointer, static_cast<size_t>((last + 1) * bytes), Reach::kRegistered));
  };
  const unsigned char* source =
      at(job.source, job.columns, job.source_stride, kernels::ElementBytes(from));
  unsigned char *codes = nullptr, *scales = nullptr;
  if (job.codes != nullptr) {
    codes = at(job.codes, job.columns / 2 / job.code_bytes, job.code_stride, job.code_bytes);
  }
  if (job.scales != nullptr) {
    scales = at(job.scales, job.columns / job.group, job.scale_stride,
                kernels::FourBitScaleBytes(kind, from));
  }
  if (source == nullptr || (codes == nullptr) != (job.codes == nullptr) ||
      (scales == nullptr) != (job.scales == nullptr)) {
    return false;
  }
  ww_cuda_four_bit_job here = job;
  here.codes = codes;
  here.scales = scales;
  here.source = source;
  kernels::RunFourBit(kernels::internal::MakeDeviceFourBit(here), 256);
  return true;
}

/// Streams in memory that is exactly as long as the caller has to make it.
struct DeltaMemory {
  std::byte *gaps, *steps, *escapes, *scratch;
  bool whole() const {
    return gaps != nullptr && steps != nullptr && escapes != nullptr && scratch != nullptr;
  }
};
template <typename Job>
DeltaMemory TranslateDelta(const Job& job, size_t gap_bytes, size_t changes, size_t escapes) {
  const auto order = static_cast<kernels::DeltaOrder>(job.order);
  const Memory& memory = Global().memory;
  const auto at = [&](const void* pointer, size_t bytes) {
    return memory.Translate(pointer, std::max<size_t>(bytes, 1), Reach::kRegistered);
  };
  return {
      at(job.gaps, gap_bytes), at(job.steps, changes),
      at(job.escapes, escapes * static_cast<size_t>(kernels::DeltaElementBytes(order))),
      at(job.scratch, static_cast<size_t>(ww_cuda_delta_scratch_bytes(job.order, job.elements)))};
}

size_t DeltaArrayBytes(int32_t order, int64_t elements) {
  return static_cast<size_t>(std::max<int64_t>(
      1, elements * kernels::DeltaElementBytes(static_cast<kernels::DeltaOrder>(order))));
}

kernels::DeltaStreams AsStreams(const DeltaMemory& at, size_t gap_bytes, size_t changes,
                                size_t escapes) {
  const auto u8 = [](std::byte* bytes) { return reinterpret_cast<uint8_t*>(bytes); };
  return {u8(at.gaps), u8(at.steps), u8(at.escapes), gap_bytes, changes, escapes};
}

bool DeltaScan(int device, const ww_cuda_delta_scan_job& job) {
  const Memory& memory = Global().memory;
  const size_t bytes = DeltaArrayBytes(job.order, job.elements);
  const auto elements = static_cast<size_t>(job.elements);
  const auto changes_max = static_cast<size_t>(job.changes_max);
  std::byte* base = memory.Translate(job.base, bytes, Reach::kRegistered);
  std::byte* now = memory.Translate(job.now, bytes, Reach::kRegistered);
  std::byte* copy =
      job.copy == nullptr ? nullptr : memory.Translate(job.copy, bytes, Reach::kRegistered);
  std::byte* counts = memory.Translate(job.counts, sizeof *job.counts, Reach::kRegistered);
  const size_t room = changes_max + kernels::kDeltaSlack;
  const DeltaMemory at =
      TranslateDelta(job, kernels::DeltaGapBytesMax(elements, changes_max), room, room);
  if (base == nullptr || now == nullptr || (copy == nullptr) != (job.copy == nullptr) ||
      counts == nullptr || !at.whole() || !OnDevice(device, job.base)) {
    return false;
  }
  kernels::DeltaStreams streams = AsStreams(at, 0, 0, 0);
  ww_cuda_delta_counts made{0, job.changes_max + 1, 0};
  if (kernels::DeltaScan(static_cast<kernels::DeltaOrder>(job.order), base, now, elements,
                         changes_max, streams, copy)) {
    made = {static_cast<int64_t>(streams.gap_bytes), static_cast<int64_t>(streams.changes),
            static_cast<int64_t>(streams.escape_count)};
  }
  std::memcpy(counts, &made, sizeof made);
  return true;
}

bool DeltaApply(int device, const ww_cuda_delta_apply_job& job) {
  const Memory& memory = Global().memory;
  const auto gap_bytes = static_cast<size_t>(job.counts.gap_bytes);
  const auto changes = static_cast<size_t>(job.counts.changes);
  const auto escapes = static_cast<size_t>(job.counts.escapes);
  std::byte* target =
      memory.Translate(job.target, DeltaArrayBytes(job.order, job.elements), Reach::kRegistered);
  std::byte* applied = memory.Translate(job.applied, sizeof *job.applied, Reach::kRegistered);
  const DeltaMemory at = TranslateDelta(job, gap_bytes, changes, escapes);
  if (target == nullptr || applied == nullptr || !at.whole() || !OnDevice(device, job.target)) {
    return false;
  }
  const uint32_t made = kernels::DeltaApply(static_cast<kernels::DeltaOrder>(job.order), target,
                                            static_cast<size_t>(job.elements),
                                            AsStreams(at, gap_bytes, changes, escapes))
                            ? 1
                            : 0;
  std::memcpy(applied, &made, sizeof made);
  return true;
}

/// Why the library would refuse a job; null: it takes it.
template <typename Job>
const char* DeltaDefect(const Job& job) {
  const bool known = job.order >= 0 && job.order < kernels::kDeltaOrders && job.elements >= 0;
  return known ? nullptr : "the order or the elements are unknown";
}
template <typename Job>
const char* CopyDefect(const Job& job) {
  const auto from = static_cast<Element>(job.from), to = static_cast<Element>(job.to);
  const bool known = kernels::CastKnown(from, to) && Aligned(job.source, from);
  return known ? nullptr : "a cast is unknown or a source not aligned";
}

template <typename Job>
int32_t Enqueue(int32_t device, const char* what, ww_cuda_stream stream, const Job* jobs,
                size_t count, const char* (*defect)(const Job&), bool (*run)(int, const Job&)) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, what)) return bad;
  for (size_t i = 0; i < count; ++i) {
    if (const char* why = defect(jobs[i])) return Fail(WW_CUDA_INVALID, what, why);
  }
  for (size_t i = 0; i < count; ++i) {
    AsStream(stream)->tasks.push_back(
        [number = Number(device), job = jobs[i], run] { return run(number, job); });
  }
  return WW_CUDA_OK;
}

}  // namespace
}  // namespace weightwire::fake_cuda

using namespace weightwire::fake_cuda;  // NOLINT: the interface itself has no namespace

extern "C" {

void fake_cuda_read(const void* device_memory, void* into, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  const std::byte* at = Global().memory.Translate(device_memory, bytes, Reach::kDevice);
  if (at == nullptr) std::abort();
  std::memcpy(into, at, bytes);
}

void fake_cuda_write(void* device_memory, const void* from, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  std::byte* at = Global().memory.Translate(device_memory, bytes, Reach::kDevice);
  if (at == nullptr) std::abort();
  std::memcpy(at, from, bytes);
}

void fake_cuda_write_late(void* device_memory, const void* from, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  const Memory& memory = Global().memory;
  if (memory.Translate(device_memory, bytes, Reach::kDevice) == nullptr) std::abort();
  const auto* first = static_cast<const std::byte*>(from);
  Global().late.push_back({*memory.DeviceOf(device_memory), device_memory, {first, first + bytes}});
}

uint64_t fake_cuda_flushes(void) {
  std::lock_guard lock(Global().mutex);
  return Global().flushes;
}

uint64_t fake_cuda_bytes_allocated(void) {
  std::lock_guard lock(Global().mutex);
  return Global().memory.total(false);
}

uint64_t fake_cuda_bytes_opened(void) {
  std::lock_guard lock(Global().mutex);
  return Global().memory.total(true);
}

uint64_t fake_cuda_host_bytes(void) {
  std::lock_guard lock(Global().mutex);
  return Global().host_bytes;
}

int32_t fake_cuda_adopt(int32_t device, void* memory, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  if (Enter(device, "fake_cuda_adopt") != WW_CUDA_OK) return 0;
  return Global().memory.Adopt(Number(device), memory, bytes) ? 1 : 0;
}

int32_t fake_cuda_forget(void* memory) {
  std::lock_guard lock(Global().mutex);
  return Global().memory.Forget(memory) ? 1 : 0;
}

void* fake_cuda_alias(void* device_memory, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  return Global().memory.Translate(device_memory, bytes, Memory::Reach::kDevice);
}

uint64_t fake_cuda_launches(void) {
  std::lock_guard lock(Global().mutex);
  return Global().launches;
}

uint64_t fake_cuda_registered(void) {
  std::lock_guard lock(Global().mutex);
  return Global().memory.registered();
}

void fake_cuda_fail(const char* name, uint32_t calls) {
  std::lock_guard lock(Global().mutex);
  Global().faults[name] = calls;
}

uint32_t ww_cuda_abi_version(void) { return WW_CUDA_ABI_VERSION; }
const char* ww_cuda_error(void) { return last_error.c_str(); }

int32_t ww_cuda_device_count(int32_t* count) {
  std::lock_guard lock(Global().mutex);
  *count = static_cast<int32_t>(Global().devices.size());
  return *count > 0 ? WW_CUDA_OK : Enter(0, "ww_cuda_device_count");
}

int32_t ww_cuda_device_use(int32_t device) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_device_use")) return bad;
  current_device = device;
  return WW_CUDA_OK;
}

int32_t fake_cuda_index_of(const void* memory) {
  std::lock_guard lock(Global().mutex);
  const auto number = Global().memory.DeviceOf(memory);
  const auto& devices = Global().devices;
  const auto found = number ? std::ranges::find(devices, *number) : devices.end();
  return found == devices.end() ? -1 : static_cast<int32_t>(found - devices.begin());
}

int32_t fake_cuda_current_device(void) { return current_device; }

int32_t ww_cuda_device_uuid(int32_t device, uint8_t* uuid) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_device_uuid")) return bad;
  std::memset(uuid, 0xfa, WW_CUDA_UUID_BYTES);
  uuid[WW_CUDA_UUID_BYTES - 1] = static_cast<uint8_t>(Number(device));
  return WW_CUDA_OK;
}

int32_t ww_cuda_alloc(int32_t device, size_t bytes, void** memory) {
  std::lock_guard lock(Global().mutex);
  *memory = nullptr;
  if (int32_t bad = Enter(device, "ww_cuda_alloc")) return bad;
  if (bytes == 0) return Fail(WW_CUDA_INVALID, "ww_cuda_alloc", "0 bytes");
  const uint64_t used = Global().memory.allocated(Number(device));
  if (bytes > Global().bytes_each - std::min(used, Global().bytes_each)) {
    return Fail(WW_CUDA_NO_MEMORY, "ww_cuda_alloc", "the device has not so much memory left");
  }
  *memory = Global().memory.Allocate(Number(device), bytes);
  return *memory != nullptr ? WW_CUDA_OK
                            : Fail(WW_CUDA_NO_MEMORY, "ww_cuda_alloc", "the host has none");
}

int32_t ww_cuda_free(int32_t device, void* memory) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_free")) return bad;
  return Done(Global().memory.Release(memory, false), "ww_cuda_free", "no allocation begins there");
}

int32_t ww_cuda_ipc_export(int32_t device, void* memory, uint8_t* handle) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_ipc_export")) return bad;
  return Done(Global().memory.Export(Number(device), memory, handle), "ww_cuda_ipc_export",
              "no allocation begins there");
}

int32_t ww_cuda_ipc_open(int32_t device, const uint8_t* handle, void** memory) {
  std::lock_guard lock(Global().mutex);
  *memory = nullptr;
  if (int32_t bad = Enter(device, "ww_cuda_ipc_open")) return bad;
  *memory = Global().memory.Open(Number(device), handle);
  return *memory != nullptr
             ? WW_CUDA_OK
             : Fail(WW_CUDA_FAILED, "ww_cuda_ipc_open",
                    "the handle is one's own, open already, of another device, or of nobody");
}

int32_t ww_cuda_ipc_close(int32_t device, void* memory) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_ipc_close")) return bad;
  return Done(Global().memory.Release(memory, true), "ww_cuda_ipc_close",
              "no mapping begins there");
}

int32_t ww_cuda_ipc_bytes(int32_t device, const void* memory, size_t* bytes) {
  std::lock_guard lock(Global().mutex);
  *bytes = 0;
  if (int32_t bad = Enter(device, "ww_cuda_ipc_bytes")) return bad;
  *bytes = Global().memory.SizeOf(memory);
  return Done(*bytes > 0, "ww_cuda_ipc_bytes", "no allocation begins there");
}

int32_t ww_cuda_peer_enable(int32_t device, int32_t peer) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_peer_enable")) return bad;
  return Enter(peer, "ww_cuda_peer_enable");
}

int32_t ww_cuda_host_register(void* memory, size_t bytes) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(0, "ww_cuda_host_register")) return bad;
  return Done(Global().memory.Register(memory, bytes), "ww_cuda_host_register",
              "registered already, or no host's");
}

int32_t ww_cuda_host_unregister(void* memory) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(0, "ww_cuda_host_unregister")) return bad;
  return Done(Global().memory.Unregister(memory), "ww_cuda_host_unregister", "not registered");
}

int32_t ww_cuda_flush_writes(int32_t device) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_flush_writes")) return bad;
  ++Global().flushes;
  std::erase_if(Global().late, [number = Number(device)](const LateWrite& write) {
    if (write.device != number) return false;
    std::byte* to = Global().memory.Translate(write.target, write.bytes.size(), Reach::kDevice);
    if (to != nullptr) std::memcpy(to, write.bytes.data(), write.bytes.size());  // else: freed
    return true;
  });
  return WW_CUDA_OK;
}

int32_t ww_cuda_stream_create(int32_t device, ww_cuda_stream* stream) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_stream_create")) return bad;
  *stream = new Stream();
  return WW_CUDA_OK;
}

int32_t ww_cuda_stream_destroy(int32_t device, ww_cuda_stream stream) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_stream_destroy")) return bad;
  RunUntil(*AsStream(stream), AsStream(stream)->tasks.size());
  delete AsStream(stream);
  return WW_CUDA_OK;
}

int32_t ww_cuda_event_create(int32_t device, ww_cuda_event* event) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_event_create")) return bad;
  *event = new Event();
  return WW_CUDA_OK;
}

int32_t ww_cuda_event_destroy(int32_t device, ww_cuda_event event) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_event_destroy")) return bad;
  delete AsEvent(event);
  return WW_CUDA_OK;
}

int32_t ww_cuda_event_record(int32_t device, ww_cuda_event event, ww_cuda_stream stream) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_event_record")) return bad;
  *AsEvent(event) = {AsStream(stream), AsStream(stream)->tasks.size()};
  return WW_CUDA_OK;
}

int32_t ww_cuda_event_query(int32_t device, ww_cuda_event event) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_event_query")) return bad;
  const Event& at = *AsEvent(event);
  return at.stream == nullptr || at.stream->done >= at.place ? WW_CUDA_OK : WW_CUDA_NOT_READY;
}

int32_t ww_cuda_event_wait(int32_t device, ww_cuda_event event) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_event_wait")) return bad;
  const Event& at = *AsEvent(event);
  if (at.stream != nullptr) RunUntil(*at.stream, at.place);
  return Enter(device, "ww_cuda_event_wait (what was enqueued)");
}

int32_t ww_cuda_stream_wait(int32_t device, ww_cuda_stream stream, ww_cuda_event event) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_stream_wait")) return bad;
  AsStream(stream)->tasks.push_back([at = *AsEvent(event)] {
    if (at.stream != nullptr) RunUntil(*at.stream, at.place);
    return true;
  });
  return WW_CUDA_OK;
}

int32_t ww_cuda_copy_bytes(int32_t device, ww_cuda_stream stream, void* target, const void* source,
                           size_t bytes) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_copy_bytes")) return bad;
  AsStream(stream)->tasks.push_back([target, source, bytes] {
    std::byte* to = Global().memory.Translate(target, bytes, Reach::kAnyHost);
    const std::byte* from = Global().memory.Translate(source, bytes, Reach::kAnyHost);
    if (to == nullptr || from == nullptr || !Count(target, source, bytes)) return false;
    std::memmove(to, from, bytes);
    return true;
  });
  return WW_CUDA_OK;
}

int32_t ww_cuda_copy(int32_t device, ww_cuda_stream stream, const ww_cuda_copy_job* jobs,
                     size_t count) {
  std::lock_guard lock(Global().mutex);
  for (size_t i = 0; i < count; ++i) {
    if (!Aligned(jobs[i].target, static_cast<Element>(jobs[i].to))) {
      return Fail(WW_CUDA_INVALID, "ww_cuda_copy", "a target is null or not aligned");
    }
  }
  ++Global().launches;
  return Enqueue(device, "ww_cuda_copy", stream, jobs, count, &CopyDefect, &Copy);
}

int32_t ww_cuda_sum(int32_t device, ww_cuda_stream stream, const ww_cuda_sum_job* jobs,
                    size_t count) {
  return Enqueue(device, "ww_cuda_sum", stream, jobs, count, &CopyDefect, &Sum);
}

int32_t ww_cuda_quantize(int32_t device, ww_cuda_stream stream, const ww_cuda_quantize_job* jobs,
                         size_t count) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_quantize")) return bad;
  for (size_t i = 0; i < count; ++i) {
    const auto from = static_cast<Element>(jobs[i].from);
    const bool made = jobs[i].codes != nullptr || jobs[i].scale_inv != nullptr;
    const bool floats = from == Element::kBF16 || from == Element::kF16 || from == Element::kF32;
    if (!made || !floats || !Aligned(jobs[i].source, from)) {
      return Fail(WW_CUDA_INVALID, "ww_cuda_quantize", "nothing is made, or of no floats");
    }
  }
  for (size_t i = 0; i < count; ++i) {
    AsStream(stream)->tasks.push_back([job = jobs[i]] { return Quantize(job); });
  }
  return WW_CUDA_OK;
}

int32_t ww_cuda_quantize_four_bit(int32_t device, ww_cuda_stream stream,
                                  const ww_cuda_four_bit_job* jobs, size_t count) {
  std::lock_guard lock(Global().mutex);
  if (int32_t bad = Enter(device, "ww_cuda_quantize_four_bit")) return bad;
  for (size_t i = 0; i < count; ++i) {
    const ww_cuda_four_bit_job& job = jobs[i];
    const auto from = static_cast<Element>(job.from);
    const bool floats = from == Element::kBF16 || from == Element::kF16 || from == Element::kF32;
    const bool whole = job.group >= 8 && job.group <= 256 && job.group % 8 == 0 && job.rows > 0 &&
                       job.columns > 0 && job.columns % job.group == 0;
    const bool made = job.codes != nullptr || job.scales != nullptr;
    const bool units = job.code_bytes == 1 || job.code_bytes == 4;
    if (!made || !whole || !units || !floats || !Aligned(job.source, from)) {
      return Fail(WW_CUDA_INVALID, "ww_cuda_quantize_four_bit", "nothing is made, or of no groups");
    }
  }
  for (size_t i = 0; i < count; ++i) {
    AsStream(stream)->tasks.push_back([job = jobs[i]] { return QuantizeFourBit(job); });
  }
  return WW_CUDA_OK;
}

/// More than the real one: nobody gets by with a formula of their own.
int64_t ww_cuda_delta_scratch_bytes(int32_t order, int64_t elements) {
  return order < 0 || order >= weightwire::kernels::kDeltaOrders || elements < 0
             ? 0
             : 64 + elements / 8 * 8;
}

int32_t ww_cuda_delta_scan(int32_t device, ww_cuda_stream stream,
                           const ww_cuda_delta_scan_job* jobs, size_t count) {
  return Enqueue(device, "ww_cuda_delta_scan", stream, jobs, count, &DeltaDefect, &DeltaScan);
}

int32_t ww_cuda_delta_apply(int32_t device, ww_cuda_stream stream,
                            const ww_cuda_delta_apply_job* jobs, size_t count) {
  return Enqueue(device, "ww_cuda_delta_apply", stream, jobs, count, &DeltaDefect, &DeltaApply);
}
}
