#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "server/layout/scheme.h"
#include "server/wire/slice.h"

// What a coordinator sends to one rank is bounded by what that rank copies, whatever the model has.
namespace weightwire::wire {
namespace {

/// Tied, and of no even size but the heads.
constexpr const char* kConfig = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 45,
  "intermediate_size": 99, "num_hidden_layers": 7, "num_attention_heads": 6,
  "num_key_value_heads": 3, "head_dim": 15, "vocab_size": 1237, "tie_word_embeddings": true,
  "num_experts": 21, "num_experts_per_tok": 2, "moe_intermediate_size": 27,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"})";

layout::ModelLayout Layout(const char* spec) {
  return layout::LayoutFromScheme(kConfig, layout::ParseParallelSpec(spec).value()).value();
}

TEST(SliceBytes, OfARankAreBoundedByItsCopies) {
  const plan::TransferPlan plan =
      plan::BuildPlan(Layout("megatron:tp1,pp7,ep21,etp1,dp21"), Layout("vllm:tp1,dp7,ep")).value();
  ASSERT_EQ(plan.source_ranks, 147u);
  ASSERT_EQ(plan.target_ranks, 7u);
  size_t all = 0;
  size_t with_whole_table = 0;
  size_t table = 0;
  for (const std::string& name : plan.tensor_names) table += name.size() + 2;
  for (const auto side : {plan::Side::kSource, plan::Side::kTarget}) {
    for (uint32_t rank = 0; rank < (side == plan::Side::kSource ? 147u : 7u); ++rank) {
      const auto slice = std::make_shared<const plan::RankSlice>(plan::SliceOf(plan, side, rank));
      size_t copies = 0;
      for (const plan::Stream& stream : slice->streams) copies += stream.ops.size();
      SliceWriter writer(slice, 256 << 10, true);
      SliceReader reader;
      size_t bytes = 0;
      for (v1::SlicePart part; writer.Next(&part);) {
        bytes += part.ByteSizeLong();
        ASSERT_TRUE(reader.Add(part).ok());
      }
      EXPECT_EQ(reader.Finish(), *slice);
      EXPECT_LE(bytes, 64 + 24 * slice->streams.size() + 56 * copies)
          << slice->streams.size() << " streams, " << copies << " copies of rank " << rank;
      all += bytes;
      with_whole_table += table + 40 * copies;
    }
  }
  RecordProperty("bytes", std::to_string(all));
  std::printf("%zu bytes; with the model's names for every rank more than %zu\n", all,
              with_whole_table);
  EXPECT_LT(20 * all, with_whole_table);
}

}  // namespace
}  // namespace weightwire::wire
