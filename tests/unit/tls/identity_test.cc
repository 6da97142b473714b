#include "server/tls/identity.h"

#include <gtest/gtest.h>

namespace weightwire::tls {
namespace {

TEST(Identity, OfEveryRoleReadsBack) {
  for (Role role : {Role::kTrainer, Role::kEngine, Role::kAgent, Role::kOperator, Role::kMetrics,
                    Role::kCoordinator}) {
    for (std::optional<uint32_t> rank : {std::optional<uint32_t>(), {0u}, {4'294'967'295u}}) {
      const Identity identity{"prod.example", "train-1", "rl_7.b", role, rank};
      const auto read = ParseIdentity(identity.Uri());
      ASSERT_TRUE(read.has_value()) << read.error().ToString();
      EXPECT_EQ(*read, identity);
    }
  }
  EXPECT_EQ((Identity{"d", "n", "j", Role::kEngine, 3}.Uri()),
            "spiffe://d/ns/n/job/j/role/engine/rank/3");
}

TEST(Identity, AnythingElseIsNobody) {
  for (const char* uri : {"",
                          "spiffe://",
                          "spiffe://d",
                          "https://d/ns/n/job/j/role/engine",
                          "spiffe://d/ns/n/job/j/role",
                          "spiffe://d/ns/n/job/j/role/",
                          "spiffe://d/ns/n/job/j/role/root",
                          "spiffe://d/ns/n/job/j/role/Engine",
                          "spiffe://d/ns//job/j/role/engine",
                          "spiffe:///ns/n/job/j/role/engine",
                          "spiffe://d/ns/n/job/j/role/engine/",
                          "spiffe://d/ns/n/job/j/role/engine/rank",
                          "spiffe://d/ns/n/job/j/role/engine/rank/",
                          "spiffe://d/ns/n/job/j/role/engine/rank/-1",
                          "spiffe://d/ns/n/job/j/role/engine/rank/01",
                          "spiffe://d/ns/n/job/j/role/engine/rank/4294967296",
                          "spiffe://d/ns/n/job/j/role/engine/rank/1/x",
                          "spiffe://d/ns/n/job/j/role/engine/x/1",
                          "spiffe://d/ns/n/job/a%2fb/role/engine",
                          "spiffe://d/ns/n/job/j?/role/engine",
                          "spiffe://d/job/j/ns/n/role/engine",
                          "xspiffe://d/ns/n/job/j/role/engine",
                          "spiffe://d/ns/n/job/j/role/engine\n"}) {
    const auto read = ParseIdentity(uri);
    ASSERT_FALSE(read.has_value()) << uri;
    EXPECT_EQ(read.error().code(), Code::kUnauthenticated);
  }
  EXPECT_FALSE(ParseIdentity("spiffe://d/ns/n/job/" + std::string(129, 'j') + "/role/engine"));
}

}  // namespace
}  // namespace weightwire::tls
