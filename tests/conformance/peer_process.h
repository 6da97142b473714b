#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/status.h"

extern char** environ;

namespace weightwire::conformance {

/// A conformance_peer. Killed at the end, whatever state it is in.
class Peer {
 public:
  explicit Peer(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Program());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int in[2];
    int out[2];
    EXPECT_EQ(pipe2(in, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    // Without a child there is no pid, and kill(-1) would stop every process of the machine.
    const int error = posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    if (error != 0) std::cerr << "cannot start " << argv[0] << std::endl;
    WW_CHECK(error == 0 && pid_ > 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    stdin_ = in[1];
    stdout_ = out[0];
  }
  ~Peer() {
    Kill();
    close(stdin_);
    close(stdout_);
  }

  std::string ReadLine() {
    std::string line;
    for (char byte; read(stdout_, &byte, 1) == 1 && byte != '\n';) line.push_back(byte);
    return line;
  }
  void Kill() {
    if (pid_ == 0) return;
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void Freeze() {
    Signal(SIGSTOP);
    int state = 0;
    waitpid(pid_, &state, WUNTRACED);
    EXPECT_TRUE(WIFSTOPPED(state));
  }

 private:
  void Signal(int number) {
    WW_CHECK(pid_ > 0);  // 0 and below name groups of processes
    kill(pid_, number);
  }
  static std::string Program() {
    const char* folder = std::getenv("WEIGHTWIRE_BIN_DIR");
    return std::string(folder != nullptr ? folder : ".") + "/conformance_peer";
  }
  pid_t pid_ = 0;  ///< 0: ended
  int stdin_ = -1;
  int stdout_ = -1;
};

}  // namespace weightwire::conformance
