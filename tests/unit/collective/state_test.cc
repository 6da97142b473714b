#include <gtest/gtest.h>

#include <algorithm>

#include "client/collective/collective_state.h"

namespace weightwire::collective {
namespace {

Status Why(const char* text) { return Status(Code::kAborted, Reason::kMemberLost, text); }

/// A machine that was led to `state`, under epoch 4.
CollectiveState At(State state) {
  CollectiveState machine;
  if (state == State::kUnformed) return machine;
  if (state == State::kClosed) {
    EXPECT_TRUE(machine.Close());
    return machine;
  }
  EXPECT_TRUE(machine.BeginForm(4).ok());
  if (state == State::kForming) return machine;
  EXPECT_TRUE(machine.Done());
  if (state == State::kReady) return machine;
  EXPECT_TRUE(machine.BeginOperation().ok());
  if (state == State::kRunning) return machine;
  EXPECT_TRUE(machine.Fail(Why("led there")));
  if (state == State::kStuck) machine.Released(false);
  return machine;
}

const State kAll[] = {State::kUnformed, State::kForming, State::kReady, State::kRunning,
                      State::kAborting, State::kStuck,   State::kClosed};

TEST(CollectiveState, AllowsEachStepFromItsStatesOnly) {
  for (State from : kAll) {
    SCOPED_TRACE(StateName(from));
    auto in = [&](std::initializer_list<State> states) {
      return std::find(states.begin(), states.end(), from) != states.end();
    };
    CollectiveState form = At(from), operation = At(from), done = At(from), fail = At(from),
                    close = At(from);
    ASSERT_EQ(form.state(), from);
    EXPECT_EQ(form.BeginForm(5).ok(), in({State::kUnformed}));
    EXPECT_EQ(operation.BeginOperation().ok(), in({State::kReady}));
    EXPECT_EQ(done.Done(), in({State::kForming, State::kRunning}));
    EXPECT_EQ(done.state(), in({State::kForming, State::kRunning}) ? State::kReady : from);
    EXPECT_EQ(fail.Fail(Why("x")), in({State::kForming, State::kReady, State::kRunning}));
    EXPECT_EQ(close.Close(), in({State::kUnformed, State::kStuck, State::kClosed}));
    if (!in({State::kUnformed})) {
      EXPECT_EQ(form.state(), from) << "a refusal changes nothing";
    }
    if (!in({State::kReady})) {
      EXPECT_EQ(operation.state(), from);
    }
  }
}

TEST(CollectiveState, FormsNoEpochTwice) {
  CollectiveState machine = At(State::kAborting);
  machine.Released(true);
  for (uint64_t epoch : {3u, 4u}) {
    EXPECT_EQ(machine.BeginForm(epoch).reason(), Reason::kStaleEpoch);
  }
  EXPECT_TRUE(machine.BeginForm(5).ok());
  EXPECT_EQ(machine.epoch(), 5u);
}

TEST(CollectiveState, KeepsTheFirstReasonAndTellsIt) {
  CollectiveState machine = At(State::kRunning);
  EXPECT_TRUE(machine.Fail(Why("rank 3 is gone")));
  EXPECT_FALSE(machine.Fail(Why("and then that")));
  EXPECT_EQ(machine.why().message(), "rank 3 is gone");
  machine.Released(true);
  const Status refused = machine.BeginOperation();
  EXPECT_EQ(refused.reason(), Reason::kNotReady);
  EXPECT_EQ(refused.message(),
            "cannot run an operation: the collective is unformed, since epoch 4 was aborted: "
            "rank 3 is gone");
  EXPECT_TRUE(machine.BeginForm(5).ok());
  EXPECT_TRUE(machine.why().ok());
}

TEST(CollectiveState, StuckSaysThatTheProcessMustEnd) {
  CollectiveState machine = At(State::kStuck);
  EXPECT_NE(machine.BeginForm(9).remedy().find("end this process"), std::string::npos);
}

}  // namespace
}  // namespace weightwire::collective
