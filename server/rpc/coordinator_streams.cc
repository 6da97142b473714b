#include "server/rpc/coordinator_streams.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "server/base/failpoint.h"
#include "server/rpc/authorizer.h"
#include "server/rpc/server_stream.h"
#include "server/rpc/status_message.h"
#include "server/rpc/token_end.h"
#include "server/wire/slice.h"

namespace weightwire::rpc {
namespace {

constexpr size_t kPartBytes = 256 << 10;

class SliceStream final : public ServerStream<v1::SlicePart> {
 public:
  using ServerStream::ServerStream;

  void Fetch(Executor& strand, coordinator::Coordinator& coordinator,
             const v1::FetchSliceRequest& request) {
    auto side = wire::FromProto("side", request.side());
    if (!side) return End(std::move(side.error()));
    const bool names_shared = (request.features() & control::kFeatureNamesShared) != 0;
    strand.Post([self = shared_from_this(), this, &coordinator, side = *side,
                 plan = wire::FromProto(request.plan()), rank = request.rank(), names_shared] {
      coordinator.FetchSlice(plan, side, rank, [self, this, names_shared](auto slice) {
        if (!slice) return End(std::move(slice.error()));
        WW_FAILPOINT("rpc.before_a_slice_is_sent");
        writer_.emplace(std::move(*slice), kPartBytes, names_shared);
        OnWritten();
      });
    });
  }

 private:
  void OnWritten() override {
    v1::SlicePart part;
    if (!writer_->Next(&part)) return End(OkStatus());
    Write(std::move(part));
  }
  void OnEnded() override {}

  std::optional<wire::SliceWriter> writer_;
};

/// Everything but the writing itself happens on the coordinator's strand.
class WatchStream final : public ServerStream<v1::StatusResponse> {
 public:
  WatchStream(const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator,
              CallLog log, StreamToken token, Nanos interval, const v1::StatusRequest& asked)
      : ServerStream(streams, std::move(log)),
        runtime_(runtime),
        coordinator_(coordinator),
        token_(std::move(token)),
        interval_(interval),
        query_(QueryOf(asked)),
        form_(FormOf(asked)) {}

  void Start() {
    OnStrand([this] {
      watch_ = coordinator_.Watch([this, self = weak_from_this()] {
        if (auto alive = self.lock()) Changed();
      });
      token_.EndInTime(weak_from_this());
      Give();
    });
  }

 private:
  void Changed() {
    changed_ = true;
    if (!waiting_) Give();
  }

  void Give() {
    if (ended_) return;
    if (Status good = token_.Check(); !good.ok()) return End(std::move(good));
    changed_ = false;
    waiting_ = true;
    given_ = runtime_.clock.Now();
    Write(StatusMessageOf(coordinator_.Snapshot(query_), form_));
  }

  void OnWritten() override {
    OnStrand([this] {
      const Nanos left = given_ + interval_ - runtime_.clock.Now();
      runtime_.strand.PostAfter(std::max(left, Nanos(0)), [this, self = shared_from_this()] {
        waiting_ = false;
        if (changed_) Give();
      });
    });
  }

  void OnEnded() override {
    OnStrand([this] {
      ended_ = true;
      coordinator_.Unwatch(watch_);
    });
  }

  template <typename Fn>
  void OnStrand(Fn fn) {
    runtime_.strand.Post([self = shared_from_this(), fn = std::move(fn)]() mutable { fn(); });
  }

  const Runtime& runtime_;
  coordinator::Coordinator& coordinator_;
  const StreamToken token_;
  const Nanos interval_;
  const coordinator::StatusQuery query_;
  const EngineForm form_;
  uint64_t watch_ = 0;
  bool changed_ = false;
  bool waiting_ = false;  ///< a message is on its way, or was less than the interval ago
  bool ended_ = false;
  Nanos given_{};
};

}  // namespace

grpc::ServerWriteReactor<v1::SlicePart>* StartFetchSlice(const Runtime& runtime, StreamSet& streams,
                                                         coordinator::Coordinator& coordinator,
                                                         const grpc::CallbackServerContext& context,
                                                         const v1::FetchSliceRequest& request) {
  auto stream = std::make_shared<SliceStream>(streams, CallLog(runtime, context, "FetchSlice"));
  stream->Begin();
  if (Status exposed = CheckNotExposed(context); !exposed.ok()) {
    stream->End(std::move(exposed));
  } else {
    stream->Fetch(runtime.strand, coordinator, request);
  }
  return stream.get();
}

grpc::ServerWriteReactor<v1::StatusResponse>* StartWatch(const Runtime& runtime, StreamSet& streams,
                                                         coordinator::Coordinator& coordinator,
                                                         const grpc::CallbackServerContext& context,
                                                         const v1::WatchRequest& request) {
  const uint32_t millis = request.min_interval_ms() == 0 ? 100 : request.min_interval_ms();
  auto stream = std::make_shared<WatchStream>(
      runtime, streams, coordinator, CallLog(runtime, context, "Watch"),
      StreamToken(runtime, TokenTextOf(context)), std::chrono::milliseconds(std::max(millis, 10u)),
      request.status());
  stream->Begin();
  if (Status exposed = CheckNotExposed(context); !exposed.ok()) {
    stream->End(std::move(exposed));
  } else {
    stream->Start();
  }
  return stream.get();
}

}  // namespace weightwire::rpc
