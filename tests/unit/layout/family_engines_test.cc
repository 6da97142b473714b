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

}  // namespace
}  // namespace weightwire::layout
