#pragma once

#include <memory>
#include <utility>

namespace weightwire::coordinator {

/// Guards callbacks of an object that may be gone when they run: timers, worker results, journal
/// answers. A bound callback does nothing once the cancel token is destroyed. It runs on the
/// strand; it may be carried through a worker, which moves it on, so that what it holds ends on the
/// strand too.
class CancelToken {
 public:
  template <typename F>
  auto Bind(F callback) const {
    return [weak = std::weak_ptr<const int>(token_),
            callback = std::move(callback)](auto&&... args) mutable {
      if (weak.lock()) callback(std::forward<decltype(args)>(args)...);
    };
  }

 private:
  std::shared_ptr<const int> token_ = std::make_shared<const int>(0);
};

}  // namespace weightwire::coordinator
