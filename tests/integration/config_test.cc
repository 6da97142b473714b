#include <gtest/gtest.h>

#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

constexpr int kTransportExit = 93;
constexpr int kInsecureExit = 96;
constexpr int kConfigExit = 100;
constexpr int kIoExit = 101;

/// The value of `key` in what --print-config prints; quotes are YAML's business.
std::string Printed(const std::string& yaml, const std::string& key) {
  const size_t at = ("\n" + yaml).find("\n" + key + ": ");
  if (at == std::string::npos) return "absent";
  std::string value = yaml.substr(at + key.size() + 2);
  value = value.substr(0, value.find_first_of("\n#"));
  std::erase_if(value, [](char c) { return c == '"' || c == ' '; });
  return value;
}

TEST(Config, FlagWinsOverEnvironmentOverFileOverDefault) {
  const TempDir dir;
  const std::string file = dir.Write("config.yaml",
                                     "job: from-file\nname: from-file\nwindow: 7\n"
                                     "transports: [tcp, shm]\n");
  const Finished run =
      RunTool("weightwired", {"--print-config", "--config", file, "--job", "from-flag"},
              {{"WEIGHTWIRE_JOB", "from-environment"}, {"WEIGHTWIRE_NAME", "from-environment"}});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(Printed(run.out, "job"), "from-flag");
  EXPECT_EQ(Printed(run.out, "name"), "from-environment");
  EXPECT_EQ(Printed(run.out, "window"), "7");
  EXPECT_EQ(Printed(run.out, "transports"), "tcp,shm");
  EXPECT_EQ(Printed(run.out, "lease_ms"), "5000");
}

TEST(Config, PrintedSettingsGiveTheSameSettingsAgain) {
  const TempDir dir;
  const Finished first = RunTool("weightwired", {"--print-config", "--job", "j", "--window", "3"});
  ASSERT_EQ(first.code, 0) << first.err;
  const std::string file = dir.Write("config.yaml", first.out);
  const Finished second = RunTool("weightwired", {"--print-config", "--config", file});
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.out, first.out);
}

TEST(Config, UnknownKeyIsRefusedWithTheNearestOne) {
  const TempDir dir;
  const std::string file = dir.Write("config.yaml", "lisen: 127.0.0.1:0\n");
  const Finished run = RunTool("weightwired", {"--config", file});
  EXPECT_EQ(run.code, kConfigExit);
  EXPECT_NE(run.err.find("\"lisen\"; did you mean \"listen\""), std::string::npos) << run.err;
}

TEST(Config, UnknownFlagIsRefusedWithTheNearestOne) {
  const Finished run = RunTool("weightwired", {"--lisen", "127.0.0.1:0"});
  EXPECT_EQ(run.code, kConfigExit);
  EXPECT_NE(run.err.find("did you mean --listen?"), std::string::npos) << run.err;
  const Finished word = RunTool("weightwired", {"coordinator"});
  EXPECT_EQ(word.code, kConfigExit);
  EXPECT_NE(word.err.find("unexpected argument coordinator"), std::string::npos) << word.err;
}

TEST(Config, BadValuesNameKeyAndLayer) {
  const Finished flag = RunTool("weightwired", {"--window", "many"});
  EXPECT_EQ(flag.code, kConfigExit);
  EXPECT_NE(flag.err.find("window (from the command line)"), std::string::npos) << flag.err;
  const Finished environment =
      RunTool("weightwired", {"--print-config"}, {{"WEIGHTWIRE_ROLE", "boss"}});
  EXPECT_EQ(environment.code, kConfigExit);
  EXPECT_NE(environment.err.find("role (from the environment)"), std::string::npos)
      << environment.err;
}

TEST(Config, SeveralCoordinatorsAreAListOfAddresses) {
  const Finished list = RunTool(
      "weightwired", {"--print-config", "--role=agent", "--coordinator=a:7411, b:7411,[::1]:7412"});
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_NE(list.out.find("a:7411,b:7411,[::1]:7412"), std::string::npos) << list.out;
  const Finished wrong = RunTool("weightwired", {"--role=agent", "--coordinator=a:7411,b"});
  EXPECT_EQ(wrong.code, kConfigExit);
  EXPECT_NE(wrong.err.find("coordinator (from the command line)"), std::string::npos) << wrong.err;
}

TEST(Config, EtcdIsForCoordinatorsWithoutAStateDirectory) {
  const Finished all = RunTool("weightwired", {"--etcd=127.0.0.1:2379"});
  EXPECT_EQ(all.code, kConfigExit);
  EXPECT_NE(all.err.find("role coordinator"), std::string::npos) << all.err;
  const Finished both = RunTool("weightwired", {"--role=coordinator", "--etcd=127.0.0.1:2379",
                                                "--state-dir=/tmp/weightwire"});
  EXPECT_EQ(both.code, kConfigExit);
  EXPECT_NE(both.err.find("two places for one journal"), std::string::npos) << both.err;
}

TEST(Config, FileThatCannotBeReadIsRefused) {
  for (const std::string& text : {std::string("- a\n- b\n"), std::string("a: [b\n"),
                                  std::string("job: a\njob: b\n"), std::string("job: {a: b}\n")}) {
    const TempDir dir;
    const Finished run = RunTool("weightwired", {"--config", dir.Write("config.yaml", text)});
    EXPECT_EQ(run.code, kConfigExit) << text;
    EXPECT_NE(run.err.find("config.yaml"), std::string::npos) << run.err;
  }
  EXPECT_EQ(RunTool("weightwired", {"--config", "/nowhere/config.yaml"}).code, kConfigExit);
}

TEST(Config, ListenerBeyondLoopbackNeedsInsecure) {
  for (const std::string flag :
       {"--listen=0.0.0.0:0", "--http=0.0.0.0:0", "--data-listen=[::]:0"}) {
    const Finished run = RunTool("weightwired", {flag});
    EXPECT_EQ(run.code, kInsecureExit) << flag << ": " << run.err;
    EXPECT_NE(run.err.find("insecure_listener"), std::string::npos) << run.err;
    EXPECT_NE(run.err.find("--insecure"), std::string::npos) << run.err;
  }
}

TEST(Config, InsecureWarnsAndSetsTheMetric) {
  Daemon daemon({"--listen=0.0.0.0:0", "--insecure"});
  EXPECT_NE(daemon.Log().find("INSECURE"), std::string::npos);
  EXPECT_NE(daemon.HttpGet("/metrics").find("\nweightwire_insecure_mode 1\n"), std::string::npos);
}

TEST(Config, SecureModeIsSilentAboutIt) {
  Daemon daemon;
  EXPECT_EQ(daemon.Log().find("INSECURE"), std::string::npos);
  EXPECT_NE(daemon.HttpGet("/metrics").find("\nweightwire_insecure_mode 0\n"), std::string::npos);
}

TEST(Config, AddressInUseIsAnIoError) {
  Daemon daemon;
  const TempDir dir;
  const Finished run = RunTool("weightwired", {"--listen=" + daemon.grpc(), "--http=127.0.0.1:0",
                                               "--agent-socket=" + dir.path() + "/agent.sock"});
  EXPECT_EQ(run.code, kIoExit) << run.err;
  EXPECT_NE(run.err.find(daemon.grpc()), std::string::npos) << run.err;
}

TEST(Config, ReadyLineNamesRoleAndAddresses) {
  Daemon all;
  EXPECT_EQ(all.ready_line(), "weightwired ready role=all grpc=" + all.grpc() +
                                  " http=" + all.http() + " agent=unix:" + all.agent_socket());
  EXPECT_EQ(all.grpc().rfind("127.0.0.1:", 0), 0u);
  EXPECT_NE(all.grpc(), "127.0.0.1:0");
  Daemon agent({"--role=agent", "--coordinator=" + all.grpc()}, {{"WEIGHTWIRE_HTTP", ""}});
  EXPECT_EQ(agent.ready_line(), "weightwired ready role=agent agent=unix:" + agent.agent_socket());
}

TEST(Config, HttpPagesAnswer) {
  Daemon daemon;
  EXPECT_EQ(daemon.HttpGet("/healthz"), "alive\n");
  EXPECT_EQ(daemon.HttpGet("/readyz"), "ready\n");
  EXPECT_TRUE(daemon.HttpGet("/status").starts_with("idle: no engine is registered\n"))
      << daemon.HttpGet("/status");
  EXPECT_NE(daemon.HttpGet("/").find("<title>weightwire</title>"), std::string::npos);
  EXPECT_NE(daemon.HttpGet("/api/status").find("\"waiting_for\":\"\""), std::string::npos)
      << daemon.HttpGet("/api/status");
  EXPECT_NE(daemon.HttpGet("/metrics").find("# TYPE weightwire_build_info"), std::string::npos);
}

/// No machine can have it in this version; what else is missing is named too. Where the plug-in is
/// not built, that is what is missing.
TEST(Config, GpuDirectThatIsRequiredIsRefusedInsteadOfFallingBack) {
  const TempDir dir;
  const Finished run = RunTool(
      "weightwired", {"--gpu-direct=required", "--transports=ucx,tcp", "--listen=127.0.0.1:0",
                      "--http=127.0.0.1:0", "--agent-socket=" + dir.path() + "/agent.sock"});
  EXPECT_EQ(run.code, kTransportExit) << run.err;
  if (run.err.find("no UCX: ") != std::string::npos) GTEST_SKIP() << run.err;
  EXPECT_NE(run.err.find("no GPU-direct: "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("host memory"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("set gpu_direct to auto or off"), std::string::npos) << run.err;
}

TEST(Config, GpuDirectThatIsRequiredNeedsTheTransportThatHasIt) {
  const Finished run = RunTool("weightwired", {"--gpu-direct=required"});
  EXPECT_EQ(run.code, kConfigExit);
  EXPECT_NE(run.err.find("transports names neither ucx nor nccl"), std::string::npos) << run.err;
}

}  // namespace
}  // namespace weightwire::integration
