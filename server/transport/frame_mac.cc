// The key of a direction of a socket is HMAC(session key, label | sender | socket), cut to 16
// bytes. A nonce is 0 ×4 | unit 8. GMAC is GCM of no text, with all bytes as additional data:
// `openssl speed` of OpenSSL 3.0 on a Xeon gives 10 GB/s, and an HMAC-SHA256 2.
#include "server/transport/frame_mac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <limits>

#include "server/transport/little_endian.h"
#include "server/transport/proof.h"

namespace weightwire::transport {
namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kAddBytesMax = size_t{1} << 30;  // of one call: OpenSSL counts in int

const unsigned char* Raw(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

Proof KeyOf(const Proof& session, Sender sender, uint32_t socket) {
  std::array<std::byte, 5> direction;
  LittleEndianWriter writer(direction);
  writer.Put(static_cast<uint8_t>(sender));
  writer.Put(socket);
  return KeyedProof(session, "weightwire frames", direction);
}

}  // namespace

void FrameMac::Free::operator()(evp_cipher_ctx_st* context) const { EVP_CIPHER_CTX_free(context); }

FrameMac::FrameMac(const Proof& key, Sender sender, uint32_t socket)
    : context_(EVP_CIPHER_CTX_new()) {
  const Proof own = KeyOf(key, sender, socket);
  WW_CHECK(context_ != nullptr && EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr,
                                                     own.data(), nullptr) == 1);
  Begin();
}

void FrameMac::Begin() {
  WW_CHECK(unit_ < std::numeric_limits<uint64_t>::max());
  std::array<std::byte, kNonceBytes> nonce{};
  LittleEndianWriter(std::span(nonce).last(8)).Put(unit_++);
  WW_CHECK(EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr, Raw(nonce)) == 1);
}

void FrameMac::Add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto some = bytes.first(std::min(bytes.size(), kAddBytesMax));
    int ignored = 0;
    WW_CHECK(EVP_EncryptUpdate(context_.get(), nullptr, &ignored, Raw(some),
                               static_cast<int>(some.size())) == 1);
    bytes = bytes.subspan(some.size());
  }
}

FrameTag FrameMac::Seal() {
  FrameTag tag;
  unsigned char no_text[1];
  int ignored = 0;
  WW_CHECK(EVP_EncryptFinal_ex(context_.get(), no_text, &ignored) == 1 &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag.data()) == 1);
  Begin();
  return tag;
}

bool FrameMac::Fits(std::span<const std::byte, kTagBytes> tag) {
  return CRYPTO_memcmp(Seal().data(), tag.data(), kTagBytes) == 0;
}

FrameMacs::FrameMacs(const Proof& key, Sender self, uint32_t socket)
    : out(key, self, socket),
      in(key, self == Sender::kCaller ? Sender::kCallee : Sender::kCaller, socket) {}

}  // namespace weightwire::transport
