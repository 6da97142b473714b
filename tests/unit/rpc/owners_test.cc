#include "server/rpc/owners.h"

#include <gtest/gtest.h>

namespace weightwire::rpc {
namespace {

Caller Of(tls::Role role, std::optional<uint32_t> rank = {}) {
  return tls::Identity{"prod.example", "train", "rl", role, rank};
}
const Caller kTrainer = Of(tls::Role::kTrainer);
const Caller kEngine = Of(tls::Role::kEngine);
constexpr AgentId kAgent(7);
constexpr Incarnation kLife(70);
const epoch::Member kMember{ParticipantId(3), Incarnation(30)};

control::RegisterRequest Place(control::GroupRole role, uint32_t rank) {
  control::RegisterRequest out;
  out.role = role;
  out.group = "group";
  out.rank = rank;
  return out;
}

Owners WithTrainer() {
  Owners owners;
  owners.Opened(kTrainer, kLife, kAgent);
  owners.Registered(kAgent, kMember);
  return owners;
}

TEST(Owners, OnlyWhoBroughtItMayNameIt) {
  const Owners owners = WithTrainer();
  EXPECT_TRUE(owners.Check(kTrainer, kAgent).ok());
  EXPECT_TRUE(owners.Check(kTrainer, kMember).ok());
  EXPECT_EQ(owners.Check(kEngine, kAgent).code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.Check(kEngine, kMember).code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.Check(Of(tls::Role::kTrainer, 1), kMember).code(), Code::kPermissionDenied);
}

TEST(Owners, AnAgentIsNotTakenOverByAnotherIdentity) {
  const Owners owners = WithTrainer();
  EXPECT_EQ(owners.CheckOpen(kEngine, kLife).code(), Code::kPermissionDenied);
  EXPECT_TRUE(owners.CheckOpen(kTrainer, kLife).ok());
  EXPECT_TRUE(owners.CheckOpen(kEngine, Incarnation(71)).ok());
}

TEST(Owners, WhatEndedIsNobodys) {
  Owners owners = WithTrainer();
  owners.Ended(kAgent);
  EXPECT_TRUE(owners.Check(kEngine, kAgent).ok());
  EXPECT_TRUE(owners.Check(kEngine, kMember).ok());
  EXPECT_TRUE(owners.CheckOpen(kEngine, kLife).ok());
}

TEST(Owners, ASessionThatReplacedAnotherOutlivesItsEnd) {
  Owners owners = WithTrainer();
  owners.Opened(kTrainer, kLife, AgentId(8));
  owners.Ended(kAgent);
  EXPECT_FALSE(owners.CheckOpen(kEngine, kLife).ok());
  EXPECT_FALSE(owners.Check(kEngine, AgentId(8)).ok());
}

TEST(Owners, APlaceThatAnotherLifeTookIsItsOwn) {
  Owners owners = WithTrainer();
  owners.Opened(kEngine, Incarnation(71), AgentId(8));
  const epoch::Member next{kMember.id, Incarnation(31)};
  owners.Registered(AgentId(8), next);
  EXPECT_TRUE(owners.Check(kEngine, next).ok());
  EXPECT_FALSE(owners.Check(kTrainer, next).ok());
}

TEST(Owners, WithoutTlsEverythingMayBeNamed) {
  const Owners owners = WithTrainer();
  EXPECT_TRUE(owners.Check(std::nullopt, kAgent).ok());
  EXPECT_TRUE(CheckPlace(std::nullopt, Place(control::GroupRole::kTrainer, 0)).ok());
}

TEST(CheckPlace, ARoleTakesItsOwnSide) {
  using control::GroupRole;
  EXPECT_TRUE(CheckPlace(kTrainer, Place(GroupRole::kTrainer, 5)).ok());
  EXPECT_TRUE(CheckPlace(kEngine, Place(GroupRole::kEngine, 5)).ok());
  EXPECT_FALSE(CheckPlace(kTrainer, Place(GroupRole::kEngine, 5)).ok());
  EXPECT_FALSE(CheckPlace(kEngine, Place(GroupRole::kTrainer, 5)).ok());
  for (GroupRole role : {GroupRole::kTrainer, GroupRole::kEngine}) {
    EXPECT_TRUE(CheckPlace(Of(tls::Role::kAgent), Place(role, 5)).ok());
    EXPECT_FALSE(CheckPlace(Of(tls::Role::kOperator), Place(role, 5)).ok());
  }
}

TEST(CheckPlace, AnIdentityWithARankTakesThatRank) {
  using control::GroupRole;
  EXPECT_TRUE(CheckPlace(Of(tls::Role::kTrainer, 5), Place(GroupRole::kTrainer, 5)).ok());
  const Status other = CheckPlace(Of(tls::Role::kTrainer, 5), Place(GroupRole::kTrainer, 6));
  EXPECT_EQ(other.code(), Code::kPermissionDenied);
  EXPECT_EQ(other.rank(), "group/6");
}

}  // namespace
}  // namespace weightwire::rpc
