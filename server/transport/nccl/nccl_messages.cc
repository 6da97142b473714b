// kind 1 | notify: the user's bytes
//        | form: lane 4 | buffer bytes 8 | unique id 128
//        | request: lane 4 | frame 64
#include "server/transport/nccl/nccl_messages.h"

#include <algorithm>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

enum class Kind : uint8_t { kNotify = 0, kForm = 1, kRequest = 2 };

std::vector<std::byte> Begin(Kind kind, size_t bytes) {
  std::vector<std::byte> message(1 + bytes);
  message[0] = static_cast<std::byte>(kind);
  return message;
}

tl::unexpected<Status> Garbage(const char* what) {
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest, what);
}

Result<NcclMessage> DecodeForm(std::span<const std::byte> bytes) {
  NcclForm form;
  if (bytes.size() != 4 + 8 + form.unique_id.size()) return Garbage("a form of a wrong size");
  LittleEndianReader reader(bytes);
  form.lane = reader.Take<uint32_t>();
  form.buffer_bytes = reader.Take<uint64_t>();
  reader.TakeBytes(form.unique_id);
  if (form.lane >= kNcclLanesMax || form.buffer_bytes == 0) return Garbage("a form of no lane");
  return form;
}

Result<NcclMessage> DecodeRequest(std::span<const std::byte> bytes) {
  if (bytes.size() != 4 + kFrameBytes) return Garbage("a request of a wrong size");
  NcclRequest request;
  request.lane = LittleEndianReader(bytes).Take<uint32_t>();
  WW_ASSIGN(request.frame, DecodeFrame(bytes.subspan(4).first<kFrameBytes>()));
  const FrameType type = request.frame.type;
  if (request.lane >= kNcclLanesMax || (type != FrameType::kGet && type != FrameType::kGetReply)) {
    return Garbage("a request of no lane, or of another transport");
  }
  return request;
}

}  // namespace

bool IsNotify(std::span<const std::byte> bytes) {
  return !bytes.empty() && static_cast<Kind>(bytes[0]) == Kind::kNotify;
}

std::vector<std::byte> EncodeNotify(std::span<const std::byte> message) {
  std::vector<std::byte> out = Begin(Kind::kNotify, message.size());
  std::ranges::copy(message, out.begin() + 1);
  return out;
}

std::vector<std::byte> Encode(const NcclForm& form) {
  std::vector<std::byte> out = Begin(Kind::kForm, 4 + 8 + form.unique_id.size());
  LittleEndianWriter writer{std::span(out).subspan(1)};
  writer.Put(form.lane);
  writer.Put(form.buffer_bytes);
  writer.PutBytes(form.unique_id);
  return out;
}

std::vector<std::byte> Encode(const NcclRequest& request) {
  std::vector<std::byte> out = Begin(Kind::kRequest, 4 + kFrameBytes);
  LittleEndianWriter{std::span(out).subspan(1)}.Put(request.lane);
  EncodeFrame(request.frame, std::span(out).subspan(5).first<kFrameBytes>());
  return out;
}

Result<NcclMessage> DecodeNcclMessage(std::span<const std::byte> bytes) {
  if (bytes.empty()) return Garbage("an empty message");
  const auto rest = bytes.subspan(1);
  switch (static_cast<Kind>(bytes[0])) {
    case Kind::kNotify:
      if (rest.size() > kNotifyBytesMax) return Garbage("a notify of over 64 bytes");
      return NcclNotify(rest.begin(), rest.end());
    case Kind::kForm:
      return DecodeForm(rest);
    case Kind::kRequest:
      return DecodeRequest(rest);
  }
  return Garbage("an unknown message");
}

}  // namespace weightwire::transport
