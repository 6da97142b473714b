#include "client/cpp/attachment.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "client/cpp/fd_socket.h"
#include "server/memory/uid_refusal.h"
#include "server/wire/layout.h"
#include "server/wire/limits.h"
#include "server/wire/status.h"

namespace weightwire::client {
namespace {

uint64_t RandomIncarnation() {
  std::random_device device;
  return ((uint64_t{device()} << 32) | device()) | 1;
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(wire::kAnswerBytesMax));
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return wire::FromCall(status.error_code(), status.error_message(), status.error_details());
}

Status SessionEnded() {
  return {Code::kUnavailable, Reason::kShuttingDown, "the agent ended the session"};
}

}  // namespace

std::string DefaultAgentSocket() {
  if (const char* path = std::getenv("WEIGHTWIRE_AGENT_SOCKET")) return path;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  return std::string(runtime != nullptr ? runtime : "/tmp") + "/weightwire-" +
         std::to_string(getuid()) + "/agent.sock";
}

Attachment::Attachment(const Place& place, Events events)
    : place_(place),
      socket_(place.agent_socket.empty() ? DefaultAgentSocket() : place.agent_socket),
      events_(std::move(events)),
      stub_(v1::Agent::NewStub(ChannelTo(socket_))) {}

Result<std::unique_ptr<Attachment>> Attachment::Open(const Place& place, v1::GroupRole role,
                                                     Events events) {
  std::unique_ptr<Attachment> attachment(new Attachment(place, std::move(events)));
  WW_FAIL_IF_ERROR(attachment->Handshake(role));
  return attachment;
}

Status Attachment::Handshake(v1::GroupRole role) {
  stream_ = stub_->Attach(&stream_context_);
  v1::AttachUp up;
  v1::AttachHello& hello = *up.mutable_hello();
  hello.mutable_protocol()->set_min(control::kProtocolMin);
  hello.mutable_protocol()->set_max(control::kProtocolMax);
  hello.set_job(place_.job);
  hello.set_role(role);
  hello.set_group(place_.group);
  hello.set_rank(place_.rank);
  hello.set_world_size(place_.world_size);
  hello.set_incarnation(RandomIncarnation());
  hello.set_pid(getpid());
  stream_->Write(up);
  reader_ = std::thread([this] { ReadUntilEnd(); });
  std::unique_lock lock(mutex_);
  const bool answered =
      changed_.wait_for(lock, place_.call_timeout, [this] { return attached_ || ended_; });
  if (attached_) return OkStatus();
  if (ended_) {
    if (end_.code() != Code::kUnavailable) return end_;
    const std::string refusal = memory::UidRefusal(socket_);
    if (refusal.empty()) return end_;
    return Status(Code::kPermissionDenied, Reason::kPermissionDenied, refusal)
        .Remedy(memory::UidRefusalRemedy(geteuid()));
  }
  if (!answered) stream_context_.TryCancel();
  return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                "the agent at " + socket_ + " did not answer")
      .Remedy("is weightwired running, and is this its agent socket?");
}

Attachment::~Attachment() {
  v1::AttachUp up;
  up.mutable_detach();
  {
    std::unique_lock lock(mutex_);
    if (attached_ && !ended_) {
      lock.unlock();
      stream_->Write(up);
      stream_->WritesDone();
      lock.lock();
      changed_.wait_for(lock, std::chrono::seconds(2), [this] { return ended_; });
    }
  }
  stream_context_.TryCancel();
  if (reader_.joinable()) reader_.join();
}

void Attachment::ReadUntilEnd() {
  Status fenced;
  v1::AttachEvent event;
  while (stream_->Read(&event)) {
    if (event.has_attached()) {
      std::lock_guard lock(mutex_);
      handle_ = event.attached().handle();
      attached_ = true;
      changed_.notify_all();
      continue;
    }
    if (event.has_fenced()) {
      fenced = wire::FromProto("why", event.fenced().why()).value_or(SessionEnded());
    }
    events_.on_event(event);
  }
  const Status finished = FromGrpc(stream_->Finish());
  const Status end = !fenced.ok() ? fenced : finished.ok() ? SessionEnded() : finished;
  bool was_attached = false;
  {
    std::lock_guard lock(mutex_);
    end_ = end;
    ended_ = true;
    was_attached = attached_;
    changed_.notify_all();
  }
  if (was_attached) events_.on_end(end);
}

template <typename Request, typename Response>
Status Attachment::Call(grpc::Status (v1::Agent::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                        Request request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + place_.call_timeout);
  request.set_handle(handle_);
  return FromGrpc((stub_.get()->*method)(&context, request, response));
}

Result<layout::RankLayout> Attachment::SubmitLayout(const Layout& layout) {
  v1::AgentLayoutRequest request;
  *request.mutable_layout() = wire::ToProto(layout);
  v1::AgentLayoutResponse response;
  WW_FAIL_IF_ERROR(Call(&v1::Agent::Stub::SubmitLayout, std::move(request), &response));
  return wire::FromProto("agreed", response.agreed());
}

Status Attachment::Import(int fd, uint64_t bytes, const std::vector<uint64_t>& offsets) {
  WW_ASSIGN_OR_STATUS(const uint64_t token, PutFd(socket_ + ".fd", fd, place_.call_timeout));
  v1::ImportMemoryRequest request;
  auto& region = *request.add_regions();
  region.set_fd_token(token);
  region.set_bytes(bytes);
  for (size_t tensor = 0; tensor < offsets.size(); ++tensor) {
    auto& binding = *request.add_bindings();
    binding.set_tensor(static_cast<uint32_t>(tensor));
    binding.set_offset(offsets[tensor]);
  }
  v1::ImportMemoryResponse response;
  return Call(&v1::Agent::Stub::ImportMemory, std::move(request), &response);
}

Result<v1::SubscribeResponse> Attachment::Subscribe() {
  v1::SubscribeResponse response;
  WW_FAIL_IF_ERROR(Call(&v1::Agent::Stub::Subscribe, v1::SubscribeRequest(), &response));
  return response;
}

Status Attachment::Publish(Version version, const PublishOptions& options) {
  v1::PublishRequest request;
  request.set_version(version.value);
  request.set_mode(options.mode == PublishMode::kHold ? v1::PUBLISH_MODE_HOLD
                                                      : v1::PUBLISH_MODE_SNAPSHOT);
  request.set_manual_commit(options.manual_commit);
  request.set_deadline_ms(static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(options.deadline).count()));
  request.set_number(++publish_calls_);
  request.set_lineage(options.lineage);
  request.mutable_unchanged()->Assign(options.unchanged.begin(), options.unchanged.end());
  v1::PublishResponse response;
  return Call(&v1::Agent::Stub::Publish, std::move(request), &response);
}

Result<v1::Withdrawal> Attachment::Withdraw(Version version, bool if_accepted) {
  v1::WithdrawRequest request;
  request.set_version(version.value);
  request.set_number(publish_calls_);
  request.set_if_accepted(if_accepted);
  v1::WithdrawResponse response;
  WW_FAIL_IF_ERROR(Call(&v1::Agent::Stub::WithdrawVersion, std::move(request), &response));
  return response.withdrawal();
}

Status Attachment::Acknowledge(Epoch epoch, double flip_seconds) {
  v1::AcknowledgeSwapRequest request;
  request.set_epoch(epoch.value);
  request.set_flip_seconds(flip_seconds);
  v1::AcknowledgeSwapResponse response;
  return Call(&v1::Agent::Stub::AcknowledgeSwap, std::move(request), &response);
}

Status Attachment::Refuse(Epoch epoch, const std::string& why) {
  v1::AcknowledgeSwapRequest request;
  request.set_epoch(epoch.value);
  request.set_refused_why(why.empty() ? "no reason given" : why.substr(0, wire::kTextBytesMax));
  v1::AcknowledgeSwapResponse response;
  return Call(&v1::Agent::Stub::AcknowledgeSwap, std::move(request), &response);
}

Result<memory::UniqueFd> Attachment::Redeem(uint64_t token) const {
  return GetFd(socket_ + ".fd", token, place_.call_timeout);
}

}  // namespace weightwire::client
