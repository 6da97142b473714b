#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tests/integration/harness.h"

// The commands of wwctl that need no daemon, run as a person runs them.
namespace weightwire::integration {
namespace {

using nlohmann::json;

std::string DataPath(const std::string& path) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  return std::string(root == nullptr ? "." : root) + "/tests/data/" + path;
}

constexpr const char* kSmall = "configs/qwen2.5-0.5b.json";

int ExitOf(Reason reason) { return 64 + static_cast<int>(reason); }

std::vector<std::string> With(std::vector<std::string> arguments,
                              const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Finished Plan(const std::string& from, const std::string& to,
              const std::vector<std::string>& more) {
  return RunTool("wwctl",
                 With({"plan", "--config", DataPath(kSmall), "--from", from, "--to", to}, more));
}
json PlanJson(const std::string& from, const std::string& to,
              const std::vector<std::string>& more = {}) {
  const Finished run = Plan(from, to, With({"--json"}, more));
  EXPECT_EQ(run.code, 0) << run.err;
  return json::parse(run.out);
}

TEST(WwctlPlan, ComesNearTheLeastEgress) {
  // The tied embedding lies on both stages and is too large for one of its holders.
  const json plan = PlanJson("megatron:tp2,pp2", "vllm:tp1");
  EXPECT_LE(plan.at("egress_over_bound").get<double>(), 1.05);
  EXPECT_LE(plan.at("simulated_over_bound").get<double>(), 1.05);
  EXPECT_GE(plan.at("egress_max").get<double>(), plan.at("egress_bound").get<double>());
  EXPECT_EQ(plan.at("ingress_max").get<double>(), plan.at("ingress_bound").get<double>());
  EXPECT_FALSE(plan.contains("ranks"));
}

TEST(WwctlPlan, SendsOneCopyPerLayoutClassUnlessAskedForEveryRank) {
  const json one = PlanJson("megatron:tp2,pp2", "vllm:tp2,dp3");
  const json every = PlanJson("megatron:tp2,pp2", "vllm:tp2,dp3", {"--per", "rank", "--explain"});
  EXPECT_EQ(one.at("classes"), json({{"3", 2}}));
  EXPECT_EQ(every.at("classes"), one.at("classes"));
  EXPECT_EQ(every.at("bytes_total").get<int64_t>(), 3 * one.at("bytes_total").get<int64_t>());
  EXPECT_NE(every.at("plan_id"), one.at("plan_id"));
  const json& ranks = every.at("ranks");
  EXPECT_EQ(ranks.at("egress").size(), 4u);
  EXPECT_EQ(ranks.at("ingress").size(), 6u);
  EXPECT_EQ(ranks.at("classes"), json({{0, 2, 4}, {1, 3, 5}}));
}

TEST(WwctlPlan, WritesAPlanThatItProvesAgainFromTheFile) {
  const TempDir dir;
  const std::string file = dir.path() + "/plan";
  const json made = PlanJson("megatron:tp2,pp2", "vllm:tp2,dp2", {"--out", file});
  const json read = PlanJson("megatron:tp2,pp2", "vllm:tp2,dp2", {"--verify", file});
  for (const char* field : {"plan_id", "bytes_total", "copies", "proof", "egress_max"}) {
    EXPECT_EQ(read.at(field), made.at(field)) << field;
  }
  const int wrong = ExitOf(Reason::kInvalidRequest);
  EXPECT_EQ(Plan("megatron:tp2,pp1", "vllm:tp2,dp2", {"--verify", file}).code, wrong);
  EXPECT_EQ(Plan("megatron:tp2,pp2", "vllm:tp2,dp2", {"--verify", file, "--per", "rank"}).code,
            wrong);
  EXPECT_EQ(Plan("megatron:tp2,pp2", "vllm:tp2", {"--verify", file, "--out", file}).code, 2);
}

TEST(WwctlPlan, RefusesADamagedFile) {
  const TempDir dir;
  const std::string file = dir.path() + "/plan";
  PlanJson("megatron:tp2", "vllm:tp2", {"--out", file});
  const std::string bytes = ReadFile(file);
  ASSERT_GT(bytes.size(), 10'000u);
  const auto refused = [&](const std::string& damaged) {
    const Finished run =
        Plan("megatron:tp2", "vllm:tp2", {"--verify", dir.Write("damaged", damaged)});
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find("--out"), std::string::npos) << run.err;  // the remedy
    return run.code == ExitOf(Reason::kInvalidRequest) || run.code == ExitOf(Reason::kUnknownEnum);
  };
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(refused(bytes.substr(0, bytes.size() / 2)));
  EXPECT_TRUE(refused(bytes + "x"));
  EXPECT_TRUE(refused("not a plan"));
  // A flipped low bit in the last copies, whose fields are offsets, extents and strides.
  for (size_t back : {1, 2, 5, 9}) {
    std::string flipped = bytes;
    flipped[flipped.size() - back] = static_cast<char>(flipped[flipped.size() - back] ^ 1);
    EXPECT_TRUE(refused(flipped)) << back;
  }
  for (const char* path : {"/nowhere", "/tmp"}) {
    EXPECT_EQ(Plan("megatron:tp2", "vllm:tp2", {"--verify", path}).code, ExitOf(Reason::kIoError));
  }
}

TEST(WwctlPlan, DrawsAtMost128CellsASide) {
  const TempDir dir;
  const std::string file = dir.path() + "/matrix.svg";
  PlanJson("megatron:tp2,dp300", "vllm:tp2", {"--svg", file});
  const std::string svg = ReadFile(file);
  EXPECT_EQ(svg.rfind("<svg xmlns=", 0), 0u);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  EXPECT_NE(svg.find("<title>source 0-4 to target 0: "), std::string::npos);
  EXPECT_EQ(svg.find("href"), std::string::npos);
}

std::vector<std::string> Layout(const std::string& command, const std::string& spec,
                                const std::vector<std::string>& more = {}) {
  return With({"layout", command, "--config", DataPath(kSmall), "--spec", spec}, more);
}
json LayoutJson(const std::string& command, const std::string& spec,
                const std::vector<std::string>& more = {}) {
  const Finished run = RunTool("wwctl", Layout(command, spec, With({"--json"}, more)));
  EXPECT_EQ(run.code, 0) << run.err;
  return json::parse(run.out);
}

TEST(WwctlLayout, ShowsClassesAndTheTensorsAskedFor) {
  const json all = LayoutJson("show", "vllm:tp2,dp2");
  EXPECT_EQ(all.at("ranks"), 4);
  ASSERT_EQ(all.at("classes").size(), 2u);
  EXPECT_EQ(all.at("classes")[1].at("ranks"), json({1, 3}));
  EXPECT_EQ(all.at("tensors"), json::array());

  const json one = LayoutJson(
      "show", "vllm:tp2", {"--rank", "1", "--tensor", "model.layers.3.self_attn.k_proj.weight"});
  ASSERT_EQ(one.at("tensors").size(), 1u);
  const json& fused = one.at("tensors")[0];
  EXPECT_EQ(fused.at("name"), "model.layers.3.self_attn.qkv_proj.weight");
  EXPECT_EQ(fused.at("rank"), 1);
  EXPECT_EQ(fused.at("dtype"), "BF16");
  EXPECT_EQ(fused.at("shape"), json({576, 896}));  // 7 heads, one key and one value head of 64
  ASSERT_EQ(fused.at("pieces").size(), 3u);
  const json& key = fused.at("pieces")[1];
  EXPECT_EQ(key.at("tensor"), "model.layers.3.self_attn.k_proj.weight");
  EXPECT_EQ(key.at("begin"), json({64, 0}));
  EXPECT_EQ(key.at("extent"), json({64, 896}));
  EXPECT_EQ(key.at("local_offset"), 448 * 896);

  const Finished text = RunTool("wwctl", Layout("show", "vllm:tp2", {"--tensor", "*.3.*qkv*"}));
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("model.layers.3.self_attn.k_proj.weight [64:128, 0:896]"),
            std::string::npos)
      << text.out;
  EXPECT_EQ(text.out.find("layers.4."), std::string::npos);
  EXPECT_EQ(RunTool("wwctl", Layout("show", "vllm:tp2", {"--rank", "2"})).code,
            ExitOf(Reason::kInvalidRequest));
  EXPECT_EQ(RunTool("wwctl", Layout("show", "vllm:tp3")).code, ExitOf(Reason::kShapeMismatch));
  EXPECT_EQ(RunTool("wwctl", {"layout"}).code, 2);
}

/// What rank 0 of the layout should hold, as a process would report it.
json ObservedOf(const std::string& spec) {
  json observed = json::object();
  const json shown = LayoutJson("show", spec, {"--rank", "0"});
  for (const json& tensor : shown.at("tensors")) {
    observed[tensor.at("name").get<std::string>()] = {tensor.at("dtype"), tensor.at("shape")};
  }
  return observed;
}

TEST(WwctlLayout, DiffSaysWhatDiffers) {
  const TempDir dir;
  const json right = ObservedOf("vllm:tp2");
  ASSERT_GT(right.size(), 100u);
  const auto diff = [&](const std::string& text, const std::vector<std::string>& more = {}) {
    return RunTool("wwctl", Layout("diff", "vllm:tp2",
                                   With({"--observed", dir.Write("observed", text)}, more)));
  };
  const Finished equal = diff(right.dump());
  EXPECT_EQ(equal.code, 0) << equal.err;
  EXPECT_EQ(equal.out.rfind("equal: rank 0 holds the ", 0), 0u) << equal.out;

  json wrong = right;
  wrong["model.norm.weight"][1] = {897};
  const Finished shape = diff(wrong.dump(), {"--json"});
  EXPECT_EQ(shape.code, ExitOf(Reason::kShapeMismatch));
  EXPECT_NE(shape.err.find("model.norm.weight"), std::string::npos) << shape.err;
  const json said = json::parse(shape.out);
  EXPECT_EQ(said.at("equal"), false);
  EXPECT_EQ(said.at("tensor"), "model.norm.weight");
  EXPECT_EQ(said.at("reason"), "shape_mismatch");

  wrong = right;
  wrong.erase("model.norm.weight");
  EXPECT_EQ(diff(wrong.dump()).code, ExitOf(Reason::kTensorMissing));
  wrong = right;
  wrong["extra"] = {"BF16", {1}};
  EXPECT_EQ(diff(wrong.dump()).code, ExitOf(Reason::kTensorUnexpected));
  wrong = right;
  wrong["model.norm.weight"][0] = "torch.int8";
  EXPECT_EQ(diff(wrong.dump()).code, ExitOf(Reason::kDtypeMismatch));
  for (const char* text :
       {"", "[]", "{\"a\": 1}", "{\"a\": [\"BF17\", [1]]}", "{\"a\": [\"BF16\", [-1]]}"}) {
    EXPECT_EQ(diff(text).code, ExitOf(Reason::kInvalidRequest)) << text;
  }
}

TEST(WwctlLayout, DiffReadsASafetensorsHeader) {
  const TempDir dir;
  json header = {{"__metadata__", {{"format", "pt"}}}};
  const json observed = ObservedOf("vllm:tp2");
  for (const auto& [name, entry] : observed.items()) {
    header[name] = {{"dtype", entry[0]}, {"shape", entry[1]}, {"data_offsets", {0, 0}}};
  }
  const std::string text = header.dump();
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) file += static_cast<char>(text.size() >> shift);
  file += text + std::string(100, '\7');
  const Finished run = RunTool(
      "wwctl", Layout("diff", "vllm:tp2", {"--observed", dir.Write("model.safetensors", file)}));
  EXPECT_EQ(run.code, 0) << run.err;
}

TEST(WwctlLayout, LintTellsSizesAndNotes) {
  const json plain = LayoutJson("lint", "vllm:tp2");
  EXPECT_EQ(plain.at("legal"), true);
  EXPECT_EQ(plain.at("padding_bytes"), 0);
  EXPECT_EQ(plain.at("warnings"), json::array());
  EXPECT_EQ(plain.at("canonical_bytes"), 2 * int64_t{494'032'768});

  // Four kv heads on eight ranks.
  const Finished replicated =
      RunTool("wwctl", {"layout", "lint", "--config", DataPath("configs/qwen3-235b-a22b.json"),
                        "--spec", "vllm:tp8,ep"});
  EXPECT_EQ(replicated.code, 0) << replicated.err;
  EXPECT_NE(replicated.out.find("kv heads are replicated"), std::string::npos) << replicated.out;

  const json padded = LayoutJson("lint", "megatron:tp2,vocab_pad=152064");
  EXPECT_EQ(padded.at("padding_bytes"), (152'064 - 151'936) * 896 * 2);
  EXPECT_NE(padded.at("warnings").dump().find("padding"), std::string::npos);
  EXPECT_EQ(RunTool("wwctl", Layout("lint", "vllm:tp3")).code, ExitOf(Reason::kShapeMismatch));
}

TEST(WwctlPlan, ForetellsTheMemoryOfAgents) {
  const json staging = PlanJson("megatron:tp2,pp2", "vllm:tp2,dp3", {"--explain"}).at("staging");
  // The daemon's own defaults.
  const Finished daemon = RunTool("weightwired", {"--print-config"});
  EXPECT_EQ(daemon.code, 0) << daemon.err;
  EXPECT_NE(daemon.out.find("slot_bytes: 8388608"), std::string::npos) << daemon.out;
  EXPECT_NE(daemon.out.find("slots_in_pool: 16"), std::string::npos) << daemon.out;
  const uint64_t slots = 16 * 8'388'608;
  EXPECT_EQ(staging.at("slots_bytes"), slots);
  const uint64_t pools = slots + staging.at("scratch_bytes").get<uint64_t>();
  EXPECT_EQ(staging.at("source_max"), pools);
  EXPECT_EQ(staging.at("gpu_bytes"), pools);
  const json& target = staging.at("ranks").at("target");
  ASSERT_EQ(target.size(), 2u);
  EXPECT_EQ(staging.at("target_max"), *std::max_element(target.begin(), target.end()));
  // Twice what the rank holds, each tensor begun at a multiple of 64 bytes.
  const Finished show = RunTool("wwctl", {"layout", "show", "--config", DataPath(kSmall), "--spec",
                                          "vllm:tp2", "--rank", "0", "--json"});
  EXPECT_EQ(show.code, 0) << show.err;
  uint64_t arena = 0;
  const json shown = json::parse(show.out);
  for (const json& tensor : shown.at("tensors")) {
    uint64_t bytes = 2;
    for (const json& extent : tensor.at("shape")) bytes *= extent.get<uint64_t>();
    arena = (arena + 63) / 64 * 64 + bytes;
  }
  EXPECT_EQ(target[0].get<uint64_t>() - staging.at("source_max").get<uint64_t>(), 2 * arena);
  const Finished text = Plan("hf", "vllm:tp2", {});
  EXPECT_NE(text.out.find("memory beyond the application's"), std::string::npos) << text.out;
}

json Simulated(const std::vector<std::string>& more) {
  const Finished run =
      RunTool("wwctl", With({"simulate", "--config", DataPath(kSmall), "--from", "megatron:tp1",
                             "--to", "vllm:tp1,dp4", "--gbps", "8", "--json"},
                            more));
  EXPECT_EQ(run.code, 0) << run.err;
  return json::parse(run.out);
}

TEST(WwctlSimulate, PredictsByTopology) {
  // 988,065,536 bytes at 1 GB/s to four equal ranks.
  constexpr double kOnce = 0.988065536;
  const json star = Simulated({});
  EXPECT_NEAR(star.at("seconds").get<double>(), 4 * kOnce, 1e-6);
  EXPECT_EQ(star.at("bottleneck"), "source/0 egress");
  EXPECT_EQ(star.at("timeline").size(), 5u);
  EXPECT_EQ(star.at("classes"), 1);
  const json chain = Simulated({"--topology", "chain", "--latency-us", "100"});
  constexpr double kLag = 4194304 / 1e9 + 1e-4;
  EXPECT_NEAR(chain.at("seconds").get<double>(), kOnce + 1e-4 + 3 * kLag, 1e-6);
  const json tree = Simulated({"--topology", "tree"});
  EXPECT_EQ(tree.at("bottleneck"), "target/0 egress (relay)");
  EXPECT_NEAR(tree.at("bottleneck_seconds").get<double>(), 2 * kOnce, 1e-6);
  EXPECT_EQ(RunTool("wwctl", {"simulate", "--config", DataPath(kSmall), "--from", "hf", "--to",
                              "hf", "--gbps", "0"})
                .code,
            2);
}

TEST(WwctlSimulate, TellsAPersonWhoEndsWhen) {
  const Finished run =
      RunTool("wwctl", {"simulate", "--config", DataPath(kSmall), "--from", "megatron:tp2,pp2",
                        "--to", "vllm:tp2", "--gbps", "100", "--sharing", "equal"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out.rfind("predicted: ", 0), 0u);
  EXPECT_NE(run.out.find("target/0"), std::string::npos) << run.out;
}

}  // namespace
}  // namespace weightwire::integration
