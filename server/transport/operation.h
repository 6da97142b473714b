#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

/// A posted Get until its completion.
struct GetOperation {
  RegionKey key;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<MutableSpan> into;
  Nanos deadline{0};
  std::shared_ptr<void> hold;
  Endpoint::GetDone done;
  Endpoint::Take take = nullptr;  ///< null: the transport writes `into`
};

/// What an endpoint posts for a Get.
GetOperation MakeGet(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                     std::shared_ptr<void> hold, Endpoint::GetDone done,
                     Endpoint::Take take = nullptr);

/// OK, or that a Get of so many bytes is none.
Status CheckGetBytes(uint64_t bytes, uint64_t chunk_bytes_max);

/// Runs `done`, then lets go of `hold`. The caller holds no lock and touches `into` no more.
inline void Complete(GetOperation& operation, Status status) {
  operation.take = nullptr;
  std::exchange(operation.done, nullptr)(std::move(status));
  operation.hold.reset();
}

/// What an operation hears that outlived its deadline.
inline Status DeadlineExceeded() {
  return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                "the operation outlived its deadline");
}

/// A session's end for any cause but our own Close.
inline Status TransportFailed(std::string why) {
  return Status(Code::kUnavailable, Reason::kTransportFailed, std::move(why));
}

/// A session's end by our own Close, or by the end of its transport.
inline Status ClosedHere() {
  return Status(Code::kCancelled, Reason::kNone, "closed by this side");
}

/// `timeout` from now, without overflow.
inline Nanos DeadlineAfter(Nanos timeout) {
  const Nanos now = SystemClock().Now();
  return timeout < Nanos::max() - now ? now + timeout : Nanos::max();
}

}  // namespace weightwire::transport
