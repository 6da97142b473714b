#include "server/memory/uid_refusal.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "server/memory/region.h"

namespace weightwire::memory {
namespace {

constexpr uid_t kOther = 54'711;

/// What the function says in a process of `kOther`; it forks, so no thread may run.
std::string AsOther(const std::string& path) {
  int answer[2];
  EXPECT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(kOther) != 0 || setuid(kOther) != 0) _exit(2);
    const std::string text = UidRefusal(path);
    _exit(write(answer[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 3);
  }
  close(answer[1]);
  std::string text(4'096, '\0');
  const ssize_t got = read(answer[0], text.data(), text.size());
  close(answer[0]);
  text.resize(got < 0 ? 0 : static_cast<size_t>(got));
  int state = 0;
  EXPECT_EQ(waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
  return text;
}

class UidRefusalTest : public ::testing::Test {
 protected:
  UidRefusalTest() {
    char name[] = "/tmp/uid-wall-XXXXXX";
    folder_ = mkdtemp(name);
    chmod(folder_.c_str(), 0711);
    path_ = folder_ + "/agent.sock";
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    path_.copy(at.sun_path, sizeof at.sun_path - 1);
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(listen(listener_.get(), 4), 0);
    chmod(path_.c_str(), 0666);
  }
  ~UidRefusalTest() override { std::filesystem::remove_all(folder_); }

  /// The process that takes one connection, says `word` and closes it.
  pid_t Answer(const std::string& word) {
    const pid_t child = fork();
    if (child != 0) return child;
    const int fd = accept(listener_.get(), nullptr, nullptr);
    const bool said =
        send(fd, word.data(), word.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(word.size());
    close(fd);
    _exit(said ? 0 : 1);
  }

  std::string folder_, path_;
  UniqueFd listener_;
};

TEST_F(UidRefusalTest, NamesWhatKeepsAUserOut) {
  EXPECT_EQ(UidRefusal(path_), "") << "the own user's agent";
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const std::string own = "; this process has uid " + std::to_string(kOther);
  const std::string closed = " belongs to uid 0, which lets nobody else reach the agent" + own;
  chmod(path_.c_str(), 0600);
  EXPECT_EQ(AsOther(path_), path_ + closed);
  chmod(folder_.c_str(), 0700);
  EXPECT_EQ(AsOther(path_), folder_ + closed) << "what stops it first";
}

TEST_F(UidRefusalTest, TellsARefusalFromAnAgentThatSpeaks) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  pid_t agent = Answer("");
  EXPECT_EQ(AsOther(path_), "its agent has uid 0 and refuses other users; this process has uid " +
                                std::to_string(kOther));
  EXPECT_EQ(waitpid(agent, nullptr, 0), agent);
  agent = Answer("PRI");
  EXPECT_EQ(AsOther(path_), "");
  EXPECT_EQ(waitpid(agent, nullptr, 0), agent);
}

TEST_F(UidRefusalTest, IsNotTheReasonWhereNobodyListens) {
  listener_ = {};
  EXPECT_EQ(UidRefusal(path_), "");
  EXPECT_EQ(UidRefusal(folder_ + "/none.sock"), "");
  EXPECT_EQ(UidRefusal(std::string(200, 'x')), "");
}

}  // namespace
}  // namespace weightwire::memory
