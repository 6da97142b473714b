// Where Megatron's own notation places MTP layers, and what goes with them: its TransformerBlock
// (has_final_layernorm_in_this_stage) and GPTModel (mtp_process) of megatron-core 0.16.1 and
// 0.19.2.
#include <gtest/gtest.h>

#include <algorithm>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

std::string Config(bool tied, int mtp_layers) {
  return R"({"model_type":"deepseek_v3","hidden_size":16,"num_hidden_layers":3,
             "num_attention_heads":4,"intermediate_size":8,"vocab_size":100,"kv_lora_rank":6,
             "q_lora_rank":8,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4,
             "n_routed_experts":2,"moe_intermediate_size":6,"tie_word_embeddings":)" +
         std::string(tied ? "true" : "false") +
         ",\"num_nextn_predict_layers\":" + std::to_string(mtp_layers) + "}";
}

/// Of each rank, in one letter each: E embedding, t decoder layer, N final norm, m MTP layer, H
/// head.
std::vector<std::string> Held(const std::string& config, const std::string& spec) {
  const auto layout = LayoutFromScheme(config, *ParseParallelSpec(spec));
  if (!layout) return {layout.error().ToString()};
  std::vector<std::string> ranks;
  for (const RankLayout& rank : layout->ranks) {
    std::string held;
    const auto count = [&rank](std::string_view ending) {
      return std::ranges::count_if(rank.tensors, [ending](const LocalTensor& tensor) {
        return tensor.name.ends_with(ending) &&
               (ending[0] != '.' || tensor.name.find("mtp.") == std::string::npos);
      });
    };
    held.append(static_cast<size_t>(count("embedding.word_embeddings.weight")), 'E');
    held.append(static_cast<size_t>(count(".input_layernorm.weight")), 't');
    held.append(static_cast<size_t>(count("decoder.final_layernorm.weight")), 'N');
    held.append(static_cast<size_t>(count("eh_proj.weight")), 'm');
    held.append(static_cast<size_t>(count("output_layer.weight")), 'H');
    ranks.push_back(held);
  }
  return ranks;
}

using Ranks = std::vector<std::string>;

TEST(MtpStage, IsWhereTheNotationSays) {
  const std::string config = Config(false, 1);
  EXPECT_EQ(Held(config, "megatron:pp4,layout=Et*2|t|m|L"), (Ranks{"Ett", "tN", "Em", "H"}));
  EXPECT_EQ(Held(config, "megatron:pp4,layout=Et*2|t||mL"), (Ranks{"Ett", "tN", "", "EmH"}));
  EXPECT_EQ(Held(config, "megatron:pp4,layout=Et|t|tm|L"), (Ranks{"Et", "t", "EtNm", "H"}));
}

TEST(MtpStage, IsTheLastOneWhereNothingIsSaid) {
  EXPECT_EQ(Held(Config(false, 1), "megatron:pp3"), (Ranks{"Et", "t", "EtNmH"}));
  EXPECT_EQ(Held(Config(false, 1), "megatron:pp3,layers=1-2-0"), (Ranks{"Et", "ttN", "EmH"}));
  EXPECT_EQ(Held(Config(false, 0), "megatron:pp3,layers=1-2-0"), (Ranks{"Et", "tt", "NH"}));
  EXPECT_EQ(Held(Config(false, 1), "megatron:pp3,layers=1-2-0,mtp=none"),
            (Ranks{"Et", "tt", "NH"}));
}

TEST(MtpStage, ATiedHeadIsTheLastStagesUnlessItHasAnEmbeddingForMtp) {
  EXPECT_EQ(Held(Config(true, 1), "megatron:pp3,layout=Ettt|m|L"), (Ranks{"EtttN", "Em", "H"}));
  EXPECT_EQ(Held(Config(true, 1), "megatron:pp3,layout=Ett|t|mL"), (Ranks{"Ett", "tN", "Em"}));
}

TEST(MtpStage, IsTheLastChunkOfItsStage) {
  const std::string config = Config(false, 2);
  EXPECT_EQ(Held(config, "megatron:pp2,vpp2,layout=Et|t|tmm|L"), (Ranks{"EEttNmm", "tH"}));
  for (const char* layout : {"Et|t|tm|mL", "Et|tmm|t|L", "Et|t|tm|L", "Etmm|t|t|L", "Et|mm|tt|L"}) {
    const auto refused = LayoutFromScheme(
        config, *ParseParallelSpec(std::string("megatron:pp2,vpp2,layout=") + layout));
    ASSERT_FALSE(refused.has_value()) << layout;
    EXPECT_EQ(refused.error().reason(), Reason::kShapeMismatch) << layout;
    EXPECT_NE(refused.error().message().find(layout), std::string::npos)
        << refused.error().ToString();
  }
}

}  // namespace
}  // namespace weightwire::layout
