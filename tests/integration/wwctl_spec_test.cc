#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cstdlib>

#include "tests/integration/harness.h"

// Every form in which a person may write a layout: words, and a YAML file.
namespace weightwire::integration {
namespace {

using nlohmann::json;

std::string DataPath(const std::string& path) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  return std::string(root == nullptr ? "." : root) + "/tests/data/" + path;
}

constexpr const char* kSmall = "configs/qwen2.5-0.5b.json";
constexpr const char* kExperts = "configs/qwen3-235b-a22b.json";

int ExitOf(Reason reason) { return 64 + static_cast<int>(reason); }

json PlanOf(const char* model, const std::string& from, const std::string& to) {
  const Finished run =
      RunTool("wwctl", {"plan", "--config", DataPath(model), "--from", from, "--to", to, "--json"});
  EXPECT_EQ(run.code, 0) << run.err;
  return run.code == 0 ? json::parse(run.out) : json::object();
}

Finished Lint(const char* model, const std::string& spec) {
  return RunTool("wwctl", {"layout", "lint", "--config", DataPath(model), "--spec", spec});
}

void ExpectRefused(const char* model, const std::string& spec, Reason reason,
                   const std::vector<std::string>& told) {
  const Finished run = Lint(model, spec);
  EXPECT_EQ(run.code, ExitOf(reason)) << spec << ": " << run.err;
  for (const std::string& part : told) {
    EXPECT_NE(run.err.find(part), std::string::npos) << spec << ": " << run.err;
  }
}

TEST(WwctlSpecFile, MeansTheSameAsItsWords) {
  const TempDir dir;
  const std::string from =
      dir.Write("trainer.yaml",
                "# four ranks\nscheme: megatron\ntp: 2\npp: 2\nfirst: 10\n"
                "spec: te\naccount_loss: false\nskip: [\"*.bias\", \"*.o_proj.weight\"]\n"
                "vocab_pad: 152064\n");
  const std::string to = dir.Write(
      "engine.yml", "scheme: vllm\ntp: 1\nreplicas: 2\nskip: [\"*.bias\", \"*.o_proj.weight\"]\n");
  const json words = PlanOf(
      kSmall, "megatron:tp2,pp2,first=10,spec=te,skip=*.bias|*.o_proj.weight,vocab_pad=152064",
      "vllm:tp1,replicas=2,skip=*.bias|*.o_proj.weight");
  EXPECT_EQ(PlanOf(kSmall, from, to).at("plan_id"), words.at("plan_id"));
  EXPECT_EQ(words.at("classes"), json({{"2", 1}}));
}

TEST(WwctlSpecFile, WritesSizesFlagsAndLists) {
  const TempDir dir;
  const std::string from =
      dir.Write("trainer.yaml",
                "{scheme: megatron, tp: 4, pp: 4, ep: 8, etp: 1, dp: 2, layers: [23, 23, 24, 24]}");
  const std::string to = dir.Write("engine.yaml", "scheme: vllm\ntp: 4\nep: true\n");
  EXPECT_EQ(PlanOf(kExperts, from, to).at("plan_id"),
            PlanOf(kExperts, "megatron:tp4,pp4,ep8,etp1,dp2,layers=23-23-24-24", "vllm:tp4,ep")
                .at("plan_id"));
}

TEST(WwctlSpecFile, WorksInEveryCommand) {
  const TempDir dir;
  const std::string file = dir.Write("engine.yaml", "scheme: vllm\ntp: 2\n");
  const std::string config = DataPath(kSmall);
  for (const char* what : {"show", "lint"}) {
    const Finished run =
        RunTool("wwctl", {"layout", what, "--config", config, "--spec", file, "--json"});
    EXPECT_EQ(run.code, 0) << run.err;
  }
  const std::string empty = dir.Write("observed.json", "{}");
  const Finished diff =
      RunTool("wwctl", {"layout", "diff", "--config", config, "--spec", file, "--observed", empty});
  EXPECT_EQ(diff.code, ExitOf(Reason::kTensorMissing)) << diff.err;
  const Finished run = RunTool("wwctl", {"simulate", "--config", config, "--from", "hf", "--to",
                                         file, "--gbps", "100", "--json"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json::parse(run.out).at("target_ranks"), 2);
}

TEST(WwctlSpecFile, RefusalsNameFileLineAndRemedy) {
  const TempDir dir;
  const auto refused = [&](const std::string& text, const std::vector<std::string>& told) {
    ExpectRefused(kSmall, dir.Write("spec.yaml", text), Reason::kConfigInvalid, told);
  };
  refused("scheme: vllm\ntp: 2\npipline: 2\n", {"spec.yaml:3", "pipline", "it knows", "pp"});
  refused("scheme: vllm\n\ntp: two\n", {"spec.yaml:3", "tp must be a number", "tp: 2"});
  refused("scheme: vllm\ntp: [1, 2]\n", {"spec.yaml:2", "tp must be a number"});
  refused("scheme: megatron\nfirst: {a: 1}\n", {"spec.yaml:2", "first must be a value"});
  refused("scheme: megatron\norder: a b\n", {"spec.yaml:2", "order must be"});
  refused("scheme: vllm\ntp: 1\ntp: 2\n", {"spec.yaml:3", "given twice"});
  refused("scheme: vlm\n", {"spec.yaml:1", "vlm", "use one of"});
  refused("tp: 2\n", {"spec.yaml", "names no scheme"});
  refused("- vllm\n", {"spec.yaml:1", "no map"});
  refused("", {"spec.yaml", "no map"});
  refused("scheme: vllm\ntp: [1\n", {"spec.yaml:", "no YAML"});
  ExpectRefused(kSmall, dir.path() + "/none.yaml", Reason::kIoError, {"none.yaml", ".yaml"});
  // What the words themselves mean is checked as ever.
  ExpectRefused(kSmall, dir.Write("large.yaml", "scheme: vllm\ntp: 70000\n"),
                Reason::kUnknownScheme, {"65536"});
}

TEST(WwctlSpec, AcceptsEveryFormThatIsPromised) {
  for (const char* spec :
       {"megatron:tp2,pp2", "megatron:tp2,pp2,vpp2", "megatron:tp1,cp2,dp2",
        "megatron:tp2,pp2,first=10,last=14", "megatron:tp1,pp3,layout=Et*8|t*8|t*8L", "vllm:tp2",
        "vllm:tp2,pp2,dp2", "vllm:tp2,replicas=3", "sglang:tp2,replicas=2", "fsdp:dp8,hsdp2",
        "fsdp:dp8", "hf"}) {
    EXPECT_EQ(Lint(kSmall, spec).code, 0) << spec << ": " << Lint(kSmall, spec).err;
  }
  for (const char* spec : {"megatron:tp4,pp2,ep4,etp1,dp2", "vllm:tp4,dp2,ep"}) {
    EXPECT_EQ(Lint(kExperts, spec).code, 0) << spec << ": " << Lint(kExperts, spec).err;
  }
}

TEST(WwctlSpec, RefusesWhatIsIllegalWithTheRuleThatItBreaks) {
  const Reason shape = Reason::kShapeMismatch;
  ExpectRefused(kExperts, "megatron:tp4,ep8,etp1", shape, {"ep", "etp", "tp", "cp", "dp"});
  ExpectRefused(kSmall, "megatron:tp2,ep2", shape, {"expected experts"});
  ExpectRefused(kSmall, "vllm:tp3", shape, {"heads", "3"});
  ExpectRefused(kSmall, "megatron:tp2,pp5", shape, {"24 layers", "5 pipeline stages"});
  ExpectRefused(kSmall, "megatron:pp3,layout=Et*8|t*8|t*9L", shape, {"24 layers", "layout="});
  ExpectRefused(kSmall, "megatron:pp2,layout=t*12|t*12,pipeline=t*12|t*12", Reason::kUnknownScheme,
                {"exclude each other"});
  ExpectRefused(kSmall, "vllm:tp1,replicas=0", Reason::kUnknownScheme, {"replicas"});
  ExpectRefused(kSmall, "vllm:tp2,replicas=8193", Reason::kLimitExceeded, {"16384"});
}

}  // namespace
}  // namespace weightwire::integration
