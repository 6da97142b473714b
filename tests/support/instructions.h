#pragma once

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <optional>

namespace weightwire::testing {

/// Instructions that `work` takes, counted by stepping through it in a child process: work, not
/// time. What it changes is lost. The caller has one thread. Nothing where a process may not trace
/// its child. Some millions at most: a step takes microseconds.
template <typename Work>
std::optional<uint64_t> InstructionsOf(const Work& work) {
  const pid_t child = fork();
  if (child < 0) return std::nullopt;
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    raise(SIGSTOP);
    work();
    raise(SIGSTOP);
    _exit(0);
  }
  uint64_t steps = 0;
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return std::nullopt;
  for (;;) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) break;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return std::nullopt;
    if (WSTOPSIG(status) == SIGSTOP) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return steps;
    }
    ++steps;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return std::nullopt;
}

}  // namespace weightwire::testing
