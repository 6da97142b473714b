#include "server/device/uuid.h"

#include <charconv>

namespace weightwire::device {
namespace {

constexpr std::string_view kPrefix = "GPU-";
constexpr size_t kTextBytes = 40;

bool IsDash(size_t byte) { return byte == 4 || byte == 6 || byte == 8 || byte == 10; }

}  // namespace

std::string ToString(const Uuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(kPrefix);
  for (size_t i = 0; i < uuid.bytes.size(); ++i) {
    if (IsDash(i)) text += '-';
    text += kDigits[uuid.bytes[i] >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return text;
}

std::string ShortName(const Uuid& uuid) {
  constexpr size_t kShortNameBytes = 8;
  const std::string name = ToString(uuid);
  return name.substr(name.size() - kShortNameBytes);
}

Result<Uuid> ParseUuid(std::string_view text) {
  const auto malformed = [text] {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       std::string(text.substr(0, kTextBytes)) + " names no GPU")
                    .Remedy("name it by its UUID, as `nvidia-smi -L` has it: GPU-8932f937-…"));
  };
  if (text.size() != kTextBytes || !text.starts_with(kPrefix)) return malformed();
  Uuid uuid;
  const char* at = text.data() + kPrefix.size();
  for (size_t i = 0; i < uuid.bytes.size(); ++i) {
    if (IsDash(i) && *at++ != '-') return malformed();
    if (std::from_chars(at, at + 2, uuid.bytes[i], 16).ptr != at + 2) return malformed();
    at += 2;
  }
  return uuid;
}

}  // namespace weightwire::device
