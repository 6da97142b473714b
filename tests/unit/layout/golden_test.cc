// Checkpoints that real megatron-core processes held: the Hugging Face checkpoint cut by the
// derived pieces must give each rank's file bit for bit.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>

#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

using testing::StoredTensor;
using testing::TensorFile;

struct GoldenCase {
  const char* name;
  const char* model_folder;  ///< under tests/data
  const char* case_folder;
  const char* spec;
  /// What ctest calls the case; gtest's own text has addresses in it, which differ in each run.
  friend void PrintTo(const GoldenCase& golden, std::ostream* out) { *out << golden.spec; }
};

std::string DataPath(const std::string& rest) {
  return testing::SourceDir() + "/tests/data/" + rest;
}

std::string RankName(size_t rank) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank%02zu", rank);
  return text;
}

std::vector<ObservedTensor> Observe(const TensorFile& file) {
  std::vector<ObservedTensor> observed;
  for (const auto& [name, tensor] : file) {
    observed.push_back({name, *DTypeFromName(tensor.dtype), tensor.shape});
  }
  return observed;
}

/// Parameter shapes as the recorder wrote them, and the padded vocabulary.
struct Recorded {
  std::map<std::string, std::vector<int64_t>> shapes;
  int64_t padded_vocab = 0;
};

Recorded ReadRecorded(const std::string& folder, size_t rank) {
  nlohmann::json params;
  Recorded recorded;
  if (folder.find("megatron-te") != std::string::npos) {
    const auto json =
        nlohmann::json::parse(testing::ReadText(folder + "/" + RankName(rank) + ".json"));
    params = json.at("params");
    recorded.padded_vocab = json.at(json.at("padded_vocab").is_null() ? "vocab" : "padded_vocab");
  } else {
    const auto json = nlohmann::json::parse(testing::ReadText(folder + "/layout.json"));
    params = json.at("ranks").at(rank).at("params");
    recorded.padded_vocab = json.at("padded_vocab");
  }
  for (const auto& [name, entry] : params.items()) {
    recorded.shapes[name] = entry.at("shape").get<Shape>();
  }
  return recorded;
}

/// Compares what the pieces cover with the rank's file; returns the number of elements they do not.
int64_t CompareWithFile(const LocalTensor& tensor, const CanonicalSpace& canonical,
                        const TensorFile& checkpoint, const StoredTensor& stored) {
  const size_t bytes = static_cast<size_t>(ElementBytes(tensor.dtype));
  int64_t uncovered = testing::CountElements(tensor.shape);
  for (const Piece& piece : tensor.pieces) {
    const TensorSpec& source = canonical.tensors[piece.tensor];
    const auto& whole = checkpoint.at(source.name).bytes;
    testing::ForEachElement(piece, source.shape, [&](int64_t from, int64_t to) {
      --uncovered;
      ASSERT_EQ(std::memcmp(&whole.at(from * bytes), &stored.bytes.at(to * bytes), bytes), 0)
          << tensor.name << " element " << to << " is not element " << from << " of "
          << source.name;
    });
  }
  return uncovered;
}

int64_t PaddingRows(int64_t rank_rows, int64_t t, int64_t vocab) {
  int64_t rows = 0;
  for (int64_t row = t * rank_rows; row < (t + 1) * rank_rows; ++row) rows += row >= vocab ? 1 : 0;
  return rows;
}

class MegatronGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(MegatronGolden, CheckpointCutByPiecesIsEachRanksFile) {
  const GoldenCase& c = GetParam();
  const std::string model = DataPath(c.model_folder);
  const std::string folder = DataPath(c.case_folder);
  const std::string config = testing::ReadText(model + "/hf/config.json");
  const TensorFile checkpoint = testing::ReadSafetensors(model + "/hf/model.safetensors");
  const int64_t vocab = nlohmann::json::parse(config).at("vocab_size");
  auto spec = ParseParallelSpec(c.spec);
  ASSERT_TRUE(spec.has_value());
  spec->options["vocab_pad"] = std::to_string(ReadRecorded(folder, 0).padded_vocab);
  const auto layout = LayoutFromScheme(config, *spec);
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  ASSERT_EQ(Validate(*layout), OkStatus());
  for (size_t rank = 0; rank < layout->ranks.size(); ++rank) {
    SCOPED_TRACE(RankName(rank));
    const TensorFile file =
        testing::ReadSafetensors(folder + "/" + RankName(rank) + ".safetensors");
    const Recorded recorded = ReadRecorded(folder, rank);
    const auto reconciled = Reconcile(layout->ranks[rank], Observe(file));
    ASSERT_TRUE(reconciled.has_value()) << reconciled.error().ToString();
    ASSERT_EQ(reconciled->tensors.size(), recorded.shapes.size());
    for (const LocalTensor& tensor : reconciled->tensors) {
      ASSERT_EQ(tensor.shape, recorded.shapes.at(tensor.name)) << tensor.name;
      const int64_t uncovered =
          CompareWithFile(tensor, layout->canonical, checkpoint, file.at(tensor.name));
      if (HasFatalFailure()) return;
      const bool is_vocab = tensor.name.ends_with("embedding.word_embeddings.weight") ||
                            tensor.name.ends_with("output_layer.weight");
      const int64_t t = static_cast<int64_t>(rank) % spec->SizeOr("tp", 1);
      const int64_t padding =
          is_vocab ? PaddingRows(tensor.shape[0], t, vocab) * tensor.shape[1] : 0;
      EXPECT_EQ(uncovered, padding) << tensor.name;
    }
  }
}

TEST_P(MegatronGolden, HfLayoutIsTheCheckpoint) {
  const std::string model = DataPath(GetParam().model_folder);
  const auto layout =
      LayoutFromScheme(testing::ReadText(model + "/hf/config.json"), *ParseParallelSpec("hf"));
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  std::map<std::string, std::pair<std::string, Shape>> derived, stored;
  for (const LocalTensor& tensor : layout->ranks[0].tensors) {
    derived[tensor.name] = {std::string(DTypeName(tensor.dtype)), tensor.shape};
  }
  for (const auto& [name, tensor] : testing::ReadSafetensors(model + "/hf/model.safetensors")) {
    // transformers keeps this buffer in fp32 unless the whole model was cast, as in one fixture.
    const bool correction = name.ends_with("e_score_correction_bias");
    stored[name] = {correction ? "F32" : tensor.dtype, tensor.shape};
  }
  EXPECT_EQ(derived, stored);
}

constexpr GoldenCase kCases[] = {
    {"qwen2_tp4", "megatron/qwen2", "megatron/qwen2/mcore-tp4", "megatron:tp4"},
    {"qwen2_tp2pp2", "megatron/qwen2", "megatron/qwen2/mcore-tp2pp2", "megatron:tp2,pp2"},
    {"qwen2_pp2first1", "megatron/qwen2", "megatron/qwen2/mcore-pp2-first1",
     "megatron:pp2,first=1"},
    {"qwen2_pp2layers13", "megatron/qwen2", "megatron/qwen2/mcore-pp2-first1",
     "megatron:pp2,layers=1-3"},
    {"qwen2kv2_tp4", "megatron/qwen2_kv2", "megatron/qwen2_kv2/mcore-tp4", "megatron:tp4"},
    {"qwen2tied_tp2pp2", "megatron/qwen2_tied", "megatron/qwen2_tied/mcore-tp2pp2",
     "megatron:tp2,pp2"},
    {"qwen2_pp2vpp2", "megatron/qwen2", "megatron/qwen2/mcore-pp2vpp2", "megatron:pp2,vpp2"},
    {"qwen2tied_pp2vpp2", "megatron/qwen2_tied", "megatron/qwen2_tied/mcore-pp2vpp2",
     "megatron:pp2,vpp2"},
    {"deepseek_tp2ep2etp1pp2", "megatron/deepseek_v3",
     "megatron/deepseek_v3/mcore-tp2ep2etp1pp2-seq", "megatron:tp2,ep2,etp1,pp2"},
    {"mixtral_tp2ep2etp1", "megatron/mixtral", "megatron/mixtral/mcore-tp2ep2etp1-seq",
     "megatron:tp2,ep2,etp1"},
    {"qwen2moe_tp2ep2etp1", "megatron/qwen2_moe", "megatron/qwen2_moe/mcore-tp2ep2etp1-seq",
     "megatron:tp2,ep2,etp1"},
    {"qwen2moe_tp2ep2etp2", "megatron/qwen2_moe", "megatron/qwen2_moe/mcore-tp2ep2etp2-seq",
     "megatron:tp2,ep2,dp2"},
    {"qwen3moe_ep2grouped", "megatron/qwen3_moe", "megatron/qwen3_moe/mcore-ep2-grouped",
     "megatron:ep2,dp2,experts=grouped"},
    {"qwen3moe_tp2ep2etp1", "megatron/qwen3_moe", "megatron/qwen3_moe/mcore-tp2ep2etp1-seq",
     "megatron:tp2,ep2,etp1"},
    {"qwen3moe_tp2ep2etp2", "megatron/qwen3_moe", "megatron/qwen3_moe/mcore-tp2ep2etp2-seq",
     "megatron:tp2,ep2,etp2,dp2"},
    {"te_qwen2_pp2vpp2", "megatron-te/qwen2", "megatron-te/qwen2/tp1pp2vpp2",
     "megatron:pp2,vpp2,dp2,spec=te"},
    {"te_deepseek_tp2pp2ep2", "megatron-te/deepseek_v3", "megatron-te/deepseek_v3/tp2pp2ep2",
     "megatron:tp2,pp2,ep2,etp1,spec=te"},
    {"te_deepseekmtp_pp2ep2", "megatron-te/deepseek_v3_mtp", "megatron-te/deepseek_v3_mtp/pp2ep2",
     "megatron:pp2,ep2,dp2,first=31,spec=te"},
    {"te_mixtral_tp2pp2ep2", "megatron-te/mixtral", "megatron-te/mixtral/tp2pp2ep2",
     "megatron:tp2,pp2,ep2,etp1,spec=te"},
    {"te_qwen2moe_tp4ep4etp2", "megatron-te/qwen2_moe", "megatron-te/qwen2_moe/w8_tp4ep4etp2",
     "megatron:tp4,ep4,etp2,dp2,spec=te"},
    {"te_qwen3moe_tp2ep2etp2", "megatron-te/qwen3_moe", "megatron-te/qwen3_moe/tp2ep2etp2",
     "megatron:tp2,ep2,etp2,dp2,spec=te"},
    {"qwen3_tp2", "megatron/qwen3", "megatron/qwen3/mcore-tp2", "megatron:tp2"},
    {"te_qwen2_tp2pp2", "megatron-te/qwen2", "megatron-te/qwen2/tp2pp2",
     "megatron:tp2,pp2,spec=te"},
    {"te_qwen2tied_tp2pp2", "megatron-te/qwen2_tied", "megatron-te/qwen2_tied/tp2pp2",
     "megatron:tp2,pp2,spec=te"},
    {"te_qwen2mqa_tp4", "megatron-te/qwen2_mqa", "megatron-te/qwen2_mqa/tp4",
     "megatron:tp4,spec=te"},
    {"te_qwen3_tp2pp2", "megatron-te/qwen3", "megatron-te/qwen3/tp2pp2",
     "megatron:tp2,pp2,spec=te"},
};
INSTANTIATE_TEST_SUITE_P(Fixtures, MegatronGolden, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

constexpr const char* kLlamaConfig =
    R"({"model_type":"llama","hidden_size":64,"num_hidden_layers":4,"num_attention_heads":8,
        "num_key_value_heads":4,"intermediate_size":96,"vocab_size":250})";

// There is no checkpoint beside this fixture: the ranks are pasted together and cut again.
TEST(MegatronGoldenLlama, RanksAgreeWhenPastedAndCutAgain) {
  const std::string folder = DataPath("megatron-te/llama");
  const auto layout =
      LayoutFromScheme(kLlamaConfig, *ParseParallelSpec("megatron:tp4,spec=te,vocab_pad=256"));
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  std::vector<std::vector<std::array<int, 2>>> whole;
  for (const TensorSpec& tensor : layout->canonical.tensors) {
    whole.emplace_back(testing::CountElements(tensor.shape), std::array{-1, -1});
  }
  for (size_t rank = 0; rank < 4; ++rank) {
    const TensorFile file =
        testing::ReadSafetensors(folder + "/" + RankName(rank) + ".safetensors");
    const auto reconciled = Reconcile(layout->ranks[rank], Observe(file));
    ASSERT_TRUE(reconciled.has_value()) << reconciled.error().ToString();
    const Recorded recorded = ReadRecorded(folder, rank);
    for (const LocalTensor& tensor : reconciled->tensors) {
      ASSERT_EQ(tensor.shape, recorded.shapes.at(tensor.name));
      const auto& bytes = file.at(tensor.name).bytes;
      for (const Piece& piece : tensor.pieces) {
        testing::ForEachElement(
            piece, layout->canonical.tensors[piece.tensor].shape, [&](int64_t at, int64_t from) {
              const std::array<int, 2> value = {bytes.at(2 * from), bytes.at(2 * from + 1)};
              auto& element = whole[piece.tensor].at(at);
              // Pasted by an earlier rank: cutting it again must give this rank's value.
              if (element[0] >= 0) {
                ASSERT_EQ(element, value) << tensor.name;
              }
              element = value;
            });
      }
    }
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const auto& element : whole[i]) {
      ASSERT_GE(element[0], 0) << layout->canonical.tensors[i].name << " has a gap";
    }
  }
}

}  // namespace
}  // namespace weightwire::layout
