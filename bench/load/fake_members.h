#pragma once

#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "bench/load/fake_member.h"

namespace weightwire::load {

/// A trainer and engines, each an agent of its own with `ranks` ranks. Its methods are called by
/// one thread, which is not the strand's, and wait for their end.
class FakeMembers {
 public:
  using Connect = std::function<std::unique_ptr<control::CoordinatorPort>()>;

  /// `connect` makes a port for each agent, on the strand. `strand` outlives it.
  FakeMembers(const Connect& connect, ThreadExecutor& strand, uint32_t engines, uint32_t ranks);
  ~FakeMembers();

  /// Registers everybody, some agents at a time. Returns the seconds that it took.
  double Open();
  /// Seconds from the call until the trainer is released.
  Result<double> Publish();
  /// Bytes of the commands that agents get from now on, as they are on the wire, without frames.
  void CountBytes();
  int64_t bytes() const { return *bytes_; }

 private:
  void OpenNext(const std::shared_ptr<std::promise<void>>& ready);

  ThreadExecutor& strand_;
  std::vector<std::unique_ptr<FakeMember>> fleet_;  ///< the trainer first
  size_t opening_ = 0, open_ = 0;
  uint64_t version_ = 0;
  std::shared_ptr<int64_t> bytes_ = std::make_shared<int64_t>(0);
};

}  // namespace weightwire::load
