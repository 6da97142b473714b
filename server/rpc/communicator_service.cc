#include "server/rpc/communicator_service.h"

#include <string>
#include <utility>

#include "server/rpc/unary.h"
#include "server/wire/checks.h"
#include "server/wire/limits.h"
#include "weightwire/v1/communicator.grpc.pb.h"

namespace weightwire::rpc {
namespace {

using Context = grpc::CallbackServerContext;
using Unary = grpc::ServerUnaryReactor;
using coordinator::CommunicatorEpoch;
using coordinator::CommunicatorMember;

Result<CommunicatorMember> MemberOf(const v1::CommunicatorMember& member) {
  WW_FAIL_IF_ERROR(wire::CheckId("member.group", member.group()));
  if (member.incarnation() == 0) return Fail(wire::Bad("member.incarnation", "must not be 0"));
  return CommunicatorMember{member.group(), member.rank(), Incarnation(member.incarnation())};
}

Result<coordinator::JoinCommunicator> JoinOf(const v1::JoinCommunicatorRequest& request) {
  WW_ASSIGN(CommunicatorMember member, MemberOf(request.member()));
  WW_FAIL_IF_ERROR(wire::CheckText("participant", request.participant(), wire::kIdBytesMax));
  return coordinator::JoinCommunicator{std::move(member), request.size(), request.participant(),
                                       CommunicatorEpoch(request.last_epoch()),
                                       std::chrono::milliseconds(request.deadline_ms())};
}

v1::JoinCommunicatorResponse ToProto(const coordinator::FormedCommunicator& formed) {
  v1::JoinCommunicatorResponse out;
  out.set_epoch(formed.epoch.value);
  for (const auto& participant : formed.participants) {
    auto* row = out.add_participants();
    row->set_incarnation(participant.incarnation.value);
    row->set_participant(participant.participant);
  }
  return out;
}

class ServiceImpl final : public CommunicatorService, public v1::Communicators::CallbackService {
 public:
  ServiceImpl(Runtime runtime, coordinator::Communicators& communicators)
      : runtime_(runtime), communicators_(communicators) {}

  grpc::Service* service() override { return this; }

  Unary* JoinCommunicator(Context* context, const v1::JoinCommunicatorRequest* request,
                          v1::JoinCommunicatorResponse* response) override {
    return StartUnary(runtime_, context, "JoinCommunicator", *request, response, [&](auto answer) {
      auto join = JoinOf(*request);
      if (!join) return answer(join.error());
      OnStrand([this, join = std::move(*join), answer]() mutable {
        communicators_.Join(std::move(join),
                            [answer](Result<coordinator::FormedCommunicator> formed) {
                              if (!formed) return answer(formed.error());
                              answer(ToProto(*formed));
                            });
      });
    });
  }

  Unary* OfferUniqueId(Context* context, const v1::OfferUniqueIdRequest* request,
                       v1::OfferUniqueIdResponse* response) override {
    return StartUnary(runtime_, context, "OfferUniqueId", *request, response, [&](auto answer) {
      auto member = MemberOf(request->member());
      if (!member) return answer(member.error());
      OnStrand([this, member = std::move(*member), epoch = CommunicatorEpoch(request->epoch()),
                id = request->unique_id(),
                answer] { answer(communicators_.Offer(member, epoch, id)); });
    });
  }

  Unary* AwaitUniqueId(Context* context, const v1::AwaitUniqueIdRequest* request,
                       v1::AwaitUniqueIdResponse* response) override {
    return StartUnary(runtime_, context, "AwaitUniqueId", *request, response, [&](auto answer) {
      auto member = MemberOf(request->member());
      if (!member) return answer(member.error());
      OnStrand([this, member = std::move(*member), epoch = CommunicatorEpoch(request->epoch()),
                deadline = std::chrono::milliseconds(request->deadline_ms()), answer] {
        communicators_.Await(member, epoch, deadline, [answer](Result<std::string> id) {
          if (!id) return answer(id.error());
          v1::AwaitUniqueIdResponse out;
          out.set_unique_id(std::move(*id));
          answer(std::move(out));
        });
      });
    });
  }

  Unary* EndCommunicator(Context* context, const v1::EndCommunicatorRequest* request,
                         v1::EndCommunicatorResponse* response) override {
    return StartUnary(runtime_, context, "EndCommunicator", *request, response, [&](auto answer) {
      auto member = MemberOf(request->member());
      if (!member) return answer(member.error());
      if (Status text = wire::CheckText("why", request->why(), wire::kTextBytesMax); !text.ok()) {
        return answer(text);
      }
      OnStrand([this, member = std::move(*member), epoch = CommunicatorEpoch(request->epoch()),
                why = request->why(), answer] { answer(communicators_.End(member, epoch, why)); });
    });
  }

 private:
  void OnStrand(Task task) { runtime_.strand.Post(std::move(task)); }

  const Runtime runtime_;
  coordinator::Communicators& communicators_;
};

}  // namespace

std::unique_ptr<CommunicatorService> CommunicatorService::Make(
    Runtime runtime, coordinator::Communicators& communicators) {
  return std::make_unique<ServiceImpl>(runtime, communicators);
}

}  // namespace weightwire::rpc
