#include "server/rpc/local_processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <utility>

#include "server/memory/fd_passing.h"
#include "tests/support/sim_executor.h"

namespace weightwire::rpc {
namespace {

/// A process of its own at one end of a socket, which it has made itself: by that the kernel names
/// it. It lives until this is destroyed.
class Child {
 public:
  Child() {
    int pair[2], way[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, way), 0);
    pid_ = fork();
    if (pid_ == 0) {
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) _exit(1);
      const std::array<std::byte, 1> byte{};
      if (!memory::SendWithFds(way[1], byte, std::array{pair[1]}).ok()) _exit(2);
      while (true) pause();
    }
    std::array<std::byte, 1> byte{};
    auto got = memory::ReceiveWithFds(way[0], byte);
    EXPECT_TRUE(got && got->fds.size() == 1);
    if (got && !got->fds.empty()) socket_ = std::move(got->fds[0]);
    close(way[0]);
    close(way[1]);
  }
  ~Child() { End(); }

  pid_t pid() const { return pid_; }
  int socket() const { return socket_.get(); }
  void Send(int signal) const { EXPECT_EQ(kill(pid_, signal), 0); }
  /// Until the kernel has stopped it, or let it go on.
  void Await(int options) const {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, options), pid_);
  }
  void End() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  memory::UniqueFd socket_;
};

TEST(LocalProcesses, AreSeenStoppedAndGoingOn) {
  testing::SimExecutor sim;
  LocalProcesses processes(sim);
  Child child;
  child.Send(SIGSTOP);
  child.Await(WUNTRACED);
  EXPECT_FALSE(processes.Stopped(child.pid()))
      << "it has not connected: the number may be another's";
  processes.Connected(child.socket());
  EXPECT_TRUE(processes.Stopped(child.pid()));
  child.Send(SIGCONT);
  child.Await(WCONTINUED);
  EXPECT_FALSE(processes.Stopped(child.pid()));
  EXPECT_FALSE(processes.Stopped(getpid()));
  EXPECT_FALSE(processes.Stopped(0));
  child.Send(SIGSTOP);
  child.Await(WUNTRACED);
  EXPECT_TRUE(processes.Stopped(child.pid()));
  const pid_t pid = child.pid();
  child.End();
  EXPECT_FALSE(processes.Stopped(pid)) << "it is dead, which is not stopped";
}

TEST(LocalProcesses, AreSeenEnded) {
  testing::SimExecutor sim;
  LocalProcesses processes(sim);
  Child child, zombie, stranger;
  processes.Connected(child.socket());
  processes.Connected(zombie.socket());
  EXPECT_FALSE(processes.Ended(child.pid()));
  child.Send(SIGSTOP);
  child.Await(WUNTRACED);
  EXPECT_FALSE(processes.Ended(child.pid())) << "it is stopped, which is not dead";
  const pid_t pid = child.pid(), strange = stranger.pid();
  child.End();
  EXPECT_TRUE(processes.Ended(pid));
  zombie.Send(SIGKILL);
  siginfo_t info{};
  EXPECT_EQ(waitid(P_PID, static_cast<id_t>(zombie.pid()), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(processes.Ended(zombie.pid())) << "nobody has waited for it, and it does not run";
  stranger.End();
  EXPECT_FALSE(processes.Ended(strange)) << "it has not connected: the number may be another's";
  EXPECT_FALSE(processes.Ended(0));
}

TEST(LocalProcesses, WhoWasRefusedIsToldForTenMinutes) {
  testing::SimExecutor sim;
  LocalProcesses processes(sim);
  EXPECT_TRUE(processes.Refusals().empty());
  processes.Refused(4'711);
  processes.Refused(4'712);
  sim.RunFor(std::chrono::minutes(9));
  const control::Troubles told = processes.Refusals();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].what.find("uid 4712"), std::string::npos) << told[0].what;
  EXPECT_NE(told[0].what.find("own uid is " + std::to_string(geteuid())), std::string::npos);
  EXPECT_EQ(told, processes.Refusals()) << "what does not change is told once";
  sim.RunFor(std::chrono::minutes(2));
  EXPECT_TRUE(processes.Refusals().empty());
}

}  // namespace
}  // namespace weightwire::rpc
