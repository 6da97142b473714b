#include "server/agent/spans.h"

#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

using std::chrono::milliseconds;

class AgentSpans : public AgentTest {};

TEST_F(AgentSpans, EachReportSaysHowLongItsPartTook) {
  std::vector<Note> notes;
  options.notes = [&](const Note& note) { notes.push_back(note); };
  Start();
  const auto rollout = StagedEngine();
  epoch::PrepareCommand prepare = TargetPrepare(*rollout, 1, 7);
  prepare.trace_id.fill(0x5a);
  Command(prepare);
  const auto prepared = coordinator.All<epoch::PreparedReport>().at(0);
  ASSERT_EQ(prepared.spans.size(), 1u);
  EXPECT_EQ(prepared.spans[0].name, "prepare");

  Command(epoch::TransferCommand{Epoch{1}, rollout->member});
  const Nanos began = sim.Now();
  sim.RunFor(milliseconds(1500));
  transfer::TargetReport report = Verified();
  report.spans = {
      {"read", began + milliseconds(10), began + milliseconds(400), 50, ParticipantId{900}, "tcp"},
      {"verify", began + milliseconds(20), began + milliseconds(500), 58, {}, {}}};
  engine.FinishTarget(JobOf(*rollout, 1), report);
  const auto staged = coordinator.All<epoch::StagedReport>().at(0);
  ASSERT_EQ(staged.spans.size(), 3u);
  const epoch::Span& whole = staged.spans[0];
  EXPECT_EQ(whole,
            (epoch::Span{"stage", began / std::chrono::microseconds(1), 1'500'000, 58, {}, ""}));
  EXPECT_EQ(staged.spans[1].source, ParticipantId{900});
  EXPECT_EQ(staged.spans[1].transport, "tcp");
  EXPECT_EQ(staged.spans[1].duration_us, 390'000);
  for (const epoch::Span& part : staged.spans) {
    EXPECT_GE(part.begin_us, whole.begin_us) << part.name;
    EXPECT_LE(part.begin_us + part.duration_us, whole.begin_us + whole.duration_us) << part.name;
  }

  Commit(*rollout, 1, 7);
  sim.RunFor(milliseconds(30));
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout->handle, Epoch{1}, 0.01).ok());
  const auto applied = coordinator.All<epoch::SwappedReport>().at(0);
  ASSERT_EQ(applied.spans.size(), 1u);
  EXPECT_EQ(applied.spans[0].name, "swap");
  EXPECT_EQ(applied.spans[0].duration_us, 30'000);

  ASSERT_EQ(notes.size(), 3u);
  for (const Note& note : notes) {
    EXPECT_EQ(note.trace_id, prepare.trace_id);
    EXPECT_EQ(note.version, Version{7});
    EXPECT_EQ(note.rank, "engine-a/0");
  }
}

TEST_F(AgentSpans, AnAbortTellsOfItsOwnDrainOnly) {
  Start();
  const auto rollout = StagedEngine();
  Command(TargetPrepare(*rollout, 1, 7));
  Command(epoch::TransferCommand{Epoch{1}, rollout->member});
  const Status why(Code::kAborted, Reason::kAbortRequested, "aborted");
  Command(epoch::AbortCommand{Epoch{1}, rollout->member, why});
  auto drained = coordinator.All<epoch::DrainedReport>();
  ASSERT_EQ(drained.size(), 1u);
  ASSERT_EQ(drained[0].spans.size(), 1u);
  EXPECT_EQ(drained[0].spans[0].name, "drain");
  Command(epoch::AbortCommand{Epoch{2}, rollout->member, why});
  drained = coordinator.All<epoch::DrainedReport>();
  ASSERT_EQ(drained.size(), 2u);
  EXPECT_THAT(drained[1].spans, IsEmpty()) << "it never ran here";
}

TEST(Spans, OfTooManyPartsTheLongestAreTold) {
  std::vector<transfer::WorkSpan> parts;
  for (int i = 0; i < 200; ++i) {
    parts.push_back({"read", Nanos(0), milliseconds(i), 1, {}, {}});
  }
  const auto spans = WithParts(SpanOf("stage", Nanos(0), milliseconds(500)), parts);
  ASSERT_EQ(spans.size(), epoch::kSpansMax);
  EXPECT_EQ(spans[0].name, "stage");
  EXPECT_EQ(spans[1].duration_us, 199'000);
  EXPECT_EQ(spans.back().duration_us, 137'000);
}

}  // namespace
}  // namespace weightwire::agent
