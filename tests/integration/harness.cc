#include "tests/integration/harness.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "server/wire/status.h"

extern char** environ;

namespace weightwire::integration {
namespace {

constexpr Nanos kStopLimit = std::chrono::seconds(5);

int Millis(Nanos span) {
  return static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(span).count());
}

/// True when `fd` can be read (or has ended) before `patience` is over.
bool AwaitReadable(int fd, Nanos patience) {
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, Millis(patience)) == 1;
}

/// NAME=value strings and the pointers that posix_spawn wants.
class Strings {
 public:
  explicit Strings(std::vector<std::string> strings) : strings_(std::move(strings)) {
    for (std::string& text : strings_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  char** get() { return pointers_.data(); }

 private:
  std::vector<std::string> strings_;
  std::vector<char*> pointers_;
};

/// This process's environment without settings of weightwired, and `more`.
std::vector<std::string> Environment(const std::map<std::string, std::string>& more) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string_view(*entry).substr(0, 11) != "WEIGHTWIRE_") out.emplace_back(*entry);
  }
  for (const auto& [name, value] : more) out.push_back(name + "=" + value);
  return out;
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

TempDir::TempDir() : path_("/tmp/ww-XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "mkdtemp: " << std::strerror(errno);
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::Write(const std::string& name, const std::string& text) const {
  const std::string path = path_ + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string BinPath(const std::string& name) {
  const char* folder = std::getenv("WEIGHTWIRE_BIN_DIR");
  EXPECT_NE(folder, nullptr) << "WEIGHTWIRE_BIN_DIR names the folder of weightwired";
  return std::string(folder == nullptr ? "." : folder) + "/" + name;
}

Child::Child(const Options& options) {
  int pipe_ends[2] = {-1, -1};
  EXPECT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  stdout_ = memory::UniqueFd(pipe_ends[0]);
  const memory::UniqueFd write_end(pipe_ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, options.stderr_path.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  Strings arguments(options.arguments);
  Strings environment(Environment(options.environment));
  const int error = posix_spawn(&pid_, options.arguments.at(0).c_str(), &actions, nullptr,
                                arguments.get(), environment.get());
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(error, 0) << options.arguments.at(0) << ": " << std::strerror(error);
  if (error != 0) {
    pid_ = -1;
    exit_code_ = -1;
    return;
  }
  // By number: the wrapper of glibc 2.36 has C++ linkage and does not link.
  exited_ = memory::UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
}

Child::~Child() {
  if (exit_code_) return;
  Signal(SIGKILL);
  WaitExit(kPatience);
}

void Child::Signal(int number) const {
  if (!exit_code_) kill(pid_, number);
}

std::optional<std::string> Child::ReadLine(Nanos patience) {
  const Nanos end = SystemClock().Now() + patience;
  while (true) {
    if (const size_t newline = buffer_.find('\n'); newline != std::string::npos) {
      std::string line = buffer_.substr(0, newline);
      buffer_.erase(0, newline + 1);
      return line;
    }
    if (!AwaitReadable(stdout_.get(), std::max(Nanos(0), end - SystemClock().Now()))) {
      return std::nullopt;
    }
    char bytes[4096];
    const ssize_t got = read(stdout_.get(), bytes, sizeof bytes);
    if (got <= 0) return std::nullopt;
    buffer_.append(bytes, static_cast<size_t>(got));
  }
}

std::optional<ExitCode> Child::WaitExit(Nanos patience) {
  if (exit_code_) return exit_code_;
  if (!AwaitReadable(exited_.get(), patience)) return std::nullopt;
  int status = 0;
  waitpid(pid_, &status, 0);
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return exit_code_;
}

Finished RunTool(const std::string& name, std::vector<std::string> arguments,
                 std::map<std::string, std::string> environment) {
  const TempDir dir;
  arguments.insert(arguments.begin(), BinPath(name));
  Child child({std::move(arguments), std::move(environment), dir.path() + "/err"});
  Finished finished;
  while (auto line = child.ReadLine()) finished.out += *line + "\n";
  finished.code = child.WaitExit(kPatience).value_or(-1);
  finished.err = ReadFile(dir.path() + "/err");
  return finished;
}

Daemon::Daemon(std::vector<std::string> arguments, std::map<std::string, std::string> environment) {
  std::vector<std::string> all = {BinPath("weightwired")};
  const auto unless_given = [&](const std::string& flag, const std::string& value) {
    for (const std::string& argument : arguments) {
      if (argument.rfind(flag, 0) == 0) return;
    }
    all.push_back(flag + value);
  };
  unless_given("--agent-socket=", dir_.path() + "/agent.sock");
  unless_given("--listen=", "127.0.0.1:0");
  if (!environment.contains("WEIGHTWIRE_HTTP")) unless_given("--http=", "127.0.0.1:0");
  all.insert(all.end(), arguments.begin(), arguments.end());
  child_ = std::make_unique<Child>(
      Child::Options{std::move(all), std::move(environment), dir_.path() + "/log"});
  ready_line_ = child_->ReadLine().value_or("");
  std::istringstream words(ready_line_);
  for (std::string word; words >> word;) {
    if (word.rfind("grpc=", 0) == 0) grpc_ = word.substr(5);
    if (word.rfind("http=", 0) == 0) http_ = word.substr(5);
    if (word.rfind("agent=unix:", 0) == 0) agent_socket_ = word.substr(11);
  }
  EXPECT_EQ(ready_line_.rfind("weightwired ready role=", 0), 0u) << ready_line_ << "\n" << Log();
}

Daemon::~Daemon() {
  if (!ended_) {
    const auto code = Stop();
    EXPECT_TRUE(code.has_value()) << "weightwired did not stop within 5 s";
    EXPECT_EQ(code.value_or(-1), 0);
  }
  if (testing::Test::HasFailure()) std::fprintf(stderr, "---- log\n%s----\n", Log().c_str());
}

std::string Daemon::Log() const { return ReadFile(dir_.path() + "/log"); }

std::optional<ExitCode> Daemon::Stop() {
  child_->Signal(SIGTERM);
  ended_ = true;
  return child_->WaitExit(kStopLimit);
}

void Daemon::Kill() {
  child_->Signal(SIGKILL);
  ended_ = true;
  EXPECT_TRUE(child_->WaitExit(kPatience).has_value());
}

std::unique_ptr<v1::Coordinator::Stub> Daemon::Coordinator() const {
  return v1::Coordinator::NewStub(ChannelTo(grpc_));
}

std::unique_ptr<v1::Agent::Stub> Daemon::Agent() const {
  return v1::Agent::NewStub(ChannelTo("unix:" + agent_socket_));
}

v1::StatusResponse Daemon::AwaitStatus(const std::function<bool(const v1::StatusResponse&)>& wanted,
                                       const std::string& what) const {
  const auto stub = Coordinator();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::WatchRequest request;
  request.set_min_interval_ms(1);
  auto reader = stub->Watch(&context, request);
  v1::StatusResponse status;
  while (reader->Read(&status)) {
    if (!wanted(status)) continue;
    context.TryCancel();
    reader->Finish();
    return status;
  }
  ADD_FAILURE() << "no status with: " << what << "\n"
                << reader->Finish().error_message() << "\n"
                << status.DebugString();
  return status;
}

v1::StatusResponse Daemon::GetStatus() const {
  grpc::ClientContext context;
  v1::StatusResponse status;
  const grpc::Status answer = Coordinator()->Status(&context, {}, &status);
  EXPECT_TRUE(answer.ok()) << answer.error_message();
  return status;
}

std::string Daemon::DataAddress() const {
  grpc::ClientContext context;
  v1::LocalStatusResponse status;
  EXPECT_TRUE(Agent()->LocalStatus(&context, {}, &status).ok());
  return status.addresses().at("tcp");
}

std::string Daemon::HttpGet(const std::string& page) const {
  const memory::UniqueFd socket = ConnectTo(http_);
  SendAll(socket.get(), "GET " + page + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  const std::string answer = ReadUntilClosed(socket.get()).value_or("");
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return wire::FromCall(status.error_code(), status.error_message(), status.error_details());
}

v1::AttachUp Hello(const std::string& group, uint32_t rank, uint32_t world_size, v1::GroupRole role,
                   uint64_t incarnation) {
  v1::AttachUp up;
  v1::AttachHello& hello = *up.mutable_hello();
  hello.mutable_protocol()->set_min(1);
  hello.mutable_protocol()->set_max(1);
  hello.set_role(role);
  hello.set_group(group);
  hello.set_rank(rank);
  hello.set_world_size(world_size);
  hello.set_incarnation(incarnation);
  return up;
}

RawAttachment::RawAttachment(const Daemon& daemon, const v1::AttachUp& first)
    : stub_(daemon.Agent()) {
  context_.set_deadline(std::chrono::system_clock::now() + kPatience);
  stream_ = stub_->Attach(&context_);
  stream_->Write(first);
}

RawAttachment::~RawAttachment() {
  // Not by a cancel, which is over before the agent has heard of it: whoever comes next would still
  // meet this member.
  v1::AttachUp up;
  up.mutable_detach();
  if (!finished_) stream_->Write(up);
  if (!finished_) stream_->WritesDone();
  (void)End();
}

Result<uint64_t> RawAttachment::Attached() {
  v1::AttachEvent event;
  if (!stream_->Read(&event)) return Fail(End());
  EXPECT_TRUE(event.has_attached()) << event.DebugString();
  return event.attached().handle();
}

std::optional<v1::AttachEvent> RawAttachment::Next() {
  v1::AttachEvent event;
  if (!stream_->Read(&event)) return std::nullopt;
  return event;
}

Status RawAttachment::End() {
  v1::AttachEvent ignored;
  while (!finished_ && stream_->Read(&ignored)) continue;
  if (!finished_) finished_ = stream_->Finish();
  return FromGrpc(*finished_);
}

memory::UniqueFd ConnectTo(const std::string& address) {
  if (address.rfind("unix:", 0) == 0) {
    sockaddr_un peer{};
    peer.sun_family = AF_UNIX;
    std::strncpy(peer.sun_path, address.c_str() + 5, sizeof peer.sun_path - 1);
    memory::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&peer), sizeof peer), 0)
        << address << ": " << std::strerror(errno);
    return fd;
  }
  const size_t colon = address.rfind(':');
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  EXPECT_EQ(getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints,
                        &found),
            0)
      << address;
  if (found == nullptr) return {};
  memory::UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), found->ai_addr, found->ai_addrlen), 0)
      << address << ": " << std::strerror(errno);
  freeaddrinfo(found);
  return fd;
}

std::optional<std::string> ReadUntilClosed(int fd, Nanos patience) {
  const Nanos end = SystemClock().Now() + patience;
  std::string out;
  while (AwaitReadable(fd, std::max(Nanos(0), end - SystemClock().Now()))) {
    char bytes[4096];
    const ssize_t got = recv(fd, bytes, sizeof bytes, 0);
    if (got <= 0) return out;  // closed, or reset because it did not read what was sent
    out.append(bytes, static_cast<size_t>(got));
  }
  return std::nullopt;
}

void SendAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the peer has closed it: what it answered is still there to read
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

}  // namespace weightwire::integration
