#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cstdlib>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

using nlohmann::json;

std::string DataPath(const std::string& path) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  return std::string(root == nullptr ? "." : root) + "/tests/data/" + path;
}

/// One trainer, one engine, version 3 committed.
class Wwctl : public testing::Test {
 protected:
  void SetUp() override {
    trainer_ = std::make_unique<Trainer>(daemon_.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
    engine_ = std::make_unique<Engine>(daemon_.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
    trainer_->Fill(3);
    trainer_->Publish(3);
    engine_->Install(3, 3);
    ASSERT_TRUE(trainer_->AwaitReleases(3).ok());
    daemon_.AwaitStatus(
        [](const v1::StatusResponse& s) {
          return s.epochs_size() == 1 && s.epochs(0).phase() == v1::EPOCH_PHASE_COMMITTED;
        },
        "version 3 committed");
  }
  Finished Ask(std::vector<std::string> arguments) {
    return RunTool("wwctl", std::move(arguments), {{"WEIGHTWIRE_ADDRESS", daemon_.grpc()}});
  }
  json AskJson(const std::string& command) {
    const Finished run = Ask({command, "--json"});
    EXPECT_EQ(run.code, 0) << run.err;
    json parsed = json::parse(run.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << run.out;
    return parsed;
  }

  Daemon daemon_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(Wwctl, StatusAsJsonNamesTheEngines) {
  const json status = AskJson("status");
  EXPECT_EQ(status.at("job"), "default");
  EXPECT_EQ(status.at("committed_version"), "3");  // 64-bit numbers are text in proto JSON
  EXPECT_EQ(status.at("deciding"), true);
  EXPECT_EQ(status.at("waiting_for"), "");
  ASSERT_EQ(status.at("engines").size(), 1u);
  EXPECT_EQ(status.at("engines")[0].at("name"), "engine-a");
  EXPECT_EQ(status.at("engines")[0].at("state"), "ENGINE_STATE_SERVING");
  EXPECT_EQ(status.at("participants").size(), 6u);
}

TEST_F(Wwctl, ViewsAsJsonAreArrays) {
  const json engines = AskJson("engines");
  ASSERT_TRUE(engines.is_array());
  EXPECT_EQ(engines.at(0).at("version"), "3");
  const json epochs = AskJson("epochs");
  ASSERT_TRUE(epochs.is_array());
  EXPECT_EQ(epochs.at(0).at("phase"), "EPOCH_PHASE_COMMITTED");
  EXPECT_EQ(epochs.at(0).at("engines"), json::array({"engine-a"}));
  const json participants = AskJson("participants");
  ASSERT_TRUE(participants.is_array());
  EXPECT_EQ(participants.size(), 6u);
  for (const json& participant : participants) EXPECT_EQ(participant.at("has_layout"), true);
}

TEST_F(Wwctl, TextAnswersWhatEveryoneWaitsForFirst) {
  const Finished status = Ask({"status"});
  EXPECT_EQ(status.code, 0);
  EXPECT_EQ(status.out.rfind("idle: the engine serves version 3\n", 0), 0u) << status.out;
  EXPECT_NE(status.out.find("engine-a"), std::string::npos);
  const Finished participants = Ask({"participants"});
  EXPECT_NE(participants.out.find("trainer/3 of 4"), std::string::npos) << participants.out;
}

TEST_F(Wwctl, ExplainSaysWhoSendsATensor) {
  const Finished all = Ask({"explain"});
  EXPECT_EQ(all.code, 0) << all.err;
  EXPECT_NE(all.out.find("engine-a"), std::string::npos) << all.out;
  const Finished tensor = Ask({"explain", "engine-a", "--tensor", "model.norm.weight"});
  EXPECT_EQ(tensor.code, 0) << tensor.err;
  EXPECT_NE(tensor.out.find("model.norm.weight"), std::string::npos) << tensor.out;
}

TEST_F(Wwctl, ExitCodesNameTheReason) {
  EXPECT_EQ(Ask({"explain", "nobody"}).code, 64 + static_cast<int>(Reason::kNotRegistered));
  EXPECT_EQ(Ask({"explain", "engine-a", "--tensor", "no.such"}).code,
            64 + static_cast<int>(Reason::kTensorMissing));
  EXPECT_EQ(Ask({"commit", "99"}).code, 64 + static_cast<int>(Reason::kNotRegistered));
  EXPECT_EQ(Ask({"abort", "99"}).code, 64 + static_cast<int>(Reason::kNotRegistered));
  EXPECT_EQ(Ask({"evict", "nobody"}).code, 64 + static_cast<int>(Reason::kNotRegistered));
}

TEST_F(Wwctl, EvictFencesTheGroup) {
  EXPECT_EQ(Ask({"evict", "trainer"}).code, 0);
  const auto released = trainer_->rank(0).Publish(Version(4));
  EXPECT_EQ(ReasonName(released.reason()), ReasonName(Reason::kStaleIncarnation));
}

TEST(WwctlAlone, SaysThatNobodyListens) {
  std::string address;
  {
    Daemon daemon;
    address = daemon.grpc();
  }
  const Finished run = RunTool("wwctl", {"status", "--address", address, "--timeout", "5"});
  EXPECT_EQ(run.code, 64 + static_cast<int>(Reason::kTransportFailed)) << run.err;
  EXPECT_NE(run.err.find("is weightwired running"), std::string::npos) << run.err;
}

TEST(WwctlAlone, RefusesWrongUsage) {
  EXPECT_EQ(RunTool("wwctl", {}).code, 2);
  EXPECT_EQ(RunTool("wwctl", {"statsu"}).code, 2);
  EXPECT_EQ(RunTool("wwctl", {"--help"}).code, 0);
}

TEST(WwctlAlone, PlanAsJsonHasTheAgreedFields) {
  const Finished run =
      RunTool("wwctl", {"plan", "--config", DataPath("configs/qwen2.5-0.5b.json"), "--from",
                        "megatron:tp2,pp2", "--to", "vllm:tp2", "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  const json plan = json::parse(run.out);
  EXPECT_EQ(plan.at("plan_id").get<std::string>().size(), 32u);
  EXPECT_GT(plan.at("seconds").get<double>(), 0);
  EXPECT_GT(plan.at("peak_rss_bytes").get<int64_t>(), 1 << 20);
  // 494,032,768 BF16 parameters; vLLM's two ranks each hold the norms, and one kv head each.
  EXPECT_GE(plan.at("bytes_total").get<int64_t>(), 2 * int64_t{494'032'768});
  EXPECT_GT(plan.at("copies").get<int64_t>(), 24);
  EXPECT_EQ(plan.at("proof"), "exact");
  for (const char* field : {"egress_over_bound", "ingress_over_bound", "simulated_over_bound"}) {
    EXPECT_GE(plan.at(field).get<double>(), 1 - 1e-9) << field;
  }
}

TEST(WwctlAlone, PlanRefusesWhatItCannotRead) {
  const std::string config = DataPath("configs/qwen2.5-0.5b.json");
  EXPECT_EQ(RunTool("wwctl", {"plan", "--config", "/nowhere", "--from", "hf", "--to", "hf"}).code,
            64 + static_cast<int>(Reason::kIoError));
  EXPECT_EQ(RunTool("wwctl", {"plan", "--config", config, "--from", "jax:tp2", "--to", "hf"}).code,
            64 + static_cast<int>(Reason::kUnknownScheme));
  EXPECT_EQ(RunTool("wwctl", {"plan", "--config", config, "--from", "hf", "--to", "vllm:tp3"}).code,
            64 + static_cast<int>(Reason::kShapeMismatch));
}

}  // namespace
}  // namespace weightwire::integration
