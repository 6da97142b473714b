#include "server/transfer/notify.h"

#include <string>
#include <type_traits>

// A head of 32 bytes, then a body whose size follows from the type. All integers little-endian.
//
//   0 u8 version   1 u8 type   2 u16 flags (bit 0: maps; only in OPEN)   4 u32 stream
//   8 u64 epoch   16 u64 plan_low   24 u32 source   28 u32 reader
//   OPEN     32 u64 plan_high   40 u64 segment_bytes_max   48 u64 slot_bytes
//   BINDING  32 u64 binding.id   40 u64 binding.generation   48 u64 sums.id
//            56 u64 sums.generation
//   READY    32 u64 memory.id   40 u64 memory.generation   48 u64 offset (bit 63: changed)
//            56 u32 slot
//   CREDIT   32 u32 slot   36 u64 bytes_kept
//   CLOSE, FAIL   32 u32 code   36 u32 reason
//   DELTA    32 u64 memory.id   40 u64 memory.generation   48 u32 newest bytes   52 u32 bytes
//            56 u32 slot
namespace weightwire::transfer {
namespace {

constexpr size_t kHeadBytes = 32;
constexpr uint16_t kMapsFlag = 1;
// Not one of `flags`: readers of an older build, which know nothing of it, do not look at `offset`.
constexpr uint64_t kChangedBit = uint64_t{1} << 63;
constexpr uint32_t kCodeMax = static_cast<uint32_t>(Code::kUnauthenticated);

size_t BodyBytes(NotifyType type) {
  switch (type) {
    case NotifyType::kOpen:
      return 24;
    case NotifyType::kBinding:
      return 32;
    case NotifyType::kReady:
      return 28;
    case NotifyType::kCredit:
      return 12;
    case NotifyType::kClose:
      return 8;
    case NotifyType::kFail:
      return 8;
    case NotifyType::kWaiting:
      return 4;
    case NotifyType::kDelta:
      return 28;
  }
  return 0;
}

class Writer {
 public:
  explicit Writer(NotifyBytes* out) : out_(out) {}
  template <typename T>
  void Put(T value) {
    static_assert(std::is_unsigned_v<T>);
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_->data[out_->size++] = static_cast<std::byte>((uint64_t{value} >> (8 * i)) & 0xff);
    }
  }
  void Put(transport::RegionKey key) {
    Put(key.id);
    Put(key.generation);
  }

 private:
  NotifyBytes* out_;
};

// The size was checked before anything is taken.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T Take() {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value |= std::to_integer<uint64_t>(bytes_[at_++]) << (8 * i);
    }
    return static_cast<T>(value);
  }
  transport::RegionKey TakeKey() {
    transport::RegionKey key;
    key.id = Take<uint64_t>();
    key.generation = Take<uint64_t>();
    return key;
  }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

Status Unknown(const char* what, uint64_t value) {
  return Status(Code::kInvalidArgument, Reason::kUnknownEnum,
                std::string("notify: unknown ") + what + " " + std::to_string(value));
}
Status Malformed(const char* what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::string("notify: ") + what);
}

Status TakeVerdict(Reader& reader, Notify* out) {
  const auto code = reader.Take<uint32_t>();
  const auto reason = reader.Take<uint32_t>();
  if (code > kCodeMax) return Unknown("code", code);
  const auto known =
      reason <= INT32_MAX ? ReasonFromNumber(static_cast<int>(reason)) : std::nullopt;
  if (!known) return Unknown("reason", reason);
  out->code = static_cast<Code>(code);
  out->reason = *known;
  return OkStatus();
}

Status TakeBody(Reader& reader, Notify* out) {
  switch (out->type) {
    case NotifyType::kOpen:
      out->plan_high = reader.Take<uint64_t>();
      out->segment_bytes_max = reader.Take<uint64_t>();
      out->slot_bytes = reader.Take<uint64_t>();
      return OkStatus();
    case NotifyType::kBinding:
      out->binding = reader.TakeKey();
      out->sums = reader.TakeKey();
      return OkStatus();
    case NotifyType::kReady:
      out->memory = reader.TakeKey();
      out->offset = reader.Take<uint64_t>();
      out->changed = (out->offset & kChangedBit) != 0;
      out->offset &= ~kChangedBit;
      out->slot = reader.Take<uint32_t>();
      return OkStatus();
    case NotifyType::kCredit:
      out->slot = reader.Take<uint32_t>();
      out->bytes_kept = reader.Take<uint64_t>();
      return OkStatus();
    case NotifyType::kClose:
    case NotifyType::kFail:
      return TakeVerdict(reader, out);
    case NotifyType::kWaiting:
      out->slot = reader.Take<uint32_t>();
      return OkStatus();
    case NotifyType::kDelta:
      out->memory = reader.TakeKey();
      out->delta_newest_bytes = reader.Take<uint32_t>();
      out->delta_bytes = reader.Take<uint32_t>();
      out->slot = reader.Take<uint32_t>();
      if (out->delta_newest_bytes > out->delta_bytes) return Malformed("more new than all bytes");
      return OkStatus();
  }
  return Unknown("type", static_cast<uint64_t>(out->type));
}

}  // namespace

std::string_view NotifyTypeName(NotifyType type) {
  switch (type) {
    case NotifyType::kOpen:
      return "open";
    case NotifyType::kBinding:
      return "binding";
    case NotifyType::kReady:
      return "ready";
    case NotifyType::kCredit:
      return "credit";
    case NotifyType::kClose:
      return "close";
    case NotifyType::kFail:
      return "fail";
    case NotifyType::kWaiting:
      return "waiting";
    case NotifyType::kDelta:
      return "delta";
  }
  return "unknown";
}

NotifyBytes EncodeNotify(const Notify& notify) {
  NotifyBytes out;
  Writer writer(&out);
  writer.Put(kNotifyVersion);
  writer.Put(static_cast<uint8_t>(notify.type));
  const bool maps = notify.type == NotifyType::kOpen && notify.maps;
  writer.Put(maps ? kMapsFlag : uint16_t{0});
  writer.Put(notify.key.stream);
  writer.Put(notify.key.epoch.value);
  writer.Put(notify.key.plan_low);
  writer.Put(notify.key.source.value);
  writer.Put(notify.key.reader.value);
  switch (notify.type) {
    case NotifyType::kOpen:
      writer.Put(notify.plan_high);
      writer.Put(notify.segment_bytes_max);
      writer.Put(notify.slot_bytes);
      break;
    case NotifyType::kBinding:
      writer.Put(notify.binding);
      writer.Put(notify.sums);
      break;
    case NotifyType::kReady:
      writer.Put(notify.memory);
      writer.Put(notify.offset | (notify.changed ? kChangedBit : 0));
      writer.Put(notify.slot);
      break;
    case NotifyType::kCredit:
      writer.Put(notify.slot);
      writer.Put(notify.bytes_kept);
      break;
    case NotifyType::kClose:
    case NotifyType::kFail:
      writer.Put(static_cast<uint32_t>(notify.code));
      writer.Put(static_cast<uint32_t>(notify.reason));
      break;
    case NotifyType::kWaiting:
      writer.Put(notify.slot);
      break;
    case NotifyType::kDelta:
      writer.Put(notify.memory);
      writer.Put(notify.delta_newest_bytes);
      writer.Put(notify.delta_bytes);
      writer.Put(notify.slot);
      break;
  }
  return out;
}

Result<Notify> DecodeNotify(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeadBytes) return Fail(Malformed("shorter than its head"));
  Reader reader(bytes);
  const auto version = reader.Take<uint8_t>();
  if (version != kNotifyVersion) {
    return Fail(Code::kFailedPrecondition, Reason::kProtocolVersion,
                "notify: version " + std::to_string(version) + ", this build speaks " +
                    std::to_string(kNotifyVersion));
  }
  Notify out;
  out.type = static_cast<NotifyType>(reader.Take<uint8_t>());
  const size_t body_bytes = BodyBytes(out.type);
  if (body_bytes == 0) return Fail(Unknown("type", static_cast<uint64_t>(out.type)));
  if (bytes.size() != kHeadBytes + body_bytes) return Fail(Malformed("wrong size for its type"));
  const auto flags = reader.Take<uint16_t>();
  const uint16_t allowed = out.type == NotifyType::kOpen ? kMapsFlag : uint16_t{0};
  if ((flags & ~allowed) != 0) return Fail(Malformed("reserved flags are set"));
  out.maps = (flags & kMapsFlag) != 0;
  out.key.stream = reader.Take<uint32_t>();
  out.key.epoch = Epoch(reader.Take<uint64_t>());
  out.key.plan_low = reader.Take<uint64_t>();
  out.key.source = ParticipantId(reader.Take<uint32_t>());
  out.key.reader = ParticipantId(reader.Take<uint32_t>());
  WW_FAIL_IF_ERROR(TakeBody(reader, &out));
  return out;
}

}  // namespace weightwire::transfer
