#include "tests/sim/process.h"

#include <gtest/gtest.h>

namespace weightwire::sim {

Process::Process(Node& node, const Model& model, const Party& party, control::GroupRole role,
                 std::string group, uint32_t rank, Incarnation incarnation, Incarnation previous,
                 uint32_t buffers, Hooks hooks)
    : node_(node),
      model_(model),
      party_(party),
      role_(role),
      group_(std::move(group)),
      rank_(rank),
      incarnation_(incarnation),
      previous_(previous),
      buffers_(buffers),
      hooks_(std::move(hooks)) {}

void Process::Attach() {
  if (!node_.alive()) {
    return End(Status(Code::kUnavailable, Reason::kTransportFailed, "no agent"));
  }
  agent::AttachRequest request;
  request.role = role_;
  request.group = group_;
  request.rank = rank_;
  request.world_size = party_.world_size;
  request.incarnation = incarnation_;
  request.previous = previous_;
  request.buffers = buffers_;
  node_.agent().Attach(request, this, [this](const Result<agent::AttachReply>& reply) {
    if (!reply) return End(reply.error());
    if (!live()) {  // killed meanwhile
      if (node_.alive()) node_.agent().Detach(reply->handle, OkStatus());
      return;
    }
    handle_ = reply->handle;
    SubmitLayout();
  });
}

void Process::SubmitLayout() {
  node_.agent().SubmitLayout(handle_, model_.Layout(party_, rank_),
                             [this](const Result<control::LayoutReply>& reply) {
                               if (!live()) return;
                               if (!reply) {
                                 const agent::Handle handle = handle_;
                                 End(reply.error());
                                 if (node_.alive()) node_.agent().Detach(handle, reply.error());
                                 return;
                               }
                               state_ = State::kReady;
                               hooks_.ready(*this);
                             });
}

void Process::Kill() {
  if (!live()) return;
  killed_ = true;
  const Status why(Code::kUnavailable, Reason::kMemberLost, "killed");
  const bool attached = handle_.value != 0;
  End(why);
  if (attached && node_.alive()) node_.agent().Detach(handle_, why);
}

void Process::AgentDied() {
  End(Status(Code::kUnavailable, Reason::kMemberLost, "the agent died"));
}

void Process::End(const Status& why) {
  if (!live()) return;
  state_ = State::kEnded;
  hooks_.ended(*this, why);
}

void Process::ExpectLive(const char* call) const {
  if (!live()) ADD_FAILURE() << group_ << "/" << rank_ << " was called after its end: " << call;
}

void Process::OnReleased(Version version, Epoch epoch, const Status& why) {
  ExpectLive("OnReleased");
  hooks_.released(*this, version, epoch, why);
}
void Process::OnCommitted(Epoch epoch, Epoch content, Version version, int buffer, bool leader,
                          const std::array<uint8_t, 16>&, uint64_t lineage) {
  ExpectLive("OnCommitted");
  hooks_.committed(*this, epoch, content, {lineage, version}, buffer, leader);
}
void Process::OnRoomWanted(Epoch epoch, Version) {
  ExpectLive("OnRoomWanted");
  hooks_.room_wanted(*this, epoch);
}
void Process::OnInstalled(Epoch epoch, Epoch content) {
  ExpectLive("OnInstalled");
  hooks_.installed(*this, epoch, content);
}
void Process::OnEvicted(const Status& why) {
  ExpectLive("OnEvicted");
  End(why);
}

}  // namespace weightwire::sim
