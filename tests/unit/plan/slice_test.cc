#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/support/safetensors.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using testing::Cut;
using testing::OneTensor;
using weightwire::testing::ReadText;
using weightwire::testing::SourceDir;

TEST(SliceOf, HoldsTheStreamsOfOneRankAndSide) {
  const TransferPlan plan =
      BuildPlan(OneTensor({12, 4}, Cut({12, 4}, 0, 3)), OneTensor({12, 4}, Cut({12, 4}, 1, 2)))
          .value();
  const RankSlice sends = SliceOf(plan, Side::kSource, 1);
  EXPECT_EQ(sends.plan, plan.id);
  EXPECT_EQ(sends.side, Side::kSource);
  EXPECT_EQ(sends.rank, 1u);
  EXPECT_EQ(sends.tensor_names, plan.tensor_names);
  EXPECT_EQ(sends.streams, (std::vector<Stream>{plan.streams[1], plan.streams[4]}));
  const RankSlice receives = SliceOf(plan, Side::kTarget, 1);
  EXPECT_EQ(receives.streams,
            (std::vector<Stream>{plan.streams[3], plan.streams[4], plan.streams[5]}));
}

// Tied and fused tensors (Qwen's embedding; qkv and gate_up of vLLM), pipeline stages of unequal
// size, and experts: what every copy is called does not change.
TEST(SliceOf, NamesWhatItsCopiesNameOnceAndNothingElse) {
  struct Case {
    const char* config;
    const char* from;
    const char* to;
  };
  for (const Case& c : {Case{"qwen2.5-0.5b", "megatron:tp2,pp3", "vllm:tp2"},
                        Case{"qwen2.5-0.5b", "hf", "vllm:tp1"}}) {
    const std::string config = ReadText(SourceDir() + "/tests/data/configs/" + c.config + ".json");
    const auto layout_of = [&](const char* spec) {
      return layout::LayoutFromScheme(config, layout::ParseParallelSpec(spec).value()).value();
    };
    const TransferPlan plan = BuildPlan(layout_of(c.from), layout_of(c.to)).value();
    for (const Side side : {Side::kSource, Side::kTarget}) {
      const uint32_t ranks = side == Side::kSource ? plan.source_ranks : plan.target_ranks;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const RankSlice slice = SliceOf(plan, side, rank);
        std::set<std::string> named;
        for (Stream stream : slice.streams) {
          for (CopyOp& op : stream.ops) {
            const std::string& name = slice.tensor_names.at(op.canonical);
            named.insert(name);
            op.canonical = static_cast<uint32_t>(std::ranges::find(plan.tensor_names, name) -
                                                 plan.tensor_names.begin());
          }
          EXPECT_EQ(stream, plan.streams.at(stream.id));
        }
        EXPECT_EQ(named.size(), slice.tensor_names.size()) << "each once, none that nobody names";
        EXPECT_LE(slice.tensor_names.size(), plan.tensor_names.size());
      }
    }
  }
}

TEST(SliceOf, IsEmptyForARankOutsideThePlan) {
  const TransferPlan plan =
      BuildPlan(OneTensor({12}, Cut({12}, 0, 3)), OneTensor({12}, Cut({12}, 0, 2))).value();
  EXPECT_TRUE(SliceOf(plan, Side::kTarget, 2).streams.empty());
}

}  // namespace
}  // namespace weightwire::plan
