#pragma once

#include <map>
#include <memory>
#include <string>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/memory/slot_pool.h"
#include "server/metrics/metrics.h"
#include "server/transfer/delta_base.h"
#include "server/transfer/fetch.h"
#include "server/transfer/gpu_direct.h"
#include "server/transfer/notify.h"
#include "server/transfer/notify_queue.h"
#include "server/transfer/rate_limiter.h"
#include "server/transfer/ticket_table.h"
#include "server/transfer/transfer.h"
#include "server/transport/transport.h"

namespace weightwire::transfer {

/// What all parts of one engine share. Belongs to the strand, except for `workers` and `tickets`.
///
/// Sources and targets have pools of their own: a source's slot waits for credits of a peer, so a
/// target that needed one of those slots to credit could wait in a circle. A scratch slot waits for
/// nothing but its own Get.
struct Context {
  Options options;
  Clock& clock;
  Executor& strand;
  Executor& workers;
  metrics::Sink& metrics;
  std::map<std::string, transport::Transport*> transports;  ///< those that run here
  std::unique_ptr<memory::SlotPool> slots;
  std::unique_ptr<memory::SlotPool> scratch;
  GpuPoolMap gpu_pools;  ///< empty where no transport reaches GPU memory
  TicketTable tickets;
  DeltaCoders delta_coders;
  std::shared_ptr<NotifyQueue> notifies;
  RateLimits egress;   ///< slots on their way out, by the agents that read them
  RateLimits ingress;  ///< Gets, by the agents that they read from
  /// Streams whose source leaves its sums to the reader's tasks (SourceStream::SumsAtReader).
  std::map<StreamKey, std::weak_ptr<SourceSums>> sums_at_reader;

  Context(Options options_in, Clock& clock_in, Executor& strand_in, Executor& workers_in,
          metrics::Sink& metrics_in)
      : options(std::move(options_in)),
        clock(clock_in),
        strand(strand_in),
        workers(workers_in),
        metrics(metrics_in),
        tickets(options.self, options.proof_required),
        delta_coders(static_cast<size_t>(options.tuning.segment_bytes_max)),
        notifies(std::make_shared<NotifyQueue>(strand_in)),
        egress(options.tuning.rate_limit, options.tuning.peer_rate_limit),
        ingress(options.tuning.rate_limit, options.tuning.peer_rate_limit) {}

  /// Null where the source makes its sums itself. Keeps the source's job alive.
  std::shared_ptr<SourceSums> SumsAtReader(const StreamKey& stream) const;
  const Tuning& tuning() const { return options.tuning; }
  bool IsOnOurHost(const Peer& peer) const {
    return !peer.host.empty() && peer.host == options.host;
  }
  /// nullptr when there is none of this name.
  transport::Transport* TransportOf(const std::string& name) const;
  void CountRateLimited(const char* direction, Nanos waited) {
    metrics.Add("rate_limited_seconds_total", std::chrono::duration<double>(waited).count(),
                {{"direction", direction}});
  }
  /// Payload of a rank that lies on a GPU, read over a transport that does not map it.
  void CountGpuBytes(int64_t bytes, const std::string& transport, const char* direction,
                     bool direct) {
    metrics.Add("gpu_transfer_bytes_total", static_cast<double>(bytes),
                {{"transport", transport},
                 {"direction", direction},
                 {"path", direct ? "direct" : "staged"}});
  }
  void Send(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& notify) {
    notifies->Send(endpoint, notify);
  }
};

}  // namespace weightwire::transfer
