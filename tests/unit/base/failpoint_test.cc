#include "server/base/failpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace weightwire {
namespace {

// The process is told of its file once, before the first crossing.
const std::string& Path() {
  static const std::string path = [] {
    std::string file = testing::TempDir() + "weightwire-failpoint-" + std::to_string(getpid());
    setenv("WEIGHTWIRE_FAILPOINT", file.c_str(), 1);
    return file;
  }();
  return path;
}

class Failpoint : public testing::Test {
 protected:
  Failpoint() { Disarm(); }
  ~Failpoint() override { Disarm(); }

  static void Disarm() {
    std::filesystem::remove(Path());
    std::filesystem::remove(Path() + ".crossed");
  }
  static void Arm(const std::string& line) {
    std::ofstream(Path() + ".new") << line << "\n";
    std::filesystem::rename(Path() + ".new", Path());
  }
  static bool Crossed() {
    return !std::filesystem::exists(Path()) && std::filesystem::exists(Path() + ".crossed");
  }
};

using FailpointDeathTest = Failpoint;

TEST_F(Failpoint, NothingHappensWithoutAFileOrAtAnotherPoint) {
  WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed());
  Arm("test.there kill 0 0");
  WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed());
}

TEST_F(Failpoint, ActsOnceAfterTheCrossingsThatPass) {
  Arm("test.here delay 2 30");
  WW_FAILPOINT("test.here");
  WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed());
  const auto start = std::chrono::steady_clock::now();
  WW_FAILPOINT("test.here");
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(30));
  EXPECT_TRUE(Crossed());
  Disarm();
  WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed());
  Arm("test.here delay 2 30");
  WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed()) << "what was crossed before counts for the file before";
}

TEST_F(Failpoint, OneOfManyThreadsActs) {
  Arm("test.here delay 63 0");
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([] {
      for (int i = 0; i < 7; ++i) WW_FAILPOINT("test.here");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 56; i < 63; ++i) WW_FAILPOINT("test.here");
  EXPECT_FALSE(Crossed());
  WW_FAILPOINT("test.here");
  EXPECT_TRUE(Crossed());
}

TEST_F(FailpointDeathTest, Kills) {
  Arm("test.here kill 0 0");
  EXPECT_EXIT(WW_FAILPOINT("test.here"), testing::KilledBySignal(SIGKILL), "");
}

TEST_F(FailpointDeathTest, AFileThatIsNotUnderstoodEndsTheProcess) {
  for (const char* line :
       {"", "test.here", "test.here kill", "test.here kill 0", "test.here die 0 0"}) {
    Arm(line);
    EXPECT_DEATH(WW_FAILPOINT("test.here"), "failpoint.cc") << line;
  }
}

TEST_F(Failpoint, StandsStillUntilItIsContinued) {
  Arm("test.here stop 0 0");
  const pid_t child = fork();
  if (child == 0) {
    WW_FAILPOINT("test.here");
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_TRUE(Crossed());
  kill(child, SIGCONT);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace weightwire
