#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/status.h"
#include "server/memory/region.h"
#include "weightwire/v1/agent.grpc.pb.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

/// Real processes and the raw protocol for integration tests. Nothing here sleeps: every wait is
/// for an event (a line, an exit, a status that changes) and has a deadline.
namespace weightwire::integration {

inline constexpr Nanos kPatience = std::chrono::seconds(60);  ///< for what must happen some time

/// A directory of mode 0700, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string Write(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
};

/// How a process ended: its exit code, or 1000 + the signal.
using ExitCode = int;

/// A child process. Killed and reaped at the end if it still runs.
class Child {
 public:
  struct Options {
    std::vector<std::string> arguments;              ///< the program first
    std::map<std::string, std::string> environment;  ///< on top of this process's
    std::string stderr_path;
  };
  explicit Child(const Options& options);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int number) const;
  /// The next line of its output, without the newline; nullopt at its end or after `patience`.
  std::optional<std::string> ReadLine(Nanos patience = kPatience);
  /// nullopt when it still runs after `patience`.
  std::optional<ExitCode> WaitExit(Nanos patience);

 private:
  pid_t pid_ = -1;
  memory::UniqueFd stdout_;
  memory::UniqueFd exited_;
  std::string buffer_;
  std::optional<ExitCode> exit_code_;
};

struct Finished {
  ExitCode code = 0;
  std::string out;
  std::string err;
};
/// Runs a program of the build to its end.
Finished RunTool(const std::string& name, std::vector<std::string> arguments,
                 std::map<std::string, std::string> environment = {});
std::string BinPath(const std::string& name);
std::string ReadFile(const std::string& path);

/// A running weightwired: port 0, its socket in a directory of its own, no HTTP port that is fixed.
class Daemon {
 public:
  /// `arguments` replace the standard ones of the same flag. Fails the test when it does not start.
  explicit Daemon(std::vector<std::string> arguments = {},
                  std::map<std::string, std::string> environment = {});
  /// Stops it, and fails the test when that takes over 5 s or the exit code is not 0.
  ~Daemon();

  /// From the ready line: "127.0.0.1:PORT"; empty when the role has none.
  const std::string& grpc() const { return grpc_; }
  const std::string& http() const { return http_; }
  const std::string& agent_socket() const { return agent_socket_; }
  const std::string& ready_line() const { return ready_line_; }
  pid_t pid() const { return child_->pid(); }
  std::string Log() const;

  void Signal(int number) const { child_->Signal(number); }
  /// SIGTERM; nullopt when it runs for more than 5 s.
  std::optional<ExitCode> Stop();
  /// SIGKILL.
  void Kill();

  std::unique_ptr<v1::Coordinator::Stub> Coordinator() const;
  std::unique_ptr<v1::Agent::Stub> Agent() const;
  /// Blocks until a status satisfies `wanted`; the last one seen, and a test failure, when none
  /// does.
  v1::StatusResponse AwaitStatus(const std::function<bool(const v1::StatusResponse&)>& wanted,
                                 const std::string& what) const;
  v1::StatusResponse GetStatus() const;
  /// "host:port" of the agent's tcp data plane.
  std::string DataAddress() const;
  /// The body of a GET; empty when there is no answer.
  std::string HttpGet(const std::string& page) const;

 private:
  TempDir dir_;
  std::unique_ptr<Child> child_;
  bool ended_ = false;
  std::string ready_line_;
  std::string grpc_;
  std::string http_;
  std::string agent_socket_;
};

/// What a raw call answered.
Status FromGrpc(const grpc::Status& status);

/// The rank of a process that speaks the raw protocol.
class RawAttachment {
 public:
  RawAttachment(const Daemon& daemon, const v1::AttachUp& first);
  ~RawAttachment();
  /// The handle, or why the attach was refused.
  Result<uint64_t> Attached();
  /// The next event that is not `attached`; nullopt when the stream ended.
  std::optional<v1::AttachEvent> Next();
  Status End();

 private:
  std::unique_ptr<v1::Agent::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachUp, v1::AttachEvent>> stream_;
  std::optional<grpc::Status> finished_;
};
v1::AttachUp Hello(const std::string& group, uint32_t rank, uint32_t world_size,
                   v1::GroupRole role = v1::GROUP_ROLE_TRAINER, uint64_t incarnation = 1);

/// A connected stream socket to "host:port" or "unix:/path".
memory::UniqueFd ConnectTo(const std::string& address);
/// Everything that the peer sends until it closes the connection; nullopt when it keeps it open.
std::optional<std::string> ReadUntilClosed(int fd, Nanos patience = kPatience);
void SendAll(int fd, std::string_view bytes);

}  // namespace weightwire::integration
