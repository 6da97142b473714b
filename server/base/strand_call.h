#pragma once

#include <future>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "server/base/executor.h"
#include "server/base/status.h"

namespace weightwire {

/// Runs `fn` on `strand` and waits for it, for as long as it takes. Not on the strand itself.
template <typename Fn>
auto OnStrand(Executor& strand, Fn fn) -> std::invoke_result_t<Fn> {
  std::promise<std::invoke_result_t<Fn>> promise;
  strand.Post([&] {
    if constexpr (std::is_void_v<std::invoke_result_t<Fn>>) {
      fn();
      promise.set_value();
    } else {
      promise.set_value(fn());
    }
  });
  return promise.get_future().get();
}

/// Runs `start(done)` on `strand` and waits until `done` was called, for at most `limit`. False
/// when it was not.
template <typename Start>
bool AwaitOnStrand(Executor& strand, Nanos limit, Start start) {
  auto finished = std::make_shared<std::promise<void>>();
  auto future = finished->get_future();
  strand.Post([finished, start = std::move(start)]() mutable {
    start([finished](auto&&...) { finished->set_value(); });
  });
  return future.wait_for(limit) == std::future_status::ready;
}

}  // namespace weightwire
