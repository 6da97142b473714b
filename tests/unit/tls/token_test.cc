#include "server/tls/token.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace weightwire::tls {
namespace {

constexpr char kKey[] = "0123456789abcdef0123456789abcdef";
constexpr char kOther[] = "fedcba9876543210fedcba9876543210";
constexpr int64_t kNow = 1'700'000'000;
const Identity kTrainer{"prod.example", "train", "rl", Role::kTrainer, 2, 5};

class Tokens : public ::testing::Test {
 protected:
  Tokens() : path_(::testing::TempDir() + "token-key-" + std::to_string(getpid())) { Write(kKey); }
  ~Tokens() override { std::filesystem::remove(path_); }

  /// Another file in its place, as a mounted secret changes.
  void Write(const std::string& text) {
    std::ofstream(path_ + ".new") << text;
    std::filesystem::rename(path_ + ".new", path_);
  }
  std::string Mint(int64_t expires_s = kNow + 60) {
    return keys_.Mint(kTrainer, expires_s).value();
  }
  Code Verdict(const std::string& text, int64_t now_s = kNow) {
    auto token = keys_.Verify(text, now_s);
    return token ? Code::kOk : token.error().code();
  }

  const std::string path_;
  TokenKeys keys_{path_};
};

TEST_F(Tokens, SayWhoTheyAreOf) {
  const auto token = keys_.Verify(Mint(), kNow);
  ASSERT_TRUE(token.has_value()) << token.error().ToString();
  EXPECT_EQ(token->identity, kTrainer);
  EXPECT_EQ(token->expires_s, kNow + 60);
  EXPECT_EQ(token->id.size(), 32u);
  EXPECT_NE(Mint(), Mint()) << "each has an id of its own";
}

/// From Python's hmac: what another implementation makes is good here.
TEST_F(Tokens, AreWhatAnotherImplementationMakes) {
  const std::string text =
      "ww1;spiffe://prod.example/ns/train/job/rl/role/trainer/rank/2-5;1700000060;"
      "000102030405060708090a0b0c0d0e0f;"
      "2443a7563e6b7fd1d39e9f6383c472f217a2a55e933c913501432b65a154be69";
  EXPECT_EQ(Verdict(text), Code::kOk);
}

TEST_F(Tokens, NoCharacterCanChange) {
  const std::string good = Mint();
  for (size_t i = 0; i < good.size(); ++i) {
    for (char other : {'0', '1', ';', 'a'}) {
      if (good[i] == other) continue;
      std::string bad = good;
      bad[i] = other;
      EXPECT_EQ(Verdict(bad), Code::kUnauthenticated) << bad;
    }
    EXPECT_EQ(Verdict(good.substr(0, i)), Code::kUnauthenticated);
  }
  EXPECT_EQ(Verdict(good + " "), Code::kUnauthenticated);
  EXPECT_EQ(Verdict(std::string(5'000, 'a')), Code::kUnauthenticated);
}

TEST_F(Tokens, EndWhenTheySay) {
  const std::string token = Mint(kNow + 60);
  EXPECT_EQ(Verdict(token, kNow + 59), Code::kOk);
  EXPECT_EQ(Verdict(token, kNow + 60), Code::kUnauthenticated);
  EXPECT_NE(keys_.Verify(token, kNow + 60).error().message().find("expired"), std::string::npos);
}

TEST_F(Tokens, AKeyIsChangedInTwoStepsWhileTheProcessLives) {
  const std::string old = Mint();
  Write(std::string(kOther) + "\n" + kKey + "\n");
  EXPECT_EQ(Verdict(old), Code::kOk);
  const std::string fresh = Mint();
  Write(std::string(kOther) + "\n");
  EXPECT_EQ(Verdict(old), Code::kUnauthenticated);
  EXPECT_EQ(Verdict(fresh), Code::kOk);
}

TEST_F(Tokens, AFileThatVanishesLeavesTheKeysThatItHad) {
  const std::string token = Mint();
  std::filesystem::remove(path_);
  EXPECT_EQ(Verdict(token), Code::kOk);
}

TEST_F(Tokens, KeysThatAreNoneAreRefused) {
  for (const char* text : {"", "\n\n", "short", "0123456789abcdef0123456789abcde"}) {
    Write(text);
    const Status status = TokenKeys(path_).Check();
    EXPECT_EQ(status.reason(), Reason::kConfigInvalid) << text;
    EXPECT_NE(status.remedy().find("openssl rand"), std::string::npos);
  }
  EXPECT_EQ(TokenKeys("/nowhere/key").Check().reason(), Reason::kConfigInvalid);
}

TEST_F(Tokens, AFileOfOneMayEndInALine) {
  const std::string token = Mint();
  Write("  " + token + "\r\n");
  EXPECT_EQ(TokenFile(path_).Text().value(), token);
}

TEST(TokenIdentity, RangesAreForTokens) {
  const std::string uri = "spiffe://d/ns/n/job/j/role/engine/rank/";
  EXPECT_FALSE(ParseIdentity(uri + "2-5").has_value());
  const auto range = ParseIdentity(uri + "2-5", Ranges::kAllowed);
  ASSERT_TRUE(range.has_value());
  EXPECT_EQ(range->Uri(), uri + "2-5");
  for (uint32_t rank = 0; rank < 8; ++rank) EXPECT_EQ(range->Covers(rank), 2 <= rank && rank <= 5);
  const auto one = ParseIdentity(uri + "0", Ranges::kAllowed);
  ASSERT_TRUE(one.has_value());
  EXPECT_TRUE(one->Covers(0));
  EXPECT_FALSE(one->Covers(1));
  EXPECT_TRUE((Identity{"d", "n", "j", Role::kEngine, {}}.Covers(77)));
  for (const char* bad : {"5-2", "2-2", "-2", "2-", "2-3-4", "02-3", "2-03", "a-b"}) {
    EXPECT_FALSE(ParseIdentity(uri + bad, Ranges::kAllowed).has_value()) << bad;
  }
}

}  // namespace
}  // namespace weightwire::tls
