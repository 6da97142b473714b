#include "server/transfer/ticket_table.h"

#include <gtest/gtest.h>

namespace weightwire::transfer {
namespace {

const Ticket kOne = {1};
const Ticket kTwo = {2};
constexpr Incarnation kSelf(10), kCaller(20), kOther(30);

transport::Hello HelloWith(const Ticket& ticket, Incarnation caller, Incarnation callee = kSelf) {
  transport::Hello hello;
  hello.caller = caller;
  hello.callee = callee;
  hello.ticket = ticket;
  return hello;
}

TEST(TicketTable, LetsInOnlyTheCallerThatATicketWasAdmittedFor) {
  TicketTable table(kSelf);
  EXPECT_EQ(table.Check(HelloWith(kOne, kCaller)).reason(), Reason::kTicketRejected);
  table.Admit(kOne, kCaller);
  EXPECT_TRUE(table.Check(HelloWith(kOne, kCaller)).ok());
  EXPECT_EQ(table.Check(HelloWith(kOne, kOther)).reason(), Reason::kTicketRejected);
  EXPECT_EQ(table.Check(HelloWith(kTwo, kCaller)).reason(), Reason::kTicketRejected);
}

TEST(TicketTable, RefusesAHelloForAnotherLifeOfThisProcess) {
  TicketTable table(kSelf);
  table.Admit(kOne, kCaller);
  EXPECT_EQ(table.Check(HelloWith(kOne, kCaller, kOther)).reason(), Reason::kStaleIncarnation);
}

TEST(TicketTable, ForgetsWithdrawnTicketsAndKnowsCallersWhileAnyIsLeft) {
  TicketTable table(kSelf);
  table.Admit(kOne, kCaller);
  table.Admit(kTwo, kCaller);
  EXPECT_EQ(table.Withdraw(kOne), kCaller);
  EXPECT_EQ(table.Check(HelloWith(kOne, kCaller)).reason(), Reason::kTicketRejected);
  EXPECT_TRUE(table.Knows(kCaller));
  EXPECT_EQ(table.Withdraw(kTwo), kCaller);
  EXPECT_FALSE(table.Knows(kCaller));
  EXPECT_EQ(table.Withdraw(kTwo), Incarnation());
}

TEST(TicketTable, MovesATicketThatIsAdmittedForAnotherCaller) {
  TicketTable table(kSelf);
  table.Admit(kOne, kCaller);
  table.Admit(kOne, kOther);
  EXPECT_FALSE(table.Knows(kCaller));
  EXPECT_TRUE(table.Check(HelloWith(kOne, kOther)).ok());
}

TEST(TicketTable, RefusesEveryoneOnceShutDown) {
  TicketTable table(kSelf);
  table.Admit(kOne, kCaller);
  table.ShutDown();
  EXPECT_EQ(table.Check(HelloWith(kOne, kCaller)).reason(), Reason::kShuttingDown);
}

}  // namespace
}  // namespace weightwire::transfer
