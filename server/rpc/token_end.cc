#include "server/rpc/token_end.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "server/tls/token.h"

namespace weightwire::rpc {
namespace {

/// Timers know neither of a key that is removed nor of a wall clock that is set.
constexpr double kLookAgainSeconds = 2;

}  // namespace

Result<double> StreamToken::SecondsLeft() const {
  const double now_s = runtime_.clock.WallSeconds();
  WW_ASSIGN(const tls::Token token, runtime_.tokens->Verify(*text_, static_cast<int64_t>(now_s)));
  return static_cast<double>(token.expires_s) - now_s;
}

Status StreamToken::Check() const {
  if (!text_) return OkStatus();
  auto left = SecondsLeft();
  return left ? OkStatus() : std::move(left.error());
}

void StreamToken::EndInTime(std::weak_ptr<EndableStream> stream) const {
  const auto alive = stream.lock();
  if (!text_ || alive == nullptr) return;
  auto left = SecondsLeft();
  if (!left) return alive->End(std::move(left.error()));
  const std::chrono::duration<double> look(std::min(*left, kLookAgainSeconds));
  runtime_.strand.PostAfter(std::chrono::duration_cast<Nanos>(look),
                            [this, stream = std::move(stream)] {
                              // `this` is the stream's: it lives while the stream is held here.
                              if (const auto held = stream.lock()) EndInTime(stream);
                            });
}

}  // namespace weightwire::rpc
