// The stream lives on gRPC's threads, the participant on the agent's strand. Between Attach and
// Detach or OnEvicted the agent holds a bare pointer to the application, so `held_` keeps the
// object alive for exactly that time.
#include "server/rpc/agent_attach.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "server/rpc/duplex.h"
#include "server/wire/checks.h"
#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "server/wire/status.h"

namespace weightwire::rpc {
namespace {

struct Greeting {
  agent::AttachRequest request;
  uint16_t protocol = 0;
};

Result<uint16_t> ChooseProtocol(const v1::Protocol& protocol) {
  constexpr uint32_t kMin = control::kProtocolMin;
  constexpr uint32_t kMax = control::kProtocolMax;
  if (protocol.min() <= kMax && protocol.max() >= kMin) {
    return static_cast<uint16_t>(std::min(protocol.max(), kMax));
  }
  auto range = [](uint32_t min, uint32_t max) {
    return std::to_string(min) + " to " + std::to_string(max);
  };
  return Fail(Status(Code::kFailedPrecondition, Reason::kProtocolVersion,
                     "this agent speaks protocol " + range(kMin, kMax) + ", the process " +
                         range(protocol.min(), protocol.max()))
                  .Remedy("use a client library of the agent's version"));
}

Result<Greeting> GreetingOf(const v1::AttachHello& hello, const TraceId& trace_of_call) {
  Greeting out;
  WW_ASSIGN(out.protocol, ChooseProtocol(hello.protocol()));
  WW_ASSIGN(out.request.role, wire::FromProto("hello.role", hello.role()));
  if (!hello.job().empty()) WW_FAIL_IF_ERROR(wire::CheckId("hello.job", hello.job()));
  WW_FAIL_IF_ERROR(wire::CheckId("hello.group", hello.group()));
  if (hello.incarnation() == 0) {
    return Fail(wire::Bad("hello.incarnation", "must not be 0"));
  }
  WW_ASSIGN(out.request.trace_id, wire::TraceIdFromProto("hello.trace_id", hello.trace_id()));
  if (out.request.trace_id == TraceId{}) out.request.trace_id = trace_of_call;
  out.request.job = hello.job();
  out.request.group = hello.group();
  out.request.rank = hello.rank();
  out.request.world_size = hello.world_size();
  out.request.incarnation = Incarnation(hello.incarnation());
  if (hello.buffers() > memory::kBuffersMax) {
    return Fail(wire::Bad("hello.buffers", "is more than " + std::to_string(memory::kBuffersMax)));
  }
  out.request.buffers = hello.buffers();
  switch (hello.delta()) {
    case v1::DELTA_MODE_UNSPECIFIED:
      break;
    case v1::DELTA_MODE_OFF:
      out.request.delta = transfer::DeltaPolicy::Mode::kOff;
      break;
    case v1::DELTA_MODE_AUTO:
      out.request.delta = transfer::DeltaPolicy::Mode::kAuto;
      break;
    case v1::DELTA_MODE_ALWAYS:
      out.request.delta = transfer::DeltaPolicy::Mode::kAlways;
      break;
    default:
      return Fail(wire::Bad("hello.delta", "is a mode that this agent does not know"));
  }
  if (!hello.device().empty()) {
    WW_ASSIGN(out.request.device, device::ParseUuid(hello.device()));
  }
  out.request.pid = hello.pid();
  out.request.previous = Incarnation(hello.previous());
  out.request.checks_copies = hello.checks_copies();
  return out;
}

class AttachStream final : public Duplex<v1::AttachUp, v1::AttachEvent>, public agent::Application {
 public:
  AttachStream(const Runtime& runtime, StreamSet& streams, agent::Agent& agent,
               HandleTable& handles, CallLog log)
      : Duplex(runtime, streams, std::move(log)), agent_(agent), handles_(handles) {}

  // ---- on the strand, from the agent
  void OnReleased(Version version, Epoch epoch, const Status& why) override {
    v1::AttachEvent event;
    event.mutable_released()->set_version(version.value);
    event.mutable_released()->set_epoch(epoch.value);
    *event.mutable_released()->mutable_why() = wire::OutcomeOf(why);
    Send(std::move(event));
  }

  void OnCommitted(Epoch epoch, Epoch content, Version version, int buffer, bool leader,
                   const TraceId& trace_id, uint64_t lineage) override {
    v1::AttachEvent event;
    v1::AttachEvent::SwapOffer* offer = event.mutable_swap_offer();
    offer->set_epoch(epoch.value);
    offer->set_content(content.value);
    offer->set_version(version.value);
    offer->set_buffer(static_cast<uint32_t>(buffer));
    offer->set_leader(leader);
    offer->set_trace_id(wire::TraceIdToProto(trace_id));
    offer->set_lineage(lineage);
    Send(std::move(event));
  }

  void OnRoomWanted(Epoch epoch, Version version) override {
    v1::AttachEvent event;
    event.mutable_room_wanted()->set_epoch(epoch.value);
    event.mutable_room_wanted()->set_version(version.value);
    Send(std::move(event));
  }

  void OnCopyCheck(uint64_t verification, Epoch content) override {
    v1::AttachEvent event;
    event.mutable_copy_check()->set_verification(verification);
    event.mutable_copy_check()->set_content(content.value);
    Send(std::move(event));
  }

  void OnInstalled(Epoch epoch, Epoch content) override {
    v1::AttachEvent event;
    event.mutable_installed()->set_epoch(epoch.value);
    event.mutable_installed()->set_content(content.value);
    Send(std::move(event));
  }

  void OnEvicted(const Status& why) override {
    v1::AttachEvent event;
    *event.mutable_fenced()->mutable_why() = wire::OutcomeOf(why);
    Send(std::move(event));
    End(OkStatus());
    handle_ = {};
    handles_.Remove(secret_);
    const auto last = std::move(held_);
  }

 private:
  bool OnMessage(const v1::AttachUp& up) override {
    if (up.kind_case() == v1::AttachUp::kHello && !greeted_) {
      greeted_ = true;
      auto greeting = GreetingOf(up.hello(), log().trace_id());
      if (greeting) {
        OnStrand([this, greeting = std::move(*greeting)] { Attach(greeting); });
      } else {
        End(std::move(greeting.error()));
      }
    } else if (up.kind_case() == v1::AttachUp::kDetach && greeted_) {
      std::string why = wire::CleanText(up.detach().why(), wire::kErrorMessageBytesMax);
      if (why.empty()) why = "the process detached";
      OnStrand([this, why = std::move(why)]() mutable {
        Leave(Status(Code::kCancelled, Reason::kMemberLost, std::move(why)));
        End(OkStatus());
      });
    } else {
      End(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                 greeted_ ? "attach: after the hello only detach may follow"
                          : "attach: the first message must be the hello"));
    }
    return true;
  }

  void OnEnded() override {
    OnStrand([this] {
      ended_ = true;
      Leave(Status(Code::kUnavailable, Reason::kMemberLost, "the process closed its stream"));
    });
  }

  // ---- on the strand
  void Attach(const Greeting& greeting) {
    held_ = shared_from_this();
    agent_.Attach(greeting.request, this,
                  [this, self = held_, greeting](Result<agent::AttachReply> reply) {
                    Attached(greeting, std::move(reply));
                  });
  }

  void Attached(const Greeting& greeting, Result<agent::AttachReply> reply) {
    if (!reply) {
      End(std::move(reply.error()));
      held_.reset();
      return;
    }
    handle_ = reply->handle;
    if (ended_) {
      return Leave(Status(Code::kUnavailable, Reason::kMemberLost,
                          "the process closed its stream while it attached"));
    }
    secret_ = handles_.Add(handle_);
    v1::AttachEvent event;
    v1::AttachEvent::Attached* attached = event.mutable_attached();
    attached->set_protocol(greeting.protocol);
    attached->set_handle(secret_);
    *attached->mutable_member() = wire::ToProto(reply->member);
    attached->set_lineage(reply->lineage);
    attached->set_floor(reply->floor.value);
    *attached->mutable_device_refused() = wire::OutcomeOf(reply->device);
    if (greeting.request.device && reply->device.ok()) {
      attached->set_device(ToString(*greeting.request.device));
    }
    Send(std::move(event));
  }

  void Leave(Status why) {
    if (handle_ == agent::Handle()) return held_.reset();  // (an answer under way holds it as well)
    handles_.Remove(secret_);
    agent_.Detach(std::exchange(handle_, {}), std::move(why));
    held_.reset();
  }

  template <typename Fn>
  void OnStrand(Fn fn) {
    runtime().strand.Post([self = shared_from_this(), fn = std::move(fn)]() mutable { fn(); });
  }

  agent::Agent& agent_;
  HandleTable& handles_;
  bool greeted_ = false;  ///< gRPC's reading side only
  // The strand's.
  agent::Handle handle_{};
  uint64_t secret_ = 0;  ///< names the process in other calls
  bool ended_ = false;
  std::shared_ptr<Duplex> held_;
};

}  // namespace

grpc::ServerBidiReactor<v1::AttachUp, v1::AttachEvent>* StartAttach(
    const Runtime& runtime, StreamSet& streams, agent::Agent& agent, HandleTable& handles,
    const grpc::CallbackServerContext& context) {
  auto stream = std::make_shared<AttachStream>(runtime, streams, agent, handles,
                                               CallLog(runtime, context, "Attach"));
  stream->Begin();
  return stream.get();
}

}  // namespace weightwire::rpc
