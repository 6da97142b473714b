#include "server/base/clock.h"

namespace weightwire {
namespace {

class SteadyClock final : public Clock {
 public:
  Nanos Now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
  double WallSeconds() const override {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

Clock& SystemClock() {
  static SteadyClock clock;
  return clock;
}

}  // namespace weightwire
