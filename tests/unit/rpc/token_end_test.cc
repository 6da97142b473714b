#include "server/rpc/token_end.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/sim_executor.h"

namespace weightwire::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr char kKey[] = "0123456789abcdef0123456789abcdef";
constexpr char kOther[] = "fedcba9876543210fedcba9876543210";
const tls::Identity kOperator{"prod.example", "train", "rl", tls::Role::kOperator, {}};

struct Stream final : EndableStream {
  void End(Status status) override { ended.push_back(std::move(status)); }
  std::vector<Status> ended;
};

class TokenEnd : public ::testing::Test {
 protected:
  TokenEnd() : path_(::testing::TempDir() + "token-end-" + std::to_string(getpid())) {
    Write(kKey);
    runtime_.tokens = std::make_shared<tls::TokenKeys>(path_);
    executor_.JumpWall(0.75);  // a token's end is a whole second, which timers must not round
  }
  ~TokenEnd() override { std::filesystem::remove(path_); }

  /// Another file in its place, as a mounted secret changes.
  void Write(const std::string& text) {
    std::ofstream(path_ + ".new") << text;
    std::filesystem::rename(path_ + ".new", path_);
  }
  /// Of a stream that is opened now with a token that expires in `life`, less what is over of this
  /// second.
  StreamToken Open(int64_t life) {
    const auto now_s = static_cast<int64_t>(executor_.WallSeconds());
    StreamToken token(runtime_, runtime_.tokens->Mint(kOperator, now_s + life).value());
    return token;
  }

  testing::SimExecutor executor_;
  const std::string path_;
  Runtime runtime_{executor_, executor_, metrics::Null()};
  std::shared_ptr<Stream> stream_ = std::make_shared<Stream>();
};

TEST_F(TokenEnd, IsTheEndOfItsStreamToTheMillisecond) {
  const StreamToken token = Open(60);
  token.EndInTime(stream_);
  executor_.RunFor(milliseconds(59'249));
  EXPECT_TRUE(stream_->ended.empty());
  EXPECT_TRUE(token.Check().ok());
  executor_.RunFor(milliseconds(2));
  ASSERT_EQ(stream_->ended.size(), 1u);
  const Status& why = stream_->ended.front();
  EXPECT_EQ(why, tls::TokenExpired({kOperator, 0, ""})) << "as everybody with such a token hears";
  EXPECT_EQ(why.code(), Code::kUnauthenticated);
  EXPECT_THAT(why.remedy(), HasSubstr("wwctl token"));
  EXPECT_EQ(token.Check(), why);
  EXPECT_TRUE(executor_.idle()) << "nothing looks for it any more";
}

TEST_F(TokenEnd, ComesWithTheKeyThatSignedIt) {
  const StreamToken token = Open(3'600);
  token.EndInTime(stream_);
  Write(std::string(kOther) + "\n" + kKey + "\n");
  executor_.RunFor(seconds(10));
  EXPECT_TRUE(stream_->ended.empty()) << "the old key checks still";
  Write(kOther);
  EXPECT_EQ(token.Check().code(), Code::kUnauthenticated) << "its next message sees it at once";
  executor_.RunFor(seconds(2));
  ASSERT_EQ(stream_->ended.size(), 1u);
  EXPECT_THAT(stream_->ended.front().message(), HasSubstr("was not signed"));
}

TEST_F(TokenEnd, IsThatOfTheWallClockWhichMayBeSet) {
  const StreamToken token = Open(3'600);
  token.EndInTime(stream_);
  executor_.JumpWall(4'000);
  executor_.RunFor(seconds(2));
  EXPECT_EQ(stream_->ended.size(), 1u);
}

TEST_F(TokenEnd, LetsAStreamGoThatEndedBefore) {
  const StreamToken token = Open(3'600);
  token.EndInTime(stream_);
  const std::weak_ptr<Stream> gone = std::exchange(stream_, nullptr);
  EXPECT_TRUE(gone.expired());
  executor_.RunFor(seconds(2));
  EXPECT_TRUE(executor_.idle()) << "no timer is left of it";
}

TEST_F(TokenEnd, IsNoneOfAStreamOpenedByCertificate) {
  const StreamToken none(runtime_, std::nullopt);
  none.EndInTime(stream_);
  EXPECT_TRUE(executor_.idle());
  EXPECT_TRUE(none.Check().ok());
}

}  // namespace
}  // namespace weightwire::rpc
