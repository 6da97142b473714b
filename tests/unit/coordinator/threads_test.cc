#include <gtest/gtest.h>

#include <future>

#include "server/base/strand_call.h"
#include "server/base/thread_executor.h"
#include "tests/unit/coordinator/fleet.h"

// The same objects on real threads: one strand, two workers. Run under TSan, this shows that layout
// and plan work shares nothing with the strand.
namespace weightwire::coordinator::testing {
namespace {

/// Appends become durable at once, that is in the strand's next task.
class PromptJournal final : public Journal {
 public:
  explicit PromptJournal(Executor& strand) : strand_(strand) {}
  void Append(JournalRecord, std::function<void(Status)> done) override {
    strand_.Post([done = std::move(done)] { done(OkStatus()); });
  }
  void OnHindered(std::function<void(Status)>) override {}
  Result<std::vector<JournalRecord>> Read() override { return std::vector<JournalRecord>{}; }

 private:
  Executor& strand_;
};

class QuietAgent final : public control::AgentPort {
 public:
  void OnCommand(epoch::Command command) override {
    auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
    if (prepare == nullptr || told_) return;
    told_ = true;
    prepared.set_value(std::move(*prepare));
  }
  void OnSessionLost(Status) override {}
  std::promise<epoch::PrepareCommand> prepared;

 private:
  bool told_ = false;
};

struct Threads : ::testing::Test {
  Threads() : journal(strand) {
    Options options;
    options.random_ticket = [] { return Ticket{1, 2, 3}; };
    OnStrand(strand, [&] {
      auto made =
          Coordinator::Make(options, SystemClock(), strand, workers, journal, metrics::Null());
      coordinator = std::move(*made);
    });
  }
  ~Threads() override {
    OnStrand(strand, [&] { coordinator.reset(); });
  }
  /// Calls on the strand and waits for the reply.
  template <typename T>
  Result<T> Ask(const std::function<void(control::Reply<T>)>& call) {
    std::promise<Result<T>> answer;
    strand.Post([&] { call([&](Result<T> r) { answer.set_value(std::move(r)); }); });
    return answer.get_future().get();
  }
  AgentId Open(control::AgentPort& port, uint64_t incarnation) {
    control::AgentHello hello;
    hello.job = "default";
    hello.incarnation = Incarnation(incarnation);
    return Ask<control::AgentWelcome>(
               [&](auto reply) { coordinator->OpenSession(hello, &port, reply); })
        ->agent;
  }
  epoch::Member Register(AgentId agent, control::GroupRole role, const std::string& group,
                         uint32_t rank, uint32_t world) {
    control::RegisterRequest request;
    request.agent = agent;
    request.job = "default";
    request.role = role;
    request.group = group;
    request.rank = rank;
    request.world_size = world;
    request.incarnation = Incarnation(100 + rank);
    return Ask<control::RegisterReply>([&](auto reply) { coordinator->Register(request, reply); })
        ->member;
  }

  ThreadExecutor strand{"strand", 1};
  ThreadExecutor workers{"workers", 2};
  PromptJournal journal;
  std::unique_ptr<Coordinator> coordinator;
};

TEST_F(Threads, RanksThatSubmitAtOnceArePlannedOnTheWorkers) {
  constexpr uint32_t kRanks = 5;
  QuietAgent trainer, engine;
  const AgentId trainer_id = Open(trainer, 1);
  const AgentId engine_id = Open(engine, 2);
  std::vector<std::pair<epoch::Member, layout::RankLayout>> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back(Register(trainer_id, control::GroupRole::kTrainer, "trainer", rank, kRanks),
                       RowShard(SmallModel(), rank, kRanks));
  }
  ranks.emplace_back(Register(engine_id, control::GroupRole::kEngine, "engine-a", 0, 1),
                     RowShard(SmallModel(), 0, 1));
  std::vector<std::future<Result<control::LayoutReply>>> replies;
  for (const auto& [member, shard] : ranks) {
    control::LayoutSubmission submission;
    submission.member = member;
    submission.canonical = SmallModel();
    submission.layout = shard;
    auto answer = std::make_shared<std::promise<Result<control::LayoutReply>>>();
    replies.push_back(answer->get_future());
    strand.Post([this, submission, answer] {
      coordinator->SubmitLayout(submission, [answer](auto r) { answer->set_value(std::move(r)); });
    });
  }
  for (auto& reply : replies) ASSERT_TRUE(reply.get().has_value());
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    control::PublishRequest request;
    request.member = ranks[rank].first;
    request.version = Version(1);
    request.deadline = std::chrono::minutes(10);
    std::promise<Status> answer;
    strand.Post([&] { coordinator->Publish(request, [&](Status s) { answer.set_value(s); }); });
    ASSERT_TRUE(answer.get_future().get().ok());
  }
  const epoch::PrepareCommand prepare = engine.prepared.get_future().get();
  EXPECT_EQ(prepare.sources.size(), kRanks);
  const auto slice = Ask<std::shared_ptr<const plan::RankSlice>>([&](auto reply) {
    coordinator->FetchSlice(prepare.assignments.at(0).plan, plan::Side::kTarget, 0, reply);
  });
  ASSERT_TRUE(slice.has_value());
  EXPECT_EQ((*slice)->streams.size(), kRanks);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
