// The fsdp scheme against what torch itself holds (tests/golden/fsdp.py), flat ranges exhaustively,
// and ZeRO-3's partitions, which no recording covers, by its rule.
#include <gtest/gtest.h>

#include <map>

#include "server/layout/scheme.h"
#include "server/layout/schemes/flat.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

using Json = nlohmann::ordered_json;
using Held = std::vector<int64_t>;

constexpr int64_t kPadding = -1;

/// Every element of [begin, end) once and in order, in few boxes.
void CheckFlatRuns(const Shape& shape, int64_t begin, int64_t end) {
  const auto runs = FlatRuns(shape, begin, end);
  const size_t most = shape.empty() ? 1 : 2 * (shape.size() - 1) + 1;
  ASSERT_LE(runs.size(), most);
  int64_t next = begin;
  for (const FlatRun& run : runs) {
    ASSERT_EQ(run.begin, next);
    for (size_t d = 0; d < shape.size(); ++d) {
      ASSERT_GE(run.box.begin[d], 0);
      ASSERT_GE(run.box.extent[d], 1);
      ASSERT_LE(run.box.begin[d] + run.box.extent[d], shape[d]);
    }
    const Piece piece{0, run.box, 0, Shape(shape.size(), 1)};
    testing::ForEachElement(piece, shape, [&](int64_t at, int64_t) { ASSERT_EQ(at, next++); });
  }
  ASSERT_EQ(next, end);
}

TEST(FlatRuns, AreTheRangeForEveryRangeOfEverySmallShape) {
  int64_t ranges = 0;
  CheckFlatRuns({}, 0, 1);
  CheckFlatRuns({0, 3}, 0, 0);
  for (int64_t ndim = 1; ndim <= 4; ++ndim) {
    const int64_t most = ndim < 4 ? 4 : 3;
    Shape shape(ndim, 1);
    for (bool more = true; more;) {
      const int64_t count = testing::CountElements(shape);
      for (int64_t begin = 0; begin <= count; ++begin) {
        for (int64_t end = begin; end <= count; ++end, ++ranges) {
          CheckFlatRuns(shape, begin, end);
          if (HasFatalFailure()) return;
        }
      }
      int64_t d = ndim - 1;
      while (d >= 0 && ++shape[d] > most) shape[d--] = 1;
      more = d >= 0;
    }
  }
  EXPECT_GT(ranges, 36'000);
}

TEST(FlatRuns, ReachTheirBound) { EXPECT_EQ(FlatRuns({3, 3, 3}, 1, 26).size(), 5u); }

TEST(AppendFlatPieces, PutTheRangeInOneRow) {
  std::vector<Piece> pieces;
  AppendFlatPieces(7, {3, 4, 5}, 13, 48, 100, pieces);
  int64_t next = 0;
  for (const Piece& piece : pieces) {
    EXPECT_EQ(piece.tensor, 7u);
    testing::ForEachElement(piece, {3, 4, 5}, [&](int64_t at, int64_t local) {
      ASSERT_EQ(at, 13 + next);
      ASSERT_EQ(local, 100 + next++);
    });
  }
  EXPECT_EQ(next, 35);
}

ModelLayout Derived(const std::string& config, const std::string& spec) {
  auto layout = LayoutFromScheme(config, *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << spec << ": " << layout.error().ToString();
  return layout.has_value() ? std::move(*layout) : ModelLayout{};
}

Status Refused(const std::string& config, const std::string& spec) {
  const auto layout = LayoutFromScheme(config, *ParseParallelSpec(spec));
  EXPECT_FALSE(layout.has_value()) << spec;
  return layout.has_value() ? OkStatus() : layout.error();
}

/// What each element of a local tensor is: `number(canonical name, element)`, kPadding where
/// nothing.
template <typename Number>
Held Elements(const CanonicalSpace& canonical, const LocalTensor& tensor, Number number) {
  Held held(testing::CountElements(tensor.shape), kPadding);
  for (const Piece& piece : tensor.pieces) {
    const TensorSpec& spec = canonical.tensors[piece.tensor];
    testing::ForEachElement(piece, spec.shape, [&](int64_t from, int64_t to) {
      held.at(to) = number(spec.name, from);
    });
  }
  return held;
}

Held Unrolled(const Json& runs) {
  Held held;
  for (const Json& run : runs) {
    for (int64_t i = 0; i < run.at(1).get<int64_t>(); ++i) {
      held.push_back(run.at(0).get<int64_t>() + i);
    }
  }
  return held;
}

Json Recorded(const std::string& name) {
  return Json::parse(testing::ReadText(testing::SourceDir() + "/tests/data/fsdp/" + name));
}

/// The recorded models are fp32, which decides the alignment in flat parameters.
std::string ConfigOf(const Json& recorded) {
  Json config = recorded.at("config");
  config["torch_dtype"] = "float32";
  return config.dump();
}

void CompareRank(const Json& recorded, const Json& held, const CanonicalSpace& canonical,
                 const RankLayout& rank) {
  std::vector<ObservedTensor> observed;
  for (const auto& [name, entry] : held.items()) {
    observed.push_back({name, DType::kF32, entry.at(0).get<Shape>()});
  }
  const auto reconciled = Reconcile(rank, observed);
  ASSERT_TRUE(reconciled.has_value()) << reconciled.error().ToString();
  for (const LocalTensor& tensor : reconciled->tensors) {
    const bool buffer = tensor.name.ends_with("e_score_correction_bias");
    const auto number = [&](const std::string& name, int64_t element) -> int64_t {
      if (buffer || !recorded.contains("numbers")) return element;
      return recorded.at("numbers").at(name).at(0).get<int64_t>() + element;
    };
    Held want = Unrolled(held.at(tensor.name).at(1));
    if (buffer) want = Unrolled(Json::parse("[[0," + std::to_string(tensor.shape[0]) + "]]"));
    Held got = Elements(canonical, tensor, number);
    // torch fills the end of a flat parameter with zeros.
    while (!got.empty() && got.back() == kPadding && want.back() == 0) {
      got.pop_back();
      want.pop_back();
    }
    ASSERT_EQ(got, want) << tensor.name;
  }
}

TEST(FsdpScheme, HoldsOnEveryRankWhatTorchHolds) {
  int64_t ranks = 0, empty = 0;
  const Json file = Recorded("shards.json");
  for (const Json& recorded : file.at("cases")) {
    const std::string spec = recorded.at("spec");
    SCOPED_TRACE(recorded.at("config").at("model_type").get<std::string>() + " " + spec);
    const ModelLayout layout = Derived(ConfigOf(recorded), spec);
    ASSERT_EQ(Validate(layout), OkStatus());
    ASSERT_EQ(layout.ranks.size(), recorded.at("ranks").size());
    for (size_t rank = 0; rank < layout.ranks.size(); ++rank, ++ranks) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      CompareRank(recorded, recorded.at("ranks").at(rank), layout.canonical, layout.ranks[rank]);
      if (HasFatalFailure()) return;
      for (const LocalTensor& tensor : layout.ranks[rank].tensors) {
        empty += testing::CountElements(tensor.shape) == 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GE(file.at("cases").size(), 26u);
  EXPECT_GT(ranks, 100);
  EXPECT_GT(empty, 0);
}

int64_t LayerOf(const std::string& name) {
  constexpr std::string_view kLayers = "model.layers.";
  return name.starts_with(kLayers) ? std::stoll(name.substr(kLayers.size())) : -1;
}

TEST(FsdpScheme, ConcatenatesInTheOrderOfTransformersModules) {
  const Json file = Recorded("orders.json");
  for (const Json& recorded : file.at("cases")) {
    SCOPED_TRACE(recorded.at("config").at("model_type").get<std::string>());
    const ModelLayout layout = Derived(ConfigOf(recorded), "fsdp:kind=fsdp1");
    std::map<int64_t, std::vector<std::string>> want, got;
    for (const std::string name : recorded.at("order")) want[LayerOf(name)].push_back(name);
    for (const LocalTensor& tensor : layout.ranks.at(0).tensors) {
      if (!tensor.name.ends_with("_flat_param")) continue;
      int64_t end = 0;
      for (const Piece& piece : tensor.pieces) {
        EXPECT_EQ(piece.local_offset, end);
        end += ElementCount(piece.box);
        got[LayerOf(tensor.name)].push_back(layout.canonical.tensors[piece.tensor].name);
      }
    }
    EXPECT_EQ(got, want);
  }
  EXPECT_GE(file.at("cases").size(), 14u);
}

constexpr const char* kConfig =
    R"({"model_type":"qwen2","hidden_size":3,"num_hidden_layers":1,"num_attention_heads":1,
        "intermediate_size":5,"vocab_size":7})";

const LocalTensor& Named(const RankLayout& rank, const std::string& name) {
  for (const LocalTensor& tensor : rank.tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::out_of_range(name);
}

// 7 x 3 elements in 4 partitions of 6: the last one has 3 and 3 of padding. Replicas follow.
TEST(FsdpScheme, CutsFlattenedPaddedParametersForZero3) {
  const ModelLayout layout = Derived(kConfig, "fsdp:dp4,hsdp2,kind=zero3");
  ASSERT_EQ(Validate(layout), OkStatus());
  ASSERT_EQ(layout.ranks.size(), 8u);
  for (int64_t rank = 0; rank < 8; ++rank) {
    const LocalTensor& tensor = Named(layout.ranks[rank], "lm_head.weight");
    EXPECT_EQ(tensor.shape, Shape{6});
    Held want;
    for (int64_t i = 0; i < 6; ++i) {
      const int64_t element = rank % 4 * 6 + i;
      want.push_back(element < 21 ? element : kPadding);
    }
    EXPECT_EQ(Elements(layout.canonical, tensor, [](auto&, int64_t element) { return element; }),
              want);
  }
}

TEST(FsdpScheme, ReconcilesShardsWithoutRowsAsTorchReportsThem) {
  const ModelLayout layout = Derived(kConfig, "fsdp:dp9");
  const RankLayout& last = layout.ranks.at(8);
  EXPECT_EQ(Named(last, "lm_head.weight").shape, (Shape{0, 3}));
  EXPECT_EQ(Named(last, "model.norm.weight").shape, Shape{0});
  std::vector<ObservedTensor> observed;
  for (const LocalTensor& tensor : last.tensors) {
    EXPECT_TRUE(tensor.pieces.empty()) << tensor.name;
    observed.push_back({tensor.name, DType::kBF16, tensor.shape});
  }
  EXPECT_TRUE(Reconcile(last, observed).has_value());
  observed[0].shape = {1, 3};
  EXPECT_EQ(Reconcile(last, observed).error().reason(), Reason::kShapeMismatch);
}

TEST(FsdpScheme, AlignsOriginalParametersToSixteenBytesOrAsTold) {
  // In the order of modules: the embedding (21 elements), the norm (3), lm_head (21).
  const auto norm_elements = [](const char* spec) {
    const ModelLayout layout = Derived(kConfig, spec);
    return std::pair(Named(layout.ranks[0], "model.norm.weight").shape,
                     Named(layout.ranks[1], "model.norm.weight").shape);
  };
  EXPECT_EQ(norm_elements("fsdp:dp2,kind=fsdp1-orig"), std::pair(Shape{3}, Shape{0}));
  EXPECT_EQ(norm_elements("fsdp:dp2,kind=fsdp1-orig,align=1"), std::pair(Shape{2}, Shape{1}));
}

TEST(FsdpScheme, RefusesWhatItDoesNotKnow) {
  for (const char* spec :
       {"fsdp:dp2,kind=fsdp3", "fsdp:dp2,tp2,kind=zero3", "fsdp:dp2,dim=1,kind=fsdp1",
        "fsdp:dp2,align=8", "fsdp:dp2,dim=x", "fsdp:dp2,align=0,kind=fsdp1-orig", "fsdp:pp2"}) {
    const Status status = Refused(kConfig, spec);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << spec;
    EXPECT_EQ(status.reason(), Reason::kUnknownScheme) << spec << ": " << status.ToString();
  }
  EXPECT_EQ(Refused(kConfig, "fsdp:dp999,hsdp999").reason(), Reason::kLimitExceeded);
}

TEST(FsdpScheme, RefusesFlatParametersOfUnknownOrder) {
  const std::string latent =
      R"("hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,"intermediate_size":4,
         "vocab_size":8,"kv_lora_rank":4,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4,
         "num_nextn_predict_layers":1)";
  const Status family =
      Refused(R"({"model_type":"kimi_k2",)" + latent + "}", "fsdp:dp2,kind=fsdp1");
  EXPECT_EQ(family.reason(), Reason::kUnknownModel);
  EXPECT_NE(family.message().find("kimi_k2"), std::string::npos);
  const std::string deepseek = R"({"model_type":"deepseek_v3",)" + latent + "}";
  const Status mtp = Refused(deepseek, "fsdp:dp2,kind=fsdp1");
  EXPECT_EQ(mtp.reason(), Reason::kUnknownModel);
  EXPECT_NE(mtp.tensor().find("model.layers.1."), std::string::npos) << mtp.ToString();
  EXPECT_FALSE(Derived(deepseek, "fsdp:dp2,kind=fsdp1,mtp=none").ranks.empty());
}

}  // namespace
}  // namespace weightwire::layout
