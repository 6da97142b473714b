#include "server/rpc/coordinator_service.h"

#include <string>
#include <utility>

#include "server/rpc/acl.h"
#include "server/rpc/authorizer.h"
#include "server/rpc/coordinator_session.h"
#include "server/rpc/coordinator_streams.h"
#include "server/rpc/status_message.h"
#include "server/rpc/stream_set.h"
#include "server/rpc/unary.h"
#include "server/wire/checks.h"
#include "server/wire/control.h"
#include "server/wire/layout.h"
#include "server/wire/limits.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

namespace weightwire::rpc {
namespace {

using Context = grpc::CallbackServerContext;
using Unary = grpc::ServerUnaryReactor;

class ServiceImpl final : public CoordinatorService, public v1::Coordinator::CallbackService {
 public:
  ServiceImpl(Runtime runtime, coordinator::Coordinator& coordinator)
      : runtime_(runtime), coordinator_(coordinator) {}

  grpc::Service* service() override { return this; }
  void EndStreams(const weightwire::Status& why) override { streams_.EndAll(why); }

  grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown>* Session(Context* context) override {
    return StartSession(runtime_, streams_, coordinator_, acl_, *context);
  }

  grpc::ServerWriteReactor<v1::SlicePart>* FetchSlice(
      Context* context, const v1::FetchSliceRequest* request) override {
    return StartFetchSlice(runtime_, streams_, coordinator_, *context, *request);
  }

  grpc::ServerWriteReactor<v1::StatusResponse>* Watch(Context* context,
                                                      const v1::WatchRequest* request) override {
    return StartWatch(runtime_, streams_, coordinator_, *context, *request);
  }

  Unary* Register(Context* context, const v1::RegisterRequest* request,
                  v1::RegisterResponse* response) override {
    return StartUnary(runtime_, context, "Register", *request, response, [&](auto answer) {
      auto decoded = wire::FromProto(*request);
      if (!decoded) return answer(decoded.error());
      const Caller caller = CallerOf(*context);
      if (auto place = CheckPlace(caller, *decoded); !place.ok()) return answer(place);
      OnOwned(caller, decoded->agent, answer, [this, decoded = *decoded, answer]() mutable {
        const AgentId agent = decoded.agent;
        coordinator_.Register(std::move(decoded),
                              [this, agent, answer](Result<control::RegisterReply> reply) {
                                if (!reply) return answer(reply.error());
                                acl_.Registered(agent, reply->member);
                                v1::RegisterResponse out;
                                *out.mutable_member() = wire::ToProto(reply->member);
                                out.set_lineage(reply->lineage);
                                out.set_floor(reply->floor.value);
                                answer(std::move(out));
                              });
      });
    });
  }

  Unary* SubmitLayout(Context* context, const v1::SubmitLayoutRequest* request,
                      v1::SubmitLayoutResponse* response) override {
    return StartUnary(runtime_, context, "SubmitLayout", *request, response, [&](auto answer) {
      auto decoded = wire::FromProto(*request);
      if (!decoded) return answer(decoded.error());
      const epoch::Member member = decoded->member;
      OnOwned(CallerOf(*context), member, answer,
              [this, decoded = std::move(*decoded), answer]() mutable {
                coordinator_.SubmitLayout(std::move(decoded),
                                          [answer](Result<control::LayoutReply> reply) {
                                            if (!reply) return answer(reply.error());
                                            answer(wire::ToProto(*reply));
                                          });
              });
    });
  }

  Unary* PublishVersion(Context* context, const v1::PublishVersionRequest* request,
                        v1::PublishVersionResponse* response) override {
    return StartUnary(runtime_, context, "PublishVersion", *request, response, [&](auto answer) {
      auto decoded = wire::FromProto(*request);
      if (!decoded) return answer(decoded.error());
      OnOwned(CallerOf(*context), decoded->member, answer, [this, decoded = *decoded, answer] {
        coordinator_.Publish(decoded, [answer](weightwire::Status status) { answer(status); });
      });
    });
  }

  Unary* WithdrawVersion(Context* context, const v1::WithdrawVersionRequest* request,
                         v1::WithdrawVersionResponse* response) override {
    return StartUnary(runtime_, context, "WithdrawVersion", *request, response, [&](auto answer) {
      auto decoded = wire::FromProto(*request);
      if (!decoded) return answer(decoded.error());
      OnOwned(CallerOf(*context), decoded->member, answer, [this, decoded = *decoded, answer] {
        coordinator_.Withdraw(decoded, [answer](weightwire::Status status) { answer(status); });
      });
    });
  }

  Unary* Report(Context* context, const v1::ReportRequest* request,
                v1::ReportResponse* response) override {
    return StartUnary(runtime_, context, "Report", *request, response, [&](auto answer) {
      auto decoded = wire::FromProto(*request);
      if (!decoded) return answer(decoded.error());
      const AgentId agent = decoded->agent;
      OnOwned(CallerOf(*context), agent, answer,
              [this, decoded = std::move(*decoded), answer]() mutable {
                coordinator_.Report(decoded.agent, std::move(decoded.report));
                answer(OkStatus());
              });
    });
  }

  Unary* Commit(Context* context, const v1::CommitRequest* request,
                v1::CommitResponse* response) override {
    return StartUnary(runtime_, context, "Commit", *request, response, [&](auto answer) {
      OnStrand(
          [this, epoch = Epoch(request->epoch()), answer] { answer(coordinator_.Commit(epoch)); });
    });
  }

  Unary* Abort(Context* context, const v1::AbortRequest* request,
               v1::AbortResponse* response) override {
    return StartUnary(runtime_, context, "Abort", *request, response, [&](auto answer) {
      if (weightwire::Status text = wire::CheckText("why", request->why(), wire::kTextBytesMax);
          !text.ok()) {
        return answer(text);
      }
      OnStrand([this, epoch = Epoch(request->epoch()), why = request->why(), answer] {
        answer(coordinator_.Abort(epoch, why));
      });
    });
  }

  Unary* Rollback(Context* context, const v1::RollbackRequest* request,
                  v1::RollbackResponse* response) override {
    return StartUnary(runtime_, context, "Rollback", *request, response, [&](auto answer) {
      OnStrand([this, version = Version(request->version()), answer] {
        coordinator_.Rollback(version, [answer](Result<coordinator::RolledBack> result) {
          if (!result) return answer(result.error());
          answer(RollbackMessageOf(*result));
        });
      });
    });
  }

  Unary* Verify(Context* context, const v1::VerifyRequest* request,
                v1::VerifyResponse* response) override {
    return StartUnary(runtime_, context, "Verify", *request, response, [&](auto answer) {
      weightwire::Status fields = wire::CheckText("engine", request->engine(), wire::kIdBytesMax);
      if (!fields.ok()) return answer(fields);
      const auto deadline =
          std::chrono::milliseconds(request->deadline_ms() == 0 ? 60'000 : request->deadline_ms());
      OnStrand([this, engine = request->engine(), deadline, answer] {
        coordinator_.Verify(engine, deadline,
                            [answer](Result<coordinator::IntegrityReport> result) {
                              if (!result) return answer(result.error());
                              answer(VerifyMessageOf(*result));
                            });
      });
    });
  }

  Unary* Evict(Context* context, const v1::EvictRequest* request,
               v1::EvictResponse* response) override {
    return StartUnary(runtime_, context, "Evict", *request, response, [&](auto answer) {
      weightwire::Status fields = wire::CheckId("group", request->group());
      if (fields.ok()) fields = wire::CheckText("why", request->why(), wire::kTextBytesMax);
      if (!fields.ok()) return answer(fields);
      OnStrand([this, group = request->group(), why = request->why(), answer] {
        answer(coordinator_.Evict(group, why));
      });
    });
  }

  Unary* Status(Context* context, const v1::StatusRequest* request,
                v1::StatusResponse* response) override {
    return StartUnary(runtime_, context, "Status", *request, response, [&](auto answer) {
      OnStrand([this, query = QueryOf(*request), form = FormOf(*request), answer] {
        answer(StatusMessageOf(coordinator_.Snapshot(query), form));
      });
    });
  }

  Unary* DescribeEpoch(Context* context, const v1::DescribeEpochRequest* request,
                       v1::DescribeEpochResponse* response) override {
    return StartUnary(runtime_, context, "DescribeEpoch", *request, response, [&](auto answer) {
      OnStrand([this, epoch = Epoch(request->epoch()), answer] {
        auto trace = coordinator_.Describe(epoch);
        if (!trace) return answer(trace.error());
        answer(StoryMessageOf(*trace));
      });
    });
  }

  Unary* Drain(Context* context, const v1::DrainRequest* request,
               v1::DrainResponse* response) override {
    return StartUnary(runtime_, context, "Drain", *request, response, [&](auto answer) {
      weightwire::Status name = wire::CheckText("name", request->name(), wire::kIdBytesMax);
      if (!name.ok()) return answer(name);
      using Draining = coordinator::Coordinator::Draining;
      using DrainOf = coordinator::Coordinator::DrainOf;
      Caller caller = CallerOf(*context);
      // A pod takes itself out: its agents, and by no name that is somebody else's.
      const bool person = !caller || caller->role == tls::Role::kOperator;
      OnStrand([this, name = request->name(), caller = std::move(caller), person,
                what = request->undo() ? Draining::kUndo : Draining::kDrain, answer] {
        if (!person) {
          if (auto owned = acl_.CheckAgents(caller, name); !owned.ok()) return answer(owned);
        }
        const DrainOf which = person ? DrainOf::kEngineOrAgent : DrainOf::kAgent;
        coordinator_.Drain(name, what, which, [answer](Result<std::vector<std::string>> engines) {
          if (!engines) return answer(engines.error());
          v1::DrainResponse out;
          for (const std::string& engine : *engines) out.add_engines(engine);
          answer(std::move(out));
        });
      });
    });
  }

  Unary* ExplainPlan(Context* context, const v1::ExplainPlanRequest* request,
                     v1::ExplainPlanResponse* response) override {
    return StartUnary(runtime_, context, "ExplainPlan", *request, response, [&](auto answer) {
      auto fields = wire::CheckText("tensor", request->tensor(), wire::kNameBytesMax);
      if (fields.ok()) fields = wire::CheckText("engine", request->engine(), wire::kIdBytesMax);
      if (!fields.ok()) return answer(fields);
      OnStrand([this, engine = request->engine(), tensor = request->tensor(), answer] {
        auto text = coordinator_.Explain(engine, tensor);
        if (!text) return answer(text.error());
        v1::ExplainPlanResponse out;
        out.set_text(std::move(*text));
        answer(std::move(out));
      });
    });
  }

 private:
  void OnStrand(Task task) { runtime_.strand.Post(std::move(task)); }

  /// Runs `task` when the caller may name `what`, an agent or a member.
  template <typename What, typename Reply>
  void OnOwned(Caller caller, What what, Reply answer, Task task) {
    OnStrand([this, caller = std::move(caller), what, answer, task = std::move(task)] {
      if (auto owned = acl_.Check(caller, what); !owned.ok()) return answer(owned);
      task();
    });
  }

  const Runtime runtime_;
  coordinator::Coordinator& coordinator_;
  Acl acl_;  ///< the strand's
  StreamSet streams_;
};

}  // namespace

std::unique_ptr<CoordinatorService> CoordinatorService::Make(
    Runtime runtime, coordinator::Coordinator& coordinator) {
  return std::make_unique<ServiceImpl>(runtime, coordinator);
}

}  // namespace weightwire::rpc
