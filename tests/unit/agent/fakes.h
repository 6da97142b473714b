#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/agent/agent.h"
#include "tests/support/sim_executor.h"

/// Stand-ins for what an agent talks to: they record calls and answer as told.
namespace weightwire::agent {

class FakeCoordinator final : public control::CoordinatorPort {
 public:
  void OpenSession(control::AgentHello hello, control::AgentPort* port,
                   control::Reply<control::AgentWelcome> reply) override {
    opened_at.push_back(clock.Now());
    hellos.push_back(std::move(hello));
    if (!open_answer.ok()) return reply(Fail(open_answer));
    agent_port = port;
    reply(control::AgentWelcome{AgentId{++agents}, 1, heartbeat, 5 * heartbeat, history});
  }
  void CloseSession(AgentId agent) override { closed.push_back(agent); }
  void Heartbeat(AgentId agent, control::Beat told) override {
    beats.emplace_back(clock.Now(), agent);
    troubles = std::move(told.troubles);
    receiving = std::move(told.receiving);
  }
  void Register(control::RegisterRequest request,
                control::Reply<control::RegisterReply> reply) override {
    registered.push_back(request);
    auto answer = [this, request, reply = std::move(reply)] {
      if (!register_answer.ok()) return reply(Fail(register_answer));
      auto [rank, fresh] = ids.try_emplace({request.group, request.rank}, ParticipantId(next_id));
      if (fresh) ++next_id;
      reply(control::RegisterReply{{rank->second, request.incarnation}});
    };
    hold_replies ? held.push_back(std::move(answer)) : answer();
  }
  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override {
    submitted.push_back(submission.member);
    auto answer = [this, submission = std::move(submission), reply = std::move(reply)] {
      if (!layout_answer.ok()) return reply(Fail(layout_answer));
      reply(
          control::LayoutReply{std::make_shared<const layout::RankLayout>(*submission.layout), {}});
    };
    hold_layouts ? held.push_back(std::move(answer)) : answer();
  }
  void Publish(control::PublishRequest request, control::Done done) override {
    published.push_back(request);
    auto answer = [this, done = std::move(done)] { done(publish_answer); };
    hold_replies ? held.push_back(std::move(answer)) : answer();
  }
  void Withdraw(control::WithdrawRequest request, control::Done done) override {
    withdrawn.push_back(request);
    done(withdraw_answer);
  }
  void FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                  control::Reply<std::shared_ptr<const plan::RankSlice>> reply) override {
    ++fetches;
    auto answer = [this, key = std::tuple(plan, side, rank), reply = std::move(reply)] {
      auto slice = slices.find(key);
      if (slice == slices.end()) {
        return reply(Fail(Code::kNotFound, Reason::kNotRegistered, "no such plan"));
      }
      reply(std::make_shared<const plan::RankSlice>(slice->second));
    };
    hold_replies ? held.push_back(std::move(answer)) : answer();
  }
  void Report(AgentId agent, epoch::Report report) override {
    EXPECT_EQ(agent.value, agents);
    reports.push_back(std::move(report));
  }

  /// Gives the answers that were held back.
  void Answer() {
    for (auto& answer : std::exchange(held, {})) answer();
  }
  template <typename T>
  std::vector<T> All() const {
    std::vector<T> all;
    for (const auto& report : reports) {
      if (const T* one = std::get_if<T>(&report)) all.push_back(*one);
    }
    return all;
  }

  explicit FakeCoordinator(Clock& sim_clock) : clock(sim_clock) {}
  Clock& clock;
  Nanos heartbeat = std::chrono::seconds(1);
  JournalId history{5};
  Status open_answer, register_answer, layout_answer, publish_answer;
  bool hold_replies = false, hold_layouts = false;
  std::vector<std::function<void()>> held;
  control::AgentPort* agent_port = nullptr;
  uint32_t agents = 0;
  uint32_t next_id = 1;
  std::map<std::pair<std::string, uint32_t>, ParticipantId> ids;
  std::map<std::tuple<PlanId, plan::Side, uint32_t>, plan::RankSlice> slices;
  int fetches = 0;
  std::vector<Nanos> opened_at;
  std::vector<control::AgentHello> hellos;
  std::vector<AgentId> closed;
  std::vector<std::pair<Nanos, AgentId>> beats;
  control::Troubles troubles;  ///< of the last beat
  std::vector<control::Receiving> receiving;
  std::vector<control::RegisterRequest> registered;
  std::vector<epoch::Member> submitted;
  std::vector<control::PublishRequest> published;
  std::vector<control::WithdrawRequest> withdrawn;
  Status withdraw_answer;
  std::vector<epoch::Report> reports;
};

class FakeEngine final : public transfer::Engine {
 public:
  using Name = std::pair<Epoch, ParticipantId>;

  void AdmitTicket(const Ticket& ticket, Incarnation) override { tickets.push_back(ticket); }
  void WithdrawTicket(const Ticket& ticket, Incarnation) override {
    auto use = std::ranges::find(tickets, ticket);
    ASSERT_NE(use, tickets.end());
    tickets.erase(use);
  }
  void StartSource(transfer::SourceJob job, SourceDone done) override {
    const Name name{job.epoch, job.participant};
    sources.emplace(name, std::pair(std::move(job), std::move(done)));
  }
  void StartTarget(transfer::TargetJob job, TargetDone done) override {
    const Name name{job.epoch, job.participant};
    targets.emplace(name, std::pair(std::move(job), std::move(done)));
  }
  void Exclude(Epoch epoch, ParticipantId participant, const PlanId& plan,
               const std::vector<ParticipantId>& readers) override {
    excluded.emplace_back(Name{epoch, participant}, plan, readers);
  }
  /// The job ends at once; it lets go of its memory (and says so) only in EndDrains when these are
  /// held, as while a peer still reads.
  void Drain(Epoch epoch, ParticipantId participant, std::function<void()> drained) override {
    const Name name{epoch, participant};
    drains_asked.push_back(name);
    const Status why(Code::kAborted, Reason::kAbortRequested, "drained");
    if (auto job = sources.find(name); job != sources.end() && job->second.second) {
      std::exchange(job->second.second, {})(Fail(why));
    }
    if (auto job = targets.find(name); job != targets.end() && job->second.second) {
      std::exchange(job->second.second, {})(Fail(why));
    }
    drains.emplace_back(name, std::move(drained));
    if (!hold_drains) EndDrains();
  }
  Progress ProgressOf(Epoch epoch, ParticipantId participant) const override {
    return targets.contains({epoch, participant}) ? Progress{3, 10} : Progress{};
  }
  void Shutdown(std::function<void()> done) override { done(); }

  void EndDrains() {
    for (auto& [name, drained] : std::exchange(drains, {})) {
      sources.erase(name);
      targets.erase(name);
      drained();
    }
  }
  void FinishSource(Name name, Result<transfer::SourceReport> report) {
    std::exchange(sources.at(name).second, {})(std::move(report));
  }
  void FinishTarget(Name name, Result<transfer::TargetReport> report) {
    std::exchange(targets.at(name).second, {})(std::move(report));
  }

  bool hold_drains = false;
  std::vector<Ticket> tickets;
  std::map<Name, std::pair<transfer::SourceJob, SourceDone>> sources;
  std::map<Name, std::pair<transfer::TargetJob, TargetDone>> targets;
  std::vector<std::tuple<Name, PlanId, std::vector<ParticipantId>>> excluded;
  std::vector<Name> drains_asked;
  std::vector<std::pair<Name, std::function<void()>>> drains;
};

class GaugeSink final : public metrics::Sink {
 public:
  void DeclareCounter(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareGauge(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                        std::vector<metrics::Labels>) override {}
  void Add(std::string_view, double, const metrics::Labels&) override {}
  void Set(std::string_view gauge, double value, const metrics::Labels&) override {
    gauges[std::string(gauge)] = value;
  }
  void Observe(std::string_view, double, const metrics::Labels&) override {}
  std::map<std::string, double> gauges;
};

/// Writes down what it is told, in words.
class FakeApplication final : public Application {
 public:
  void OnReleased(Version version, Epoch epoch, const Status& why) override {
    Say("released v" + std::to_string(version.value) + " e" + std::to_string(epoch.value), why);
    if (when_released) when_released();
  }
  void OnCommitted(Epoch epoch, Epoch content, Version version, int buffer, bool leader,
                   const std::array<uint8_t, 16>&, uint64_t) override {
    Say("committed e" + std::to_string(epoch.value) + " content " + std::to_string(content.value) +
            " v" + std::to_string(version.value) + " buffer " + std::to_string(buffer) +
            (leader ? " leader" : ""),
        OkStatus());
    if (when_committed) when_committed();
  }
  void OnRoomWanted(Epoch epoch, Version version) override {
    told.push_back("room e" + std::to_string(epoch.value) + " v" + std::to_string(version.value));
    if (when_room_wanted) when_room_wanted();
  }
  void OnCopyCheck(uint64_t verification, Epoch content) override {
    told.push_back("check " + std::to_string(verification) + " of e" +
                   std::to_string(content.value));
  }
  void OnInstalled(Epoch epoch, Epoch content) override {
    Say("installed e" + std::to_string(epoch.value) + " content " + std::to_string(content.value),
        OkStatus());
  }
  void OnEvicted(const Status& why) override { Say("evicted", why); }

  std::vector<std::string> told;
  std::function<void()> when_released, when_committed, when_room_wanted;

 private:
  void Say(std::string text, const Status& why) {
    if (!why.ok()) text += " (" + std::string(ReasonName(why.reason())) + ")";
    told.push_back(std::move(text));
  }
};

}  // namespace weightwire::agent
