#include "bench/load/load_clients.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "server/base/clock.h"
#include "server/wire/control.h"

namespace weightwire::load {
namespace {

constexpr Nanos kCallDeadline = std::chrono::seconds(30);
constexpr uint32_t kOpening = 32;  // sessions that are being opened at a time

std::unique_ptr<v1::Coordinator::Stub> Dial(const tls::Dialer& dialer, const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return v1::Coordinator::NewStub(dialer.Open(address, std::move(arguments)));
}

}  // namespace

LoadClients::LoadClients(Shape shape, ThreadExecutor& strand)
    : shape_(std::move(shape)),
      dialer_(shape_.tls),
      calls_(std::make_shared<rpc::ClientCalls>(strand)),
      agents_(shape_.agents) {}

LoadClients::~LoadClients() {
  for (Agent& agent : agents_) {
    if (agent.session) agent.session->Stop();
  }
  calls_->Close();
}

void LoadClients::Open(std::function<void()> done) {
  done_ = std::move(done);
  for (uint32_t i = 0; i < kOpening; ++i) OpenNext();
}

void LoadClients::OpenNext() {
  if (opened_ == shape_.agents) return;
  const uint32_t index = opened_++;
  Agent& agent = agents_[index];
  agent.name = "load-" + std::to_string(index);
  agent.incarnation = Incarnation(random_() | 1);
  agent.stub = Dial(dialer_, shape_.coordinator);
  agent.session = std::make_shared<rpc::SessionCall>(
      calls_,
      rpc::SessionCall::Events{[this, index](const v1::SessionDown& down) { OnDown(index, down); },
                               [this, index](const Status& why) {
                                 Note(&Trouble::sessions_lost,
                                      agents_[index].name + ": " + why.ToString());
                               }},
      nullptr);
  control::AgentHello hello;
  hello.job = "default";
  hello.name = agent.name;
  hello.incarnation = agent.incarnation;
  hello.host = agent.name;
  hello.addresses = {{"tcp", "127.0.0.1:1"}};
  agent.session->Start(*agent.stub, hello);
}

void LoadClients::OnDown(uint32_t index, const v1::SessionDown& down) {
  Agent& agent = agents_[index];
  if (down.kind_case() != v1::SessionDown::kWelcome) {
    return Note(&Trouble::evictions, agent.name + " was told " + down.ShortDebugString());
  }
  auto welcome = wire::FromProto(down.welcome());
  if (!welcome) return Note(&Trouble::sessions_lost, welcome.error().ToString());
  agent.id = welcome->agent;
  agent.heartbeat = welcome->heartbeat;
  Beat(index);
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    Register(index, rank, [this, last = rank + 1 == shape_.ranks] {
      if (last) OpenNext();
      if (++registered_ == shape_.agents * shape_.ranks) done_();
    });
  }
}

void LoadClients::Beat(uint32_t index) {
  Agent& agent = agents_[index];
  agent.session->Heartbeat();
  calls_->PostAfter(agent.heartbeat * 3 / 4, [this, index] { Beat(index); });
}

void LoadClients::Register(uint32_t index, uint32_t rank, std::function<void()> then) {
  const Agent& agent = agents_[index];
  control::RegisterRequest request;
  request.agent = agent.id;
  request.job = "default";
  request.role = control::GroupRole::kEngine;
  request.group = agent.name;
  request.rank = rank;
  request.world_size = shape_.ranks;
  request.incarnation = Incarnation(agent.incarnation.value + 2 * rank);
  rpc::CallUnary<v1::RegisterResponse>(
      calls_, kCallDeadline, wire::ToProto(request),
      [&agent](auto* call, auto done) {
        agent.stub->async()->Register(&call->context, &call->request, &call->response, done);
      },
      [this, then = std::move(then)](const Result<v1::RegisterResponse>& response) {
        if (!response) Note(&Trouble::calls_failed, response.error().ToString());
        then();
      });
}

void LoadClients::Call(uint32_t in_flight) {
  stopped_ = false;
  for (uint32_t i = 0; i < in_flight; ++i) CallAgain();
}

void LoadClients::CallAgain() {
  if (stopped_) return;
  const Nanos start = SystemClock().Now();
  Register(
      static_cast<uint32_t>(random_() % shape_.agents),
      static_cast<uint32_t>(random_() % shape_.ranks), [this, start] {
        call_seconds_.push_back(std::chrono::duration<float>(SystemClock().Now() - start).count());
        CallAgain();
      });
}

void LoadClients::Stop() { stopped_ = true; }

void LoadClients::Note(uint64_t Trouble::*count, const std::string& what) {
  if (trouble_.first.empty()) trouble_.first = what;
  ++(trouble_.*count);
}

}  // namespace weightwire::load
