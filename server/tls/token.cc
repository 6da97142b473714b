#include "server/tls/token.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <span>
#include <sstream>

namespace weightwire::tls {
namespace {

constexpr std::string_view kForm = "ww1";
constexpr size_t kIdBytes = 16;
constexpr size_t kMacBytes = 32;
constexpr size_t kTokenBytesMax = 1'024;

Status Bad(const std::string& what) {
  return Status(Code::kUnauthenticated, Reason::kPermissionDenied, "the job token " + what)
      .Remedy("make one with `wwctl token`, and name its file in token_file");
}

std::string Hex(std::span<const uint8_t> bytes) {
  std::string out;
  for (uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string MacOf(const std::string& key, std::string_view message) {
  std::array<uint8_t, kMacBytes> mac;
  WW_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                reinterpret_cast<const unsigned char*>(message.data()), message.size(), mac.data(),
                nullptr) != nullptr);
  return Hex(mac);
}

bool IsHex(std::string_view text, size_t bytes) {
  return text.size() == 2 * bytes && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

}  // namespace

Result<Token> ParseToken(std::string_view text) {
  if (text.size() > kTokenBytesMax) return Fail(Bad("is too long"));
  const std::vector<std::string_view> parts = Split(text, ';');
  if (parts.size() != 5 || parts[0] != kForm || !IsHex(parts[3], kIdBytes) ||
      !IsHex(parts[4], kMacBytes)) {
    return Fail(Bad("has not the form ww1;<identity>;<expires>;<id>;<mac>"));
  }
  Token out;
  WW_ASSIGN(out.identity, ParseIdentity(parts[1], Ranges::kAllowed));
  const std::string_view expires = parts[2];
  const auto [end, error] =
      std::from_chars(expires.data(), expires.data() + expires.size(), out.expires_s);
  if (error != std::errc() || end != expires.data() + expires.size() || out.expires_s <= 0) {
    return Fail(Bad("says no time until which it holds"));
  }
  out.id = parts[3];
  return out;
}

Result<std::string> TokenFile::Text() {
  WW_ASSIGN(const std::string text, file_.Read());
  return std::string(Trimmed(text));
}

Result<std::vector<std::string>> TokenKeys::Keys() {
  WW_ASSIGN(const std::string text, file_.Read());
  std::vector<std::string> keys;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::string_view key = Trimmed(line);
    if (key.empty()) continue;
    if (key.size() < kTokenKeyBytesMin) {
      return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                         file_.path() + " has a key of fewer than 32 characters")
                      .Remedy("make one with `openssl rand -hex 32`"));
    }
    keys.emplace_back(key);
  }
  if (keys.empty()) {
    return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid, file_.path() + " is empty")
                    .Remedy("make a key with `openssl rand -hex 32`"));
  }
  return keys;
}

Status TokenKeys::Check() {
  auto keys = Keys();
  return keys ? OkStatus() : std::move(keys.error());
}

Result<std::string> TokenKeys::Mint(const Identity& identity, int64_t expires_s) {
  WW_ASSIGN(const std::vector<std::string> keys, Keys());
  std::array<uint8_t, kIdBytes> id;
  WW_CHECK(getrandom(id.data(), id.size(), 0) == static_cast<ssize_t>(id.size()));
  const std::string claims = std::string(kForm) + ";" + identity.Uri() + ";" +
                             std::to_string(expires_s) + ";" + Hex(id) + ";";
  return claims + MacOf(keys.front(), claims);
}

Result<Token> TokenKeys::Verify(std::string_view text, int64_t now_s) {
  WW_ASSIGN(const Token token, ParseToken(text));
  WW_ASSIGN(const std::vector<std::string> keys, Keys());
  const std::string_view claims = text.substr(0, text.size() - 2 * kMacBytes);
  const std::string_view mac = text.substr(claims.size());
  const bool signed_here = std::ranges::any_of(keys, [&](const std::string& key) {
    return CRYPTO_memcmp(MacOf(key, claims).data(), mac.data(), mac.size()) == 0;
  });
  if (!signed_here) return Fail(Bad("was not signed with this coordinator's token_key"));
  if (token.expires_s <= now_s) return Fail(TokenExpired(token));
  return token;
}

int64_t WallSecondsNow() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Status TokenExpired(const Token& token) {
  return Bad("of " + token.identity.Uri() + " has expired");
}

}  // namespace weightwire::tls
