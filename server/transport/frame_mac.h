#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "server/transport/session.h"

struct evp_cipher_ctx_st;

namespace weightwire::transport {

/// The side of a session that a MAC's bytes come from.
enum class Sender : uint8_t { kCaller = 1, kCallee = 2 };

inline constexpr size_t kTagBytes = 16;
using FrameTag = std::array<std::byte, kTagBytes>;

/// Seals, or checks, what one side sends on one socket: unit by unit, each a frame or the payload
/// behind one. A tag is the GMAC (AES-128) of its unit with the unit's number as nonce, which both
/// sides count and nobody sends. So a unit that was changed, left out, repeated, or is of another
/// place, direction, socket or session does not fit.
///
/// Not thread-safe.
class FrameMac {
 public:
  /// `key` is that of the session's handshake. Of one (key, sender, socket) at most one may seal:
  /// two units under one nonce would tell the key.
  FrameMac(const Proof& key, Sender sender, uint32_t socket);

  /// More of the unit, in any pieces.
  void Add(std::span<const std::byte> bytes);
  /// The unit's tag; the next unit begins.
  FrameTag Seal();
  /// Whether `tag` is the unit's; the next unit begins. In a time that does not tell where it
  /// differs.
  bool Fits(std::span<const std::byte, kTagBytes> tag);

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  void Begin();

  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
  uint64_t unit_ = 0;
};

/// Both directions of one socket, as `self` sees them.
struct FrameMacs {
  FrameMacs(const Proof& key, Sender self, uint32_t socket);
  FrameMac out;
  FrameMac in;
};

}  // namespace weightwire::transport
