#include "server/rpc/agent_service.h"

#include <fcntl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "server/rpc/agent_attach.h"
#include "server/rpc/handle_table.h"
#include "server/rpc/stream_set.h"
#include "server/rpc/unary.h"
#include "server/wire/checks.h"
#include "server/wire/control.h"
#include "server/wire/layout.h"
#include "server/wire/limits.h"
#include "server/wire/status.h"
#include "weightwire/v1/agent.grpc.pb.h"

namespace weightwire::rpc {
namespace {

using Context = grpc::CallbackServerContext;
using Unary = grpc::ServerUnaryReactor;

Result<agent::PublishMode> ModeFromProto(v1::PublishMode mode) {
  if (mode == v1::PUBLISH_MODE_HOLD) return agent::PublishMode::kHold;
  if (mode == v1::PUBLISH_MODE_SNAPSHOT) return agent::PublishMode::kSnapshot;
  return Fail(wire::UnknownEnum("mode", mode));
}

Status CheckBindings(const v1::ImportMemoryRequest& request) {
  WW_RETURN_IF_ERROR(wire::CheckCount("regions", request.regions_size(), wire::kTensorsMax));
  WW_RETURN_IF_ERROR(wire::CheckCount("bindings", request.bindings_size(), wire::kTensorsMax));
  for (int i = 0; i < request.regions_size(); ++i) {
    const v1::ImportMemoryRequest::Region& region = request.regions(i);
    if (region.slab() != 0 && (region.fd_token() != 0 || region.bytes() != 0)) {
      return wire::Bad("regions[" + std::to_string(i) + "]", "is a slab or an fd, not both");
    }
  }
  for (int i = 0; i < request.bindings_size(); ++i) {
    if (request.bindings(i).region() >= static_cast<uint32_t>(request.regions_size())) {
      return wire::Bad("bindings[" + std::to_string(i) + "].region", "names no region");
    }
  }
  return OkStatus();
}

Result<memory::UniqueFd> Duplicate(int fd) {
  memory::UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.valid()) return copy;
  return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                     "the agent has no file descriptor left")
                  .Remedy("raise the limit of open files (ulimit -n) of weightwired"));
}

v1::DeviceMemory DeviceMemoryOf(const memory::MemoryRegion& region) {
  v1::DeviceMemory out;
  const device::IpcHandle& handle = region.allocation().handle();
  out.set_ipc_handle(handle.data(), handle.size());
  out.set_offset(region.offset());
  return out;
}

Result<agent::PublishCall> PublishCallOf(const v1::PublishRequest& request,
                                         const TraceId& trace_of_call) {
  agent::PublishCall out;
  WW_ASSIGN(out.mode, ModeFromProto(request.mode()));
  WW_ASSIGN(out.trace_id, wire::TraceIdFromProto("trace_id", request.trace_id()));
  if (out.trace_id == TraceId{}) out.trace_id = trace_of_call;
  WW_FAIL_IF_ERROR(wire::CheckVersion("version", request.version()));
  if (request.deadline_ms() == 0) return Fail(wire::Bad("deadline_ms", "must not be 0"));
  out.version = Version(request.version());
  out.manual_commit = request.manual_commit();
  out.deadline = std::chrono::milliseconds(request.deadline_ms());
  out.number = request.number();
  out.lineage = std::max<uint64_t>(request.lineage(), 1);
  out.unchanged.assign(request.unchanged().begin(), request.unchanged().end());
  return out;
}

class ServiceImpl final : public AgentService, public v1::Agent::CallbackService {
 public:
  ServiceImpl(Runtime runtime, agent::Agent& agent, FdTable& fds,
              std::map<std::string, std::string> addresses)
      : runtime_(runtime), agent_(agent), fds_(fds), addresses_(std::move(addresses)) {}

  grpc::Service* service() override { return this; }
  void EndStreams(const Status& why) override { streams_.EndAll(why); }

  grpc::ServerBidiReactor<v1::AttachUp, v1::AttachEvent>* Attach(Context* context) override {
    return StartAttach(runtime_, streams_, agent_, handles_, *context);
  }

  Unary* SubmitLayout(Context* context, const v1::AgentLayoutRequest* request,
                      v1::AgentLayoutResponse* response) override {
    return StartUnary(runtime_, context, "AgentSubmitLayout", *request, response, [&](auto answer) {
      auto submission = wire::FromProto("layout", request->layout());
      if (!submission) return answer(submission.error());
      OnStrand([this, secret = request->handle(), submission = std::move(*submission),
                answer]() mutable {
        agent_.SubmitLayout(handles_.Find(secret), std::move(submission),
                            [answer](Result<control::LayoutReply> reply) {
                              if (!reply) return answer(reply.error());
                              v1::AgentLayoutResponse out;
                              *out.mutable_agreed() = wire::ToProto(*reply->agreed);
                              for (const std::string& note : reply->notes) out.add_notes(note);
                              answer(std::move(out));
                            });
      });
    });
  }

  Unary* OpenSlab(Context* context, const v1::OpenSlabRequest* request,
                  v1::OpenSlabResponse* response) override {
    return StartUnary(runtime_, context, "OpenSlab", *request, response, [&](auto answer) {
      if (request->bytes() == 0) return answer(wire::Bad("bytes", "must not be 0"));
      OnStrand([this, secret = request->handle(), bytes = request->bytes(), answer] {
        answer(OpenSlab(handles_.Find(secret), bytes));
      });
    });
  }

  Unary* ImportMemory(Context* context, const v1::ImportMemoryRequest* request,
                      v1::ImportMemoryResponse* response) override {
    return StartUnary(runtime_, context, "ImportMemory", *request, response, [&](auto answer) {
      if (Status bindings = CheckBindings(*request); !bindings.ok()) return answer(bindings);
      OnStrand([this, request = *request, answer] { answer(Import(request)); });
    });
  }

  Unary* Subscribe(Context* context, const v1::SubscribeRequest* request,
                   v1::SubscribeResponse* response) override {
    return StartUnary(runtime_, context, "Subscribe", *request, response, [&](auto answer) {
      OnStrand(
          [this, secret = request->handle(), answer] { answer(OpenStage(handles_.Find(secret))); });
    });
  }

  Unary* Publish(Context* context, const v1::PublishRequest* request,
                 v1::PublishResponse* response) override {
    return StartUnary(runtime_, context, "Publish", *request, response, [&](auto answer) {
      auto call = PublishCallOf(*request, TraceOfCall(*context));
      if (!call) return answer(call.error());
      OnStrand([this, secret = request->handle(), call = *call, answer] {
        agent_.Publish(handles_.Find(secret), call, [answer](Status status) { answer(status); });
      });
    });
  }

  Unary* WithdrawVersion(Context* context, const v1::WithdrawRequest* request,
                         v1::WithdrawResponse* response) override {
    return StartUnary(runtime_, context, "Withdraw", *request, response, [&](auto answer) {
      if (request->version() == 0) return answer(wire::Bad("version", "must not be 0"));
      const agent::WithdrawCall call{Version(request->version()), request->number(),
                                     request->if_accepted()};
      OnStrand([this, secret = request->handle(), call, answer] {
        agent_.Withdraw(handles_.Find(secret), call, [answer](Result<agent::Withdrawal> found) {
          if (!found) return answer(found.error());
          v1::WithdrawResponse out;
          out.set_withdrawal(static_cast<v1::Withdrawal>(*found));
          answer(std::move(out));
        });
      });
    });
  }

  Unary* AcknowledgeSwap(Context* context, const v1::AcknowledgeSwapRequest* request,
                         v1::AcknowledgeSwapResponse* response) override {
    return StartUnary(runtime_, context, "AcknowledgeSwap", *request, response, [&](auto answer) {
      if (!(request->flip_seconds() >= 0)) {
        return answer(wire::Bad("flip_seconds", "must not be negative"));
      }
      if (request->refused_why().size() > wire::kTextBytesMax) {
        return answer(wire::Bad("refused_why", "is longer than 4 KiB"));
      }
      OnStrand([this, secret = request->handle(), epoch = Epoch(request->epoch()),
                seconds = request->flip_seconds(), why = request->refused_why(), answer] {
        const agent::Handle handle = handles_.Find(secret);
        answer(why.empty() ? agent_.AcknowledgeSwap(handle, epoch, seconds)
                           : agent_.RefuseSwap(handle, epoch, why));
      });
    });
  }

  Unary* MakeRoom(Context* context, const v1::MakeRoomRequest* request,
                  v1::MakeRoomResponse* response) override {
    return StartUnary(runtime_, context, "MakeRoom", *request, response, [&](auto answer) {
      OnStrand([this, secret = request->handle(), epoch = Epoch(request->epoch()), answer] {
        answer(agent_.MakeRoom(handles_.Find(secret), epoch));
      });
    });
  }

  Unary* CopyChecked(Context* context, const v1::CopyCheckedRequest* request,
                     v1::CopyCheckedResponse* response) override {
    return StartUnary(runtime_, context, "CopyChecked", *request, response, [&](auto answer) {
      auto why = wire::FromProto("why", request->why());
      if (!why) return answer(why.error());
      OnStrand([this, secret = request->handle(), verification = request->verification(),
                why = std::move(*why),
                answer] { answer(agent_.CopyChecked(handles_.Find(secret), verification, why)); });
    });
  }

  Unary* LocalStatus(Context* context, const v1::LocalStatusRequest* request,
                     v1::LocalStatusResponse* response) override {
    return StartUnary(runtime_, context, "LocalStatus", *request, response,
                      [&](auto answer) { OnStrand([this, answer] { answer(Local()); }); });
  }

 private:
  void OnStrand(Task task) { runtime_.strand.Post(std::move(task)); }

  // ---- on the strand
  Status Import(const v1::ImportMemoryRequest& request) {
    const agent::Handle handle = handles_.Find(request.handle());
    std::vector<uint64_t> regions;
    for (const v1::ImportMemoryRequest::Region& region : request.regions()) {
      if (region.slab() != 0) {
        regions.push_back(region.slab());
        continue;
      }
      WW_ASSIGN_OR_STATUS(memory::UniqueFd fd, fds_.Redeem(region.fd_token()));
      WW_ASSIGN_OR_STATUS(uint64_t id, agent_.ImportMemory(handle, std::move(fd), region.bytes()));
      regions.push_back(id);
    }
    std::vector<agent::TensorBinding> bindings;
    for (const v1::ImportMemoryRequest::Binding& binding : request.bindings()) {
      bindings.push_back({binding.tensor(), regions[binding.region()], binding.offset()});
    }
    return agent_.Bind(handle, bindings);
  }

  /// A token for what the region's fd() is.
  Result<uint64_t> Pass(const memory::MemoryRegion& region) {
    WW_ASSIGN(memory::UniqueFd fd, Duplicate(region.fd()));
    return fds_.Put(std::move(fd));
  }

  Result<v1::OpenSlabResponse> OpenSlab(agent::Handle handle, uint64_t bytes) {
    WW_ASSIGN(const agent::GpuAllocation allocated, agent_.AllocateGpuMemory(handle, bytes));
    WW_ASSIGN(const uint64_t token, Pass(*allocated.memory));
    v1::OpenSlabResponse out;
    out.set_slab(allocated.region);
    *out.mutable_memory() = DeviceMemoryOf(*allocated.memory);
    out.set_lease_token(token);
    return out;
  }

  Result<v1::SubscribeResponse> OpenStage(agent::Handle handle) {
    WW_ASSIGN(agent::StageInfo stage, agent_.OpenStage(handle));
    v1::SubscribeResponse out;
    out.mutable_offsets()->Assign(stage.arena.offsets.begin(), stage.arena.offsets.end());
    out.mutable_sizes()->Assign(stage.arena.sizes.begin(), stage.arena.sizes.end());
    out.set_bytes_total(stage.arena.bytes_total);
    for (const auto& buffer : stage.buffers) {
      WW_ASSIGN(const uint64_t token, Pass(*buffer));
      out.add_fd_tokens(token);
      if (buffer->on_device()) *out.add_on_device() = DeviceMemoryOf(*buffer);
    }
    return out;
  }

  v1::LocalStatusResponse Local() const {
    v1::LocalStatusResponse out;
    for (const agent::LocalStatus& local : agent_.Local()) {
      v1::LocalStatusResponse::Local* to = out.add_locals();
      *to->mutable_member() = wire::ToProto(local.member);
      to->set_group(local.group);
      to->set_rank(local.rank);
      to->set_phase(local.phase);
      to->set_epoch(local.epoch.value);
      to->set_serving(local.serving.value);
      to->set_bytes_done(local.bytes_done);
      to->set_bytes_total(local.bytes_total);
      to->set_stage_bytes(local.stage_bytes);
    }
    const Status session = agent_.SessionStatus();
    out.set_connected(session.ok());
    *out.mutable_session() = wire::OutcomeOf(session);
    out.mutable_addresses()->insert(addresses_.begin(), addresses_.end());
    return out;
  }

  const Runtime runtime_;
  agent::Agent& agent_;
  FdTable& fds_;
  const std::map<std::string, std::string> addresses_;
  StreamSet streams_;
  HandleTable handles_;  ///< the strand's
};

}  // namespace

std::unique_ptr<AgentService> AgentService::Make(Runtime runtime, agent::Agent& agent, FdTable& fds,
                                                 std::map<std::string, std::string> addresses) {
  return std::make_unique<ServiceImpl>(runtime, agent, fds, std::move(addresses));
}

}  // namespace weightwire::rpc
