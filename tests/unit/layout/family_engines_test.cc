// What engines and trainers hold of families for which there is no dump, element by element against
// rules written here from the loaders' own code.
#include <gtest/gtest.h>

#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

std::string ConfigOf(const std::string& listing) {
  const std::string folder = testing::SourceDir() + "/tests/data/transformers/";
  return nlohmann::json::parse(testing::ReadText(folder + listing + ".json")).at("config").dump();
}

ModelLayout Derive(const std::string& listing, const char* spec) {
  const auto layout = LayoutFromScheme(ConfigOf(listing), *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << layout.error().ToString();
  if (!layout) return {};
  EXPECT_EQ(Validate(*layout), OkStatus());
  return *layout;
}

/// The canonical element behind each local one: "name[row-major index]", "" for padding.
std::vector<std::string> Contents(const ModelLayout& layout, size_t rank, const std::string& name) {
  for (const LocalTensor& tensor : layout.ranks.at(rank).tensors) {
    if (tensor.name != name) continue;
    std::vector<std::string> contents(testing::CountElements(tensor.shape));
    for (const Piece& piece : tensor.pieces) {
      const TensorSpec& source = layout.canonical.tensors[piece.tensor];
      testing::ForEachElement(piece, source.shape, [&](int64_t from, int64_t to) {
        contents.at(to) = source.name + "[" + std::to_string(from) + "]";
      });
    }
    return contents;
  }
  ADD_FAILURE() << "rank " << rank << " has no " << name;
  return {};
}

std::string Element(const std::string& name, int64_t index) {
  return name + "[" + std::to_string(index) + "]";
}

// Sizes of llama4_text-plain: hidden 36, 6 heads of 10 rows, 2 kv heads, 3 experts of 52.
constexpr int64_t kHidden = 36;
constexpr int64_t kHead = 10;
constexpr int64_t kInner = 52;
constexpr int64_t kExperts = 3;

/// view(heads, head / 2, 2, hidden).transpose(1, 2): row j · head / 2 + i of a head is 2i + j.
void AppendUnpairedHeads(std::vector<std::string>& to, const std::string& name, int64_t first,
                         int64_t count) {
  for (int64_t head = first; head < first + count; ++head) {
    for (int64_t j = 0; j < 2; ++j) {
      for (int64_t i = 0; i < kHead / 2; ++i) {
        for (int64_t column = 0; column < kHidden; ++column) {
          to.push_back(Element(name, (head * kHead + 2 * i + j) * kHidden + column));
        }
      }
    }
  }
}

class Llama4Engines : public ::testing::TestWithParam<const char*> {};

TEST_P(Llama4Engines, TakesPairsOfRowsApartInQAndK) {
  const ModelLayout layout = Derive("llama4_text-plain", GetParam());
  const std::string at = "model.layers.1.self_attn.";
  for (int64_t t = 0; t < 2; ++t) {
    std::vector<std::string> expected;
    AppendUnpairedHeads(expected, at + "q_proj.weight", 3 * t, 3);
    AppendUnpairedHeads(expected, at + "k_proj.weight", t, 1);
    for (int64_t i = 0; i < kHead * kHidden; ++i) {
      expected.push_back(Element(at + "v_proj.weight", t * kHead * kHidden + i));
    }
    EXPECT_EQ(Contents(layout, t, at + "qkv_proj.weight"), expected);
  }
}

TEST_P(Llama4Engines, TransposesFusedExperts) {
  const ModelLayout layout = Derive("llama4_text-plain", GetParam());
  const bool vllm = std::string(GetParam()).starts_with("vllm");
  const std::string at = "model.layers.1.feed_forward.experts.";
  const std::string engine = vllm ? at + "routed_experts." : at;
  const int64_t part = kInner / 2;
  for (int64_t t = 0; t < 2; ++t) {
    std::vector<std::string> w13, w2;
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      for (int64_t up = 0; up < 2; ++up) {
        for (int64_t row = 0; row < part; ++row) {
          for (int64_t column = 0; column < kHidden; ++column) {
            const int64_t inner = up * kInner + t * part + row;
            const int64_t index = (expert * kHidden + column) * 2 * kInner + inner;
            w13.push_back(Element(at + "gate_up_proj", index));
          }
        }
      }
      for (int64_t row = 0; row < kHidden; ++row) {
        for (int64_t inner = t * part; inner < (t + 1) * part; ++inner) {
          w2.push_back(Element(at + "down_proj", (expert * kInner + inner) * kHidden + row));
        }
      }
    }
    EXPECT_EQ(Contents(layout, t, engine + "w13_weight"), w13);
    EXPECT_EQ(Contents(layout, t, engine + "w2_weight"), w2);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Llama4Engines, ::testing::Values("vllm:tp2", "sglang:tp2"),
                         [](const auto& test) { return std::string(test.param).substr(0, 4); });

TEST(Llama4Megatron, KeepsPairsAndTransposesExperts) {
  const ModelLayout layout = Derive("llama4_text-plain", "megatron:tp2,vocab_pad=84");
  const std::string hf = "model.layers.1.";
  const std::string at = "decoder.layers.1.";
  for (int64_t t = 0; t < 2; ++t) {
    std::vector<std::string> qkv;
    const auto rows = [&](const char* name, int64_t first, int64_t count) {
      for (int64_t i = first * kHidden; i < (first + count) * kHidden; ++i) {
        qkv.push_back(Element(hf + "self_attn." + name + "_proj.weight", i));
      }
    };
    rows("q", 3 * t * kHead, 3 * kHead);
    rows("k", t * kHead, kHead);
    rows("v", t * kHead, kHead);
    EXPECT_EQ(Contents(layout, t, at + "self_attention.linear_qkv.weight"), qkv);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      std::vector<std::string> fc1;
      for (int64_t up = 0; up < 2; ++up) {
        for (int64_t row = 0; row < kInner / 2; ++row) {
          for (int64_t column = 0; column < kHidden; ++column) {
            const int64_t inner = up * kInner + t * kInner / 2 + row;
            fc1.push_back(Element(hf + "feed_forward.experts.gate_up_proj",
                                  (expert * kHidden + column) * 2 * kInner + inner));
          }
        }
      }
      EXPECT_EQ(Contents(layout, t,
                         at + "mlp.experts.local_experts." + std::to_string(expert) +
                             ".linear_fc1.weight"),
                fc1);
    }
  }
}

// Sizes of qwen2_5_vl-nested's tower: hidden 24, 4 heads of 6 rows, intermediate 20, merged 96.
class Qwen25VlEngines : public ::testing::TestWithParam<const char*> {};

TEST_P(Qwen25VlEngines, CutTheVisionTower) {
  const ModelLayout layout = Derive("qwen2_5_vl-nested", GetParam());
  const bool vllm = std::string(GetParam()).starts_with("vllm");
  const std::string at = "visual.blocks.1.";
  const auto rows = [](const std::string& name, int64_t begin, int64_t count, int64_t columns) {
    std::vector<std::string> elements;
    for (int64_t i = begin * columns; i < (begin + count) * columns; ++i) {
      elements.push_back(Element(name, i));
    }
    return elements;
  };
  const auto columns = [](const std::string& name, int64_t height, int64_t width, int64_t t) {
    std::vector<std::string> elements;
    for (int64_t row = 0; row < height; ++row) {
      for (int64_t column = t * width / 2; column < (t + 1) * width / 2; ++column) {
        elements.push_back(Element(name, row * width + column));
      }
    }
    return elements;
  };
  for (int64_t t = 0; t < 2; ++t) {
    const std::string qkv = at + "attn." + (vllm ? "qkv" : "qkv_proj");
    for (const auto& [leaf, width] : {std::pair{".weight", 24}, std::pair{".bias", 1}}) {
      std::vector<std::string> expected;
      for (int64_t part = 0; part < 3; ++part) {
        const auto here = rows(at + "attn.qkv" + leaf, part * 24 + t * 12, 12, width);
        expected.insert(expected.end(), here.begin(), here.end());
      }
      EXPECT_EQ(Contents(layout, t, qkv + leaf), expected);
      std::vector<std::string> gate_up = rows(at + "mlp.gate_proj" + leaf, t * 10, 10, width);
      const auto up = rows(at + "mlp.up_proj" + leaf, t * 10, 10, width);
      gate_up.insert(gate_up.end(), up.begin(), up.end());
      EXPECT_EQ(Contents(layout, t, at + "mlp.gate_up_proj" + leaf), gate_up);
    }
    const std::string merger = "visual.merger.mlp.";
    const std::string patch = "visual.patch_embed.proj.weight";
    EXPECT_EQ(Contents(layout, t, at + "attn.proj.weight"),
              columns(at + "attn.proj.weight", 24, 24, t));
    EXPECT_EQ(Contents(layout, t, at + "attn.proj.bias"), rows(at + "attn.proj.bias", 0, 24, 1));
    EXPECT_EQ(Contents(layout, t, at + "mlp.down_proj.weight"),
              columns(at + "mlp.down_proj.weight", 24, 20, t));
    EXPECT_EQ(Contents(layout, t, merger + "0.weight"), rows(merger + "0.weight", t * 48, 48, 96));
    EXPECT_EQ(Contents(layout, t, merger + "0.bias"), rows(merger + "0.bias", t * 48, 48, 1));
    EXPECT_EQ(Contents(layout, t, merger + "2.weight"), columns(merger + "2.weight", 36, 96, t));
    EXPECT_EQ(Contents(layout, t, patch), rows(patch, 0, 24, 3 * 2 * 7 * 7));
    const std::string text = vllm ? "language_model." : "";
    EXPECT_EQ(Contents(layout, t, text + "model.norm.weight"), rows("model.norm.weight", 0, 36, 1));
  }
}

TEST_P(Qwen25VlEngines, HoldEveryTensorOfTheTower) {
  const ModelLayout layout = Derive("qwen2_5_vl-nested", GetParam());
  for (uint32_t i = 0; i < layout.canonical.tensors.size(); ++i) {
    int64_t held = 0;
    for (const RankLayout& rank : layout.ranks) {
      for (const LocalTensor& tensor : rank.tensors) {
        for (const Piece& piece : tensor.pieces) {
          held += piece.tensor == i ? ElementCount(piece.box) : 0;
        }
      }
    }
    EXPECT_GE(held, testing::CountElements(layout.canonical.tensors[i].shape))
        << layout.canonical.tensors[i].name;
  }
}

TEST_P(Qwen25VlEngines, RefuseHeadsThatDoNotDivide) {
  const bool vllm = std::string(GetParam()).starts_with("vllm");
  auto config = nlohmann::json::parse(ConfigOf("qwen2_5_vl-flat"));
  config["num_key_value_heads"] = 3;
  config["intermediate_size"] = 51;
  config["vocab_size"] = 192;
  const auto layout =
      LayoutFromScheme(config.dump(), *ParseParallelSpec(vllm ? "vllm:tp3" : "sglang:tp3"));
  ASSERT_FALSE(layout.has_value());
  EXPECT_EQ(layout.error().reason(), Reason::kShapeMismatch);
  EXPECT_EQ(layout.error().tensor(), "visual.blocks.0.attn.qkv.weight");
}

INSTANTIATE_TEST_SUITE_P(Engines, Qwen25VlEngines, ::testing::Values("vllm:tp2", "sglang:tp2"),
                         [](const auto& test) { return std::string(test.param).substr(0, 4); });

TEST(Qwen25VlMegatron, HasTheTowerWholeInTheFirstStage) {
  const ModelLayout layout = Derive("qwen2_5_vl-nested", "megatron:tp2,pp3,vocab_pad=84");
  size_t tower = 0;
  for (const TensorSpec& tensor : layout.canonical.tensors) {
    if (!tensor.name.starts_with("visual.")) continue;
    ++tower;
    for (size_t rank = 0; rank < 2; ++rank) {
      const auto contents = Contents(layout, rank, tensor.name);
      ASSERT_EQ(contents.size(), testing::CountElements(tensor.shape));
      EXPECT_EQ(contents.front(), Element(tensor.name, 0));
      EXPECT_EQ(contents.back(), Element(tensor.name, static_cast<int64_t>(contents.size()) - 1));
    }
  }
  EXPECT_EQ(tower, 30u);
  for (size_t rank = 2; rank < 6; ++rank) {
    for (const LocalTensor& tensor : layout.ranks[rank].tensors) {
      EXPECT_TRUE(tensor.name.starts_with("language_model.")) << tensor.name;
    }
  }
}

}  // namespace
}  // namespace weightwire::layout
