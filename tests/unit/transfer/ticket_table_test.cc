#include "server/transfer/ticket_table.h"

#include <gtest/gtest.h>

namespace weightwire::transfer {
namespace {

const Ticket kOne = {1};
const Ticket kTwo = {2};
constexpr Incarnation kSelf(10), kCaller(20), kOther(30);

transport::CallerHello Naming(const Ticket& ticket, Incarnation caller,
                              Incarnation callee = kSelf) {
  transport::CallerHello said;
  said.caller = caller;
  said.callee = callee;
  said.shown = transport::NameOf(ticket);
  return said;
}

/// Why the table refuses it; kNone when it does not.
Reason Refusal(const TicketTable& table, const transport::CallerHello& said) {
  const auto ticket = table.Check(said);
  return ticket.has_value() ? Reason::kNone : ticket.error().reason();
}

TEST(TicketTable, LetsInOnlyTheCallerThatATicketWasAdmittedFor) {
  TicketTable table(kSelf, true);
  EXPECT_EQ(Refusal(table, Naming(kOne, kCaller)), Reason::kTicketRejected);
  table.Admit(kOne, kCaller);
  EXPECT_EQ(table.Check(Naming(kOne, kCaller)).value(), kOne);
  EXPECT_EQ(Refusal(table, Naming(kOne, kOther)), Reason::kTicketRejected);
  EXPECT_EQ(Refusal(table, Naming(kTwo, kCaller)), Reason::kTicketRejected);
}

TEST(TicketTable, RefusesAHelloForAnotherLifeOfThisProcess) {
  TicketTable table(kSelf, true);
  table.Admit(kOne, kCaller);
  EXPECT_EQ(Refusal(table, Naming(kOne, kCaller, kOther)), Reason::kStaleIncarnation);
}

TEST(TicketTable, ForgetsWithdrawnTicketsAndKnowsCallersWhileAnyIsLeft) {
  TicketTable table(kSelf, true);
  table.Admit(kOne, kCaller);
  table.Admit(kTwo, kCaller);
  table.Withdraw(kOne, kCaller);
  EXPECT_EQ(Refusal(table, Naming(kOne, kCaller)), Reason::kTicketRejected);
  EXPECT_TRUE(table.Knows(kCaller));
  table.Withdraw(kTwo, kCaller);
  EXPECT_FALSE(table.Knows(kCaller));
  table.Withdraw(kTwo, kCaller);
  EXPECT_FALSE(table.Knows(kCaller));
}

TEST(TicketTable, MovesATicketThatIsAdmittedForAnotherCaller) {
  TicketTable table(kSelf, true);
  table.Admit(kOne, kCaller);
  table.Admit(kOne, kOther);
  EXPECT_FALSE(table.Knows(kCaller));
  EXPECT_EQ(table.Check(Naming(kOne, kOther)).value(), kOne);
  table.Withdraw(kOne, kCaller);
  EXPECT_EQ(table.Check(Naming(kOne, kOther)).value(), kOne) << "it is not the former caller's";
}

TEST(TicketTable, KeepsATicketUntilEachUseIsWithdrawn) {
  TicketTable table(kSelf, true);
  table.Admit(kOne, kCaller);
  table.Admit(kOne, kCaller);
  table.Withdraw(kOne, kCaller);
  EXPECT_EQ(table.Check(Naming(kOne, kCaller)).value(), kOne);
  table.Withdraw(kOne, kCaller);
  EXPECT_EQ(Refusal(table, Naming(kOne, kCaller)), Reason::kTicketRejected);
}

TEST(TicketTable, RefusesEveryoneOnceShutDown) {
  TicketTable table(kSelf, true);
  table.Admit(kOne, kCaller);
  table.ShutDown();
  EXPECT_EQ(Refusal(table, Naming(kOne, kCaller)), Reason::kShuttingDown);
}

TEST(TicketTable, LetsInWhoShowsItsTicketOnlyWhereNoProofIsRequired) {
  transport::CallerHello shown = Naming(kOne, kCaller);
  shown.protocol_min = shown.protocol_max = transport::kProtocolProof - 1;
  shown.shown = kOne;
  TicketTable lenient(kSelf, false);
  lenient.Admit(kOne, kCaller);
  EXPECT_EQ(lenient.Check(shown).value(), kOne);
  TicketTable strict(kSelf, true);
  strict.Admit(kOne, kCaller);
  EXPECT_EQ(Refusal(strict, shown), Reason::kProtocolVersion);
  shown.shown = transport::NameOf(kOne);
  EXPECT_EQ(Refusal(lenient, shown), Reason::kTicketRejected) << "the name is not the ticket";
}

}  // namespace
}  // namespace weightwire::transfer
