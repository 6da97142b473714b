#include "server/layout/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

std::string TraceText(const std::string& name, const char* folder = "vllm-traces/") {
  return testing::ReadText(testing::SourceDir() + "/tests/data/" + folder + name);
}

/// Tensors by name with sorted pieces and flat shapes (rows do not tell a stack's), so that only
/// content matters.
std::map<std::string, LocalTensor> Normalised(const RankLayout& rank) {
  std::map<std::string, LocalTensor> result;
  for (LocalTensor tensor : rank.tensors) {
    std::sort(tensor.pieces.begin(), tensor.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.local_offset < b.local_offset; });
    tensor.shape = {testing::CountElements(tensor.shape)};
    const std::string name = tensor.name;
    result.emplace(name, std::move(tensor));
  }
  return result;
}

/// What every place of a parameter holds: by name and offset, the canonical tensor and the element
/// of it. A recorded box is another than the scheme's where both say the same.
std::map<std::string, std::map<int64_t, std::pair<uint32_t, int64_t>>> Elements(
    const RankLayout& rank, const CanonicalSpace& canonical) {
  std::map<std::string, std::map<int64_t, std::pair<uint32_t, int64_t>>> all;
  for (const LocalTensor& tensor : rank.tensors) {
    auto& places = all[tensor.name];
    for (const Piece& piece : tensor.pieces) {
      const Shape& shape = canonical.tensors[piece.tensor].shape;
      Shape index(shape.size(), 0);
      const int64_t count = testing::CountElements(piece.box.extent);
      for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, at = piece.local_offset, element = 0, width = 1;
        for (size_t d = shape.size(); d-- > 0;) {
          const int64_t step = rest % piece.box.extent[d];
          rest /= piece.box.extent[d];
          at += step * piece.local_stride[d];
          element += (piece.box.begin[d] + step) * width;
          width *= shape[d];
        }
        places[at] = {piece.tensor, element};
      }
    }
  }
  return all;
}

class VllmFamilies : public ::testing::TestWithParam<const char*> {};

TEST_P(VllmFamilies, SchemePutsEveryElementWhereTheLoaderDid) {
  const auto trace = ParseTrace(TraceText((std::string(GetParam()) + "-tp2.json").c_str()));
  ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
  const auto scheme = LayoutFromScheme(trace->config_json, *ParseParallelSpec("vllm:tp2"));
  ASSERT_TRUE(scheme.has_value()) << scheme.error().ToString();
  ASSERT_EQ(trace->ranks.size(), 2u);
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto traced = LayoutFromTrace(scheme->canonical, trace->ranks[rank]);
    ASSERT_TRUE(traced.has_value()) << traced.error().ToString();
    const auto loaded = Elements(*traced, scheme->canonical);
    const auto described = Elements(scheme->ranks[rank], scheme->canonical);
    for (const auto& [name, places] : loaded) {
      ASSERT_TRUE(described.contains(name)) << "rank " << rank << ": the scheme lacks " << name;
      EXPECT_TRUE(described.at(name) == places) << "rank " << rank << " " << name;
    }
    for (const auto& [name, places] : described) {
      EXPECT_TRUE(loaded.contains(name)) << "rank " << rank << ": the loader lacks " << name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Traces, VllmFamilies,
                         ::testing::Values("gemma3", "gemma4", "gemma4_text", "glm4_moe_lite",
                                           "llama4", "minimax_m2", "ministral3", "mistral3",
                                           "qwen3_vl", "qwen3_vl_moe", "seed_oss"),
                         [](const auto& test) { return std::string(test.param); });

class VllmScheme : public ::testing::TestWithParam<const char*> {};

TEST_P(VllmScheme, EqualsWhatTheEnginesLoaderDid) {
  const auto trace = ParseTrace(TraceText(GetParam()));
  ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
  const auto scheme = LayoutFromScheme(trace->config_json, *ParseParallelSpec("vllm:tp2"));
  ASSERT_TRUE(scheme.has_value()) << scheme.error().ToString();
  ASSERT_EQ(trace->ranks.size(), 2u);
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto traced = LayoutFromTrace(scheme->canonical, trace->ranks[rank]);
    ASSERT_TRUE(traced.has_value()) << traced.error().ToString();
    EXPECT_EQ(Normalised(*traced), Normalised(scheme->ranks[rank])) << "rank " << rank;
  }
}
INSTANTIATE_TEST_SUITE_P(Traces, VllmScheme,
                         ::testing::Values("qwen2-tp2.json", "qwen3-moe-tp2.json",
                                           "deepseek-v3-fp8-tp2.json", "qwen3-moe-fp8-tp2.json"),
                         [](const auto& test) { return std::to_string(test.index); });

/// By tensor of the rank the canonical element behind each local one. Tensors that hold none are
/// left out. Of what dtype floats are is the process's own affair: a router of Nemotron is fp32
/// where vLLM has no kernel for it.
std::map<std::string, std::map<int64_t, std::string>> Elements(const CanonicalSpace& space,
                                                               const RankLayout& rank) {
  std::map<std::string, std::map<int64_t, std::string>> tensors;
  for (const LocalTensor& tensor : rank.tensors) {
    if (tensor.pieces.empty()) continue;
    auto& elements = tensors[tensor.name];
    for (const Piece& piece : tensor.pieces) {
      const TensorSpec& source = space.tensors[piece.tensor];
      testing::ForEachElement(piece, source.shape, [&](int64_t from, int64_t to) {
        elements[to] = source.name + "[" + std::to_string(from) + "]";
      });
    }
  }
  return tensors;
}

struct LinearTrace {
  const char* folder;
  const char* file;
  const char* spec;
};
class LinearLoaders : public ::testing::TestWithParam<LinearTrace> {};

/// Several rows of a trace may be one piece of the scheme, and the other way round.
TEST_P(LinearLoaders, PutTheElementsWhereTheSchemeHasThem) {
  const auto trace = ParseTrace(TraceText(GetParam().file, GetParam().folder));
  ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
  const auto scheme = LayoutFromScheme(trace->config_json, *ParseParallelSpec(GetParam().spec));
  ASSERT_TRUE(scheme.has_value()) << scheme.error().ToString();
  ASSERT_EQ(Validate(*scheme), OkStatus());
  ASSERT_EQ(trace->ranks.size(), 2u);
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto traced = LayoutFromTrace(scheme->canonical, trace->ranks[rank]);
    ASSERT_TRUE(traced.has_value()) << traced.error().ToString();
    const auto theirs = Elements(scheme->canonical, *traced);
    const auto ours = Elements(scheme->canonical, scheme->ranks[rank]);
    for (const auto& [name, elements] : theirs) {
      const auto it = ours.find(name);
      ASSERT_NE(it, ours.end()) << "rank " << rank << ": the scheme has no " << name;
      EXPECT_EQ(it->second, elements) << "rank " << rank << ", " << name;
    }
    for (const auto& [name, elements] : ours) {
      EXPECT_TRUE(theirs.contains(name)) << "rank " << rank << ": the loader fills no " << name;
    }
  }
}
constexpr const char* kVllm = "vllm-traces/";
constexpr const char* kBridge = "megatron-bridge/";
INSTANTIATE_TEST_SUITE_P(
    Traces, LinearLoaders,
    ::testing::Values(LinearTrace{kVllm, "qwen3-next-tp2.json", "vllm:tp2"},
                      LinearTrace{kVllm, "qwen3-5-tp2.json", "vllm:tp2"},
                      LinearTrace{kVllm, "qwen3-5-moe-tp2.json", "vllm:tp2"},
                      LinearTrace{kVllm, "nemotron-h-tp2.json", "vllm:tp2,skip=*.A_log"},
                      LinearTrace{kVllm, "nemotron-h-latent-tp2.json", "vllm:tp2,skip=*.A_log"},
                      LinearTrace{kBridge, "qwen3-next-tp2.json",
                                  "megatron:tp2,spec=te,skip=*.linear_attn.norm.weight"},
                      LinearTrace{kBridge, "qwen3-5-tp2.json",
                                  "megatron:tp2,spec=te,skip=*.linear_attn.norm.weight"},
                      LinearTrace{kBridge, "qwen3-5-moe-tp2.json",
                                  "megatron:tp2,spec=te,skip=*.linear_attn.norm.weight"},
                      LinearTrace{kBridge, "nemotron-h-tp2.json",
                                  "megatron:tp2,spec=te,conv=flat"}),
    [](const auto& test) { return std::to_string(test.index); });

struct ComputedTensor {
  const char* file;
  const char* spec;
  const char* tensor;
};

/// Engines hold −exp(A_log), Megatron w − 1 of the gated norm: no copy makes that.
TEST(Computed, IsRefusedUnlessItIsLeftOut) {
  const ComputedTensor table[] = {
      {"nemotron-h-tp2.json", "vllm:tp2", "backbone.layers.0.mixer.A_log"},
      {"nemotron-h-tp2.json", "sglang:tp2", "backbone.layers.0.mixer.A_log"},
      {"qwen3-next-tp2.json", "megatron:tp2", "model.layers.0.linear_attn.norm.weight"},
      {"qwen3-5-moe-tp2.json", "megatron:tp2", "model.layers.0.linear_attn.norm.weight"}};
  for (const ComputedTensor& row : table) {
    SCOPED_TRACE(std::string(row.file) + " " + row.spec);
    const auto trace = ParseTrace(TraceText(row.file));
    ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
    const auto layout = LayoutFromScheme(trace->config_json, *ParseParallelSpec(row.spec));
    ASSERT_FALSE(layout.has_value());
    EXPECT_EQ(layout.error().reason(), Reason::kUnknownModel) << layout.error().ToString();
    EXPECT_EQ(layout.error().tensor(), row.tensor);
    const std::string without = std::string(row.spec) + ",skip=" + row.tensor;
    EXPECT_TRUE(LayoutFromScheme(trace->config_json, *ParseParallelSpec(without)).has_value());
    if (std::string_view(row.spec).starts_with("megatron")) {
      const std::string plain = std::string(row.spec) + ",out_norm=plain";
      EXPECT_TRUE(LayoutFromScheme(trace->config_json, *ParseParallelSpec(plain)).has_value());
    }
  }
}

TEST(LayoutFromTrace, StacksExperts) {
  const auto trace = ParseTrace(TraceText("qwen3-moe-tp2.json"));
  ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
  const CanonicalSpace space = *CanonicalFromConfig(trace->config_json);
  const auto layout = LayoutFromTrace(space, trace->ranks[1]);
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  const auto tensors = Normalised(*layout);
  const LocalTensor& w13 = tensors.at("model.layers.0.mlp.experts.routed_experts.w13_weight");
  EXPECT_EQ(w13.shape, (Shape{8 * 128 * 256}));
  ASSERT_EQ(w13.pieces.size(), 16u);
  EXPECT_EQ(space.tensors[w13.pieces[3].tensor].name,
            "model.layers.0.mlp.experts.1.up_proj.weight");
  EXPECT_EQ(w13.pieces[3].box, (Box{{64, 0}, {64, 256}}));
  EXPECT_EQ(w13.pieces[3].local_offset, 3 * 64 * 256);
  const LocalTensor& w2 = tensors.at("model.layers.0.mlp.experts.routed_experts.w2_weight");
  EXPECT_EQ(w2.shape, (Shape{8 * 256 * 64}));
  EXPECT_EQ(w2.pieces[7].box, (Box{{0, 64}, {256, 64}}));
}

CanonicalSpace SmallSpace() {
  return {{{"experts", DType::kBF16, {3, 4, 5}}, {"w", DType::kBF16, {4, 6}}}};
}

TEST(LayoutFromTrace, FollowsViews) {
  const std::vector<TraceRow> rows = {
      // expert 2, rows 1..3 transposed, into a [5, 3] block of a [5, 7] matrix
      {"experts",
       {{"select", {0, -1}}, {"narrow", {0, 1, 3}}, {"transpose", {0, 1}}},
       "p",
       2,
       {5, 3},
       {7, 1},
       DType::kBF16},
      {"w",
       {{"t", {}}, {"narrow", {-2, 4, 2}}, {"unbind", {}}, {"__getitem__", {1}}},
       "q",
       0,
       {4},
       {1},
       DType::kF32},
      {"w", {{"__getitem__", {3}}, {"unsqueeze", {-1}}}, "r", 0, {6, 1}, {1, 1}, DType::kBF16},
  };
  const auto layout = LayoutFromTrace(SmallSpace(), rows);
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  ASSERT_EQ(layout->tensors.size(), 3u);
  const LocalTensor& p = layout->tensors[0];
  EXPECT_EQ(p.shape, (Shape{5, 7}));
  EXPECT_EQ(p.pieces[0], (Piece{0, {{2, 1, 0}, {1, 3, 5}}, 2, {1, 1, 7}}));
  const LocalTensor& q = layout->tensors[1];
  EXPECT_EQ(q.dtype, DType::kF32);
  EXPECT_EQ(q.shape, (Shape{4}));
  EXPECT_EQ(q.pieces[0], (Piece{1, {{0, 5}, {4, 1}}, 0, {1, 1}}));
  const LocalTensor& r = layout->tensors[2];
  EXPECT_EQ(r.shape, (Shape{6}));
  EXPECT_EQ(r.pieces[0], (Piece{1, {{3, 0}, {1, 6}}, 0, {1, 1}}));
}

TEST(LayoutFromTrace, GivesFlatStorageWhenStridesDiffer) {
  const std::vector<TraceRow> rows = {
      {"w", {{"narrow", {0, 0, 2}}}, "p", 0, {2, 6}, {6, 1}, DType::kBF16},
      {"w", {{"narrow", {0, 2, 2}}, {"t", {}}}, "p", 12, {6, 2}, {2, 1}, DType::kBF16}};
  const auto layout = LayoutFromTrace(SmallSpace(), rows);
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  EXPECT_EQ(layout->tensors[0].shape, (Shape{24}));
}

struct BadRow {
  const char* what;
  Reason reason;
  TraceRow row;
};

TEST(LayoutFromTrace, RefusesBadRows) {
  const int64_t huge = int64_t{1} << 62;
  const std::vector<int64_t> s = {6, 1};
  const DType bf16 = DType::kBF16;
  const std::vector<BadRow> table = {
      {"unknown source", Reason::kTensorMissing, {"v", {}, "p", 0, {4, 6}, s, bf16}},
      {"unknown op", Reason::kInvalidRequest, {"w", {{"roll", {1}}}, "p", 0, {4, 6}, s, bf16}},
      {"narrow too far",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {0, 3, 2}}}, "p", 0, {2, 6}, s, bf16}},
      {"narrow overflows",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {0, huge, huge}}}, "p", 0, {2, 6}, s, bf16}},
      {"narrow negative",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {0, -1, 2}}}, "p", 0, {2, 6}, s, bf16}},
      {"narrow empty",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {0, 0, 0}}}, "p", 0, {0, 6}, s, bf16}},
      {"narrow of no dimension",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {2, 0, 1}}}, "p", 0, {4, 6}, s, bf16}},
      {"narrow short of arguments",
       Reason::kInvalidRequest,
       {"w", {{"narrow", {0, 1}}}, "p", 0, {4, 6}, s, bf16}},
      {"index too far",
       Reason::kInvalidRequest,
       {"w", {{"__getitem__", {4}}}, "p", 0, {6}, {1}, bf16}},
      {"index lowest",
       Reason::kInvalidRequest,
       {"w", {{"select", {0, std::numeric_limits<int64_t>::min()}}}, "p", 0, {6}, {1}, bf16}},
      {"unbind without index",
       Reason::kInvalidRequest,
       {"w", {{"unbind", {0}}}, "p", 0, {4, 6}, s, bf16}},
      {"narrow of a list",
       Reason::kInvalidRequest,
       {"w", {{"unbind", {0}}, {"narrow", {0, 0, 1}}}, "p", 0, {4, 6}, s, bf16}},
      {"t of three dimensions",
       Reason::kInvalidRequest,
       {"experts", {{"t", {}}}, "p", 0, {3, 4, 5}, {20, 5, 1}, bf16}},
      {"stride short", Reason::kInvalidRequest, {"w", {}, "p", 0, {4, 6}, {6}, bf16}},
      {"other shape", Reason::kShapeMismatch, {"w", {}, "p", 0, {4, 5}, s, bf16}},
      {"offset negative", Reason::kShapeOverflow, {"w", {}, "p", -1, {4, 6}, s, bf16}},
      {"offset overflows",
       Reason::kShapeOverflow,
       {"w", {}, "p", huge + (huge - 1), {4, 6}, s, bf16}},
      {"bytes overflow", Reason::kShapeOverflow, {"w", {}, "p", huge, {4, 6}, s, bf16}},
      {"stride zero", Reason::kShapeOverflow, {"w", {}, "p", 0, {4, 6}, {0, 1}, bf16}},
      {"overlaps itself", Reason::kOverlappingShards, {"w", {}, "p", 0, {4, 6}, {5, 1}, bf16}},
      {"no name", Reason::kInvalidRequest, {"w", {}, "", 0, {4, 6}, s, bf16}},
  };
  for (const BadRow& row : table) {
    SCOPED_TRACE(row.what);
    const auto layout = LayoutFromTrace(SmallSpace(), {row.row});
    ASSERT_FALSE(layout.has_value());
    EXPECT_EQ(layout.error().reason(), row.reason) << layout.error().ToString();
    EXPECT_EQ(layout.error().code(), Code::kInvalidArgument);
  }
}

TEST(LayoutFromTrace, RefusesTwoDtypesAndOverlapInOneParameter) {
  const TraceRow first{"w", {{"narrow", {0, 0, 2}}}, "p", 0, {2, 6}, {6, 1}, DType::kBF16};
  TraceRow second = first;
  second.dtype = DType::kF32;
  second.offset = 12;
  EXPECT_EQ(LayoutFromTrace(SmallSpace(), {first, second}).error().reason(),
            Reason::kDtypeMismatch);
  second.dtype = DType::kBF16;
  second.offset = 11;
  EXPECT_EQ(LayoutFromTrace(SmallSpace(), {first, second}).error().reason(),
            Reason::kOverlappingShards);
}

/// A rank that holds `boxes` of tensor 0, each in a parameter of its own.
RankLayout Holding(const std::vector<Box>& boxes) {
  RankLayout rank;
  for (const Box& box : boxes) {
    rank.tensors.push_back({"p" + std::to_string(rank.tensors.size()),
                            DType::kBF16,
                            box.extent,
                            {{0, box, 0, {box.extent[1], 1}}}});
  }
  return rank;
}

TEST(CompareTrace, LooksAtElementsAndNotAtHowTheyAreCut) {
  const CanonicalSpace space = {{{"w", DType::kBF16, {4, 6}}}};
  const RankLayout whole = Holding({{{0, 0}, {4, 6}}});
  const RankLayout halves = Holding({{{0, 0}, {4, 3}}, {{0, 3}, {4, 3}}});
  const RankLayout twice = Holding({{{0, 0}, {4, 6}}, {{0, 0}, {4, 6}}});
  const RankLayout rows = Holding({{{0, 0}, {2, 6}}});
  const RankLayout other_rows = Holding({{{1, 0}, {2, 6}}});
  EXPECT_TRUE(CompareTrace(space, whole, halves).empty());
  EXPECT_TRUE(CompareTrace(space, twice, twice).empty());
  EXPECT_EQ(CompareTrace(space, whole, twice).size(), 1u);
  EXPECT_EQ(CompareTrace(space, whole, {}).size(), 1u);
  EXPECT_EQ(
      CompareTrace(space, rows, other_rows),
      (std::vector<std::string>{"w: the loader takes 12 elements, the scheme 12; 6 are the same"}));
  std::vector<Box> fine(5'000, Box{{0, 0}, {1, 1}});
  EXPECT_EQ(CompareTrace(space, Holding(fine), whole),
            (std::vector<std::string>{"w: cut too finely to be compared"}));
}

TEST(CompareTrace, CountsWhatItDoesNotList) {
  CanonicalSpace space;
  for (int i = 0; i < 25; ++i) {
    space.tensors.push_back({"w" + std::to_string(i), DType::kBF16, {4, 6}});
  }
  RankLayout all;
  for (uint32_t i = 0; i < 25; ++i) {
    all.tensors.push_back(
        {"p" + std::to_string(i), DType::kBF16, {4, 6}, {{i, {{0, 0}, {4, 6}}, 0, {6, 1}}}});
  }
  const auto lines = CompareTrace(space, all, {});
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines.back(), "… and 5 more tensors");
}

TEST(ParseTrace, RefusesWhatIsMalformed) {
  const std::string row =
      R"({"src":"w","ops":[],"param":"p","offset":0,"shape":[4],"stride":[1],"dtype":"bfloat16"})";
  const auto trace = [](const std::string& copies, const std::string& rank = "0") {
    return R"({"ranks":[{"rank":)" + rank + R"(,"copies":[)" + copies + "]}]}";
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = row;
    return trace(text.replace(text.find(from), from.size(), to));
  };
  ASSERT_TRUE(ParseTrace(trace(row)).has_value());
  EXPECT_EQ(ParseTrace(trace(row))->config_json, "{}");
  const std::vector<std::string> table = {
      "",
      "[]",
      "{}",
      R"({"ranks":{}})",
      R"({"ranks":[3]})",
      R"({"ranks":[{"rank":0}]})",
      trace(""),
      trace("3"),
      trace(row, "1"),
      trace(row, "-1"),
      trace(row, "\"0\""),
      R"({"ranks":[{"rank":0,"copies":[)" + row + R"(]},{"rank":0,"copies":[)" + row + "]}]}",
      replaced(R"("src":"w",)", ""),
      replaced(R"("src":"w")", R"("src":3)"),
      replaced(R"("param":"p",)", ""),
      replaced(R"("offset":0,)", ""),
      replaced(R"("offset":0)", R"("offset":0.5)"),
      replaced(R"("shape":[4])", R"("shape":4)"),
      replaced(R"("shape":[4])", R"("shape":["4"])"),
      replaced(R"("stride":[1],)", ""),
      replaced("bfloat16", "BF16"),
      replaced(R"("ops":[])", R"("ops":["narrow"])"),
      replaced(R"("ops":[])", R"("ops":[[]])"),
      replaced(R"("ops":[])", R"("ops":[[0,"narrow"]])"),
      replaced(R"("ops":[])", R"("ops":[["narrow",null]])"),
      replaced(R"("ops":[])", R"("ops":[["narrow",18446744073709551615]])"),
  };
  for (const std::string& text : table) {
    const auto parsed = ParseTrace(text);
    ASSERT_FALSE(parsed.has_value()) << text;
    EXPECT_EQ(parsed.error().code(), Code::kInvalidArgument) << text;
    EXPECT_EQ(parsed.error().reason(), Reason::kInvalidRequest) << text;
  }
}

}  // namespace
}  // namespace weightwire::layout
