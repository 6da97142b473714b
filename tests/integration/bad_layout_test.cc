#include <algorithm>
#include <cstring>
#include <functional>

#include "tests/integration/bad_input.h"

namespace weightwire::integration {
namespace {

constexpr char kTensor[] = "model.norm.weight";

class BadLayout : public BadInput {
 protected:
  /// What the whole model on one rank would be.
  static client::Layout Good() {
    return SchemeLayout(TinyQwen2(), HuggingFaceWhole(), oracle::HuggingFace(TinyQwen2(), 0));
  }
  Status BindAsTrainer(client::Layout layout) {
    auto publisher = OpenPublisher();
    return publisher ? publisher->Bind(std::move(layout)) : OkStatus();
  }
  static layout::ObservedTensor& Find(client::Layout& layout, const std::string& name) {
    for (layout::ObservedTensor& tensor : layout.observed) {
      if (tensor.name == name) return tensor;
    }
    throw std::logic_error("no tensor " + name);
  }
  static void Replace(std::string& text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
  }
};

/// One of the refusals that layouts promise (docs/layouts.md): what is sent, and what must come
/// back.
struct PromisedRefusal {
  const char* name;
  std::function<void(client::Layout&)> spoil;
  Refusal refusal;
  std::string expected, found, hint;
};

std::vector<PromisedRefusal> PromisedRefusals() {
  using client::Layout;
  const auto replace = [](std::string& text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
  };
  const auto find = [](Layout& layout, const std::string& name) -> layout::ObservedTensor& {
    return *std::find_if(layout.observed.begin(), layout.observed.end(),
                         [&](const auto& tensor) { return tensor.name == name; });
  };
  const auto refused = [](Code code, Reason reason, const std::string& tensor) {
    return Refusal{code, reason, "trainer/0", tensor};
  };
  const Code bad = Code::kInvalidArgument, differs = Code::kFailedPrecondition;
  const std::string head = "lm_head.weight", q = "model.layers.0.self_attn.q_proj.weight";
  return {
      {"missing tensor",
       [](Layout& layout) {
         std::erase_if(layout.observed, [](const auto& tensor) { return tensor.name == kTensor; });
       },
       refused(differs, Reason::kTensorMissing, kTensor), "expected BF16 [11]", "found none",
       "report it"},
      {"extra tensor",
       [](Layout& layout) {
         layout.observed.push_back({"model.extra.weight", layout::DType::kBF16, {3}});
       },
       refused(differs, Reason::kTensorUnexpected, "model.extra.weight"), "expected none",
       "found BF16 [3]", "do not report it"},
      {"shape", [=](Layout& layout) { find(layout, kTensor).shape = {12}; },
       refused(differs, Reason::kShapeMismatch, kTensor), "expected BF16 [11]", "found BF16 [12]",
       "config.json"},
      {"dtype", [=](Layout& layout) { find(layout, kTensor).dtype = layout::DType::kI8; },
       refused(differs, Reason::kDtypeMismatch, kTensor), "expected BF16", "found I8", "BF16"},
      {"indivisible heads", [](Layout& layout) { layout.spec = "megatron:tp5"; },
       refused(bad, Reason::kShapeMismatch, q), "num_attention_heads: expected a multiple of tp 5",
       "found ", "tp must divide"},
      {"wrong expert count",
       [=](Layout& layout) {
         replace(layout.config_json, "{", R"({"num_experts": 4, "moe_intermediate_size": 6, )");
         replace(layout.config_json, "\"qwen2\"", "\"qwen3_moe\"");
         layout.spec = "megatron:ep3,dp3";
       },
       refused(bad, Reason::kShapeMismatch, "model.layers.0.mlp.experts.0.gate_proj.weight"),
       "the number of experts: expected a multiple of ep 3", "found 4", "ep must divide 4"},
      {"unknown family",
       [=](Layout& layout) { replace(layout.config_json, "\"qwen2\"", "\"qwen9\""); },
       refused(bad, Reason::kUnknownModel, ""), "model_type: expected one that a family describes",
       "found \"qwen9\"", "qwen3"},
      {"ambiguous tie: both",
       [=](Layout& layout) {
         replace(layout.config_json, "\"tie_word_embeddings\": false",
                 "\"tie_word_embeddings\": true");
       },
       refused(differs, Reason::kTensorUnexpected, head), "expected none", "found BF16 [37, 11]",
       "tie_word_embeddings"},
      {"ambiguous tie: neither",
       [=](Layout& layout) {
         std::erase_if(layout.observed, [&](const auto& tensor) { return tensor.name == head; });
       },
       refused(differs, Reason::kTensorMissing, head), "expected BF16 [37, 11]", "found none",
       "tie_word_embeddings"},
  };
}

TEST_F(BadLayout, EveryPromisedRefusalReachesTheClientWhole) {
  for (const PromisedRefusal& promised : PromisedRefusals()) {
    SCOPED_TRACE(promised.name);
    client::Layout layout = Good();
    promised.spoil(layout);
    const Status status = BindAsTrainer(layout);
    ExpectRefused(status, promised.refusal);
    for (const std::string& part : {promised.expected, promised.found}) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << ": " << status.ToString();
    }
    EXPECT_NE(status.remedy().find(promised.hint), std::string::npos) << status.ToString();
  }
}

/// Nothing that the engine wants is missing, but it would compute with the embedding instead.
TEST_F(BadLayout, HeadThatTheEngineTiesAwayIsNamedInTheRelease) {
  client::Layout tied = Good();
  Replace(tied.config_json, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
  std::erase_if(tied.observed, [](const auto& tensor) { return tensor.name == "lm_head.weight"; });
  auto engine = client::Subscriber::Open(Place("engine-tied"));
  ASSERT_TRUE(engine.has_value());
  const Status bound = (*engine)->Bind(tied);
  ASSERT_TRUE(bound.ok()) << bound.ToString();
  auto publisher = OpenPublisher();
  ASSERT_TRUE(publisher->Bind(Good()).ok());
  ASSERT_TRUE(publisher->Publish(Version(5)).ok());
  const auto released = publisher->WaitReleased(Version(5), kPatience);
  ASSERT_FALSE(released.has_value());
  ExpectRefused(released.error(), {Code::kFailedPrecondition, Reason::kTensorUnexpected,
                                   "engine-tied", "lm_head.weight"});
}

TEST_F(BadLayout, UnknownSchemeKeyNamesTheKnownOnes) {
  client::Layout layout = Good();
  layout.spec = "vllm:tp1,cargo=7";
  const Status status = BindAsTrainer(layout);
  ExpectRefused(status, {Code::kInvalidArgument, Reason::kUnknownScheme, "trainer/0", ""});
  EXPECT_NE(status.message().find("cargo"), std::string::npos) << status.ToString();
}

TEST_F(BadLayout, UnknownSchemeIsRefused) {
  client::Layout layout = Good();
  layout.spec = "jax:tp1";
  ExpectRefused(BindAsTrainer(layout),
                {Code::kInvalidArgument, Reason::kUnknownScheme, "trainer/0", ""});
}

TEST_F(BadLayout, ConfigThatIsNoJsonIsRefused) {
  client::Layout layout = Good();
  layout.config_json = "{\"model_type\": ";
  ExpectRefused(BindAsTrainer(layout),
                {Code::kInvalidArgument, Reason::kInvalidRequest, "trainer/0", ""}, false);
}

TEST_F(BadLayout, ConfigWhoseShapesOverflowIsRefused) {
  client::Layout layout = Good();
  Replace(layout.config_json, "\"vocab_size\": 37", "\"vocab_size\": 4611686018427387904");
  const Status status = BindAsTrainer(layout);
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kShapeOverflow)) << status.ToString();
  EXPECT_EQ(CodeName(status.code()), CodeName(Code::kInvalidArgument));
  EXPECT_EQ(status.rank(), "trainer/0");
}

TEST_F(BadLayout, SpecOfAnotherWorldSizeIsRefused) {
  client::Layout layout = Good();
  layout.spec = "vllm:tp2";
  const Status status = BindAsTrainer(layout);
  ExpectRefused(status, {Code::kInvalidArgument, Reason::kInvalidRequest, "trainer/0", ""});
  EXPECT_NE(status.message().find("world_size 1"), std::string::npos) << status.message();
}

TEST_F(BadLayout, ConfigOverItsLimitIsRefused) {
  client::Layout layout = Good();
  layout.config_json.append(2 << 20, ' ');
  const Status status = BindAsTrainer(layout);
  EXPECT_EQ(CodeName(status.code()), CodeName(Code::kInvalidArgument)) << status.ToString();
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kMessageTooLarge));
  EXPECT_NE(status.message().find("1048576"), std::string::npos) << status.message();
}

TEST_F(BadLayout, RefusedLayoutChangesNothing) {
  auto publisher = OpenPublisher();
  ASSERT_NE(publisher, nullptr);
  client::Layout layout = Good();
  Find(layout, kTensor).shape = {12};
  EXPECT_FALSE(publisher->Bind(layout).ok());
  const Status bound = publisher->Bind(Good());
  EXPECT_TRUE(bound.ok()) << bound.ToString();
}

// ---- explicit boxes: one BF16 matrix of 6 × 4, "w"

/// Rows begin … begin + rows of "w", at element `offset` of the local tensor.
layout::Piece RowsAt(int64_t begin, int64_t rows, int64_t offset) {
  return {0, {{begin, 0}, {rows, 4}}, offset, {4, 1}};
}

client::Layout Boxes(int64_t local_rows, std::vector<layout::Piece> pieces) {
  client::Layout layout;
  layout.canonical = layout::CanonicalSpace{{{"w", layout::DType::kBF16, {6, 4}}}};
  layout.layout =
      layout::RankLayout{{{"local.w", layout::DType::kBF16, {local_rows, 4}, std::move(pieces)}}};
  return layout;
}

class BadBoxes : public BadInput {
 protected:
  /// Publishes from ranks that hold `ranks` to an engine that wants all of "w"; the release.
  Status Release(const std::vector<client::Layout>& ranks) {
    auto engine = client::Subscriber::Open(Place("engine-boxes"));
    EXPECT_TRUE(engine.has_value()) << engine.error().ToString();
    EXPECT_TRUE((*engine)->Bind(Boxes(6, {RowsAt(0, 6, 0)})).ok());
    std::vector<std::unique_ptr<client::Publisher>> publishers;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      publishers.push_back(OpenPublisher(rank, ranks.size()));
      const Status bound = publishers.back()->Bind(ranks[rank]);
      EXPECT_TRUE(bound.ok()) << bound.ToString();
    }
    for (const auto& publisher : publishers) {
      const Status accepted = publisher->Publish(Version(5));
      EXPECT_TRUE(accepted.ok()) << accepted.ToString();
    }
    Status first;
    for (const auto& publisher : publishers) {
      auto released = publisher->WaitReleased(Version(5), kPatience);
      EXPECT_FALSE(released.has_value());
      if (!released) first = released.error();
    }
    EXPECT_FALSE((*engine)->Serving().has_value());
    return first;
  }
};

TEST_F(BadBoxes, ElementThatNobodyOwnsIsNamedInTheRelease) {
  const Status why = Release({Boxes(5, {RowsAt(0, 3, 0), RowsAt(4, 2, 12)})});
  EXPECT_EQ(ReasonName(why.reason()), ReasonName(Reason::kUnownedElement)) << why.ToString();
  EXPECT_EQ(CodeName(why.code()), CodeName(Code::kFailedPrecondition));
  EXPECT_EQ(why.tensor(), "w");
  EXPECT_NE(why.rank().find("engine-boxes"), std::string::npos) << why.ToString();
  EXPECT_FALSE(why.remedy().empty());
  EXPECT_NE(why.epoch(), Epoch());
}

/// Sources may overlap (plan.h): each element is read once, from one rank that holds it.
TEST_F(BadBoxes, SourcesThatOverlapInPartFeedEveryElement) {
  const std::vector<client::Layout> ranks = {Boxes(6, {RowsAt(0, 3, 0), RowsAt(1, 3, 12)}),
                                             Boxes(4, {RowsAt(2, 4, 0)})};
  const std::vector<std::vector<int64_t>> rows = {{0, 1, 2, 1, 2, 3}, {2, 3, 4, 5}};
  auto engine = client::Subscriber::Open(Place("engine-boxes"));
  ASSERT_TRUE((*engine)->Bind(Boxes(6, {RowsAt(0, 6, 0)})).ok());
  std::vector<std::unique_ptr<client::Publisher>> publishers;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    publishers.push_back(OpenPublisher(rank, ranks.size()));
    ASSERT_TRUE(publishers.back()->Bind(ranks[rank]).ok());
    const std::span<std::byte> memory = publishers.back()->arena().tensor(0);
    for (size_t row = 0; row < rows[rank].size(); ++row) {
      std::memset(memory.data() + 8 * row, static_cast<int>(0x50 + rows[rank][row]), 8);
    }
  }
  for (const auto& publisher : publishers) ASSERT_TRUE(publisher->Publish(Version(5)).ok());
  const auto offer = (*engine)->WaitOffer(kPatience);
  ASSERT_TRUE(offer.has_value());
  const auto tensors = (*engine)->Flip(*offer);
  ASSERT_TRUE(tensors.has_value());
  for (size_t byte = 0; byte < 48; ++byte) {
    ASSERT_EQ((*tensors)[0][byte], static_cast<std::byte>(0x50 + byte / 8)) << "byte " << byte;
  }
  EXPECT_TRUE((*engine)->Acknowledge(*offer, Nanos(1)).ok());
}

TEST_F(BadBoxes, PiecesThatShareStorageAreRefused) {
  auto publisher = OpenPublisher();
  ExpectRefused(publisher->Bind(Boxes(5, {RowsAt(0, 3, 0), RowsAt(3, 3, 8)})),
                {Code::kInvalidArgument, Reason::kOverlappingShards, "trainer/0", "local.w"},
                false);
}

TEST_F(BadBoxes, PieceThatLeavesItsStorageIsRefused) {
  auto publisher = OpenPublisher();
  ExpectRefused(publisher->Bind(Boxes(5, {RowsAt(0, 6, 0)})),
                {Code::kInvalidArgument, Reason::kShapeMismatch, "trainer/0", "local.w"}, false);
}

TEST_F(BadBoxes, ShapeThatOverflowsIsRefused) {
  client::Layout layout = Boxes(6, {RowsAt(0, 6, 0)});
  layout.layout->tensors[0].shape = {int64_t{1} << 62, 4};
  auto publisher = OpenPublisher();
  ExpectRefused(publisher->Bind(layout),
                {Code::kInvalidArgument, Reason::kShapeOverflow, "trainer/0", "local.w"}, false);
}

TEST_F(BadBoxes, CanonicalShapeThatOverflowsIsRefused) {
  client::Layout layout = Boxes(6, {RowsAt(0, 6, 0)});
  layout.canonical->tensors[0].shape = {int64_t{1} << 62, int64_t{1} << 62};
  auto publisher = OpenPublisher();
  ExpectRefused(publisher->Bind(layout),
                {Code::kInvalidArgument, Reason::kShapeOverflow, "trainer/0", "w"}, false);
}

TEST_F(BadBoxes, RanksWithDifferentModelsAreRefused) {
  auto first = OpenPublisher(0, 2);
  auto second = OpenPublisher(1, 2);
  ASSERT_TRUE(first->Bind(Boxes(3, {RowsAt(0, 3, 0)})).ok());
  client::Layout other = Boxes(3, {RowsAt(3, 3, 0)});
  other.canonical->tensors[0].shape = {7, 4};
  ExpectRefused(second->Bind(other),
                {Code::kFailedPrecondition, Reason::kShapeMismatch, "trainer/1", "w"});
}

TEST_F(BadBoxes, EngineOfAnotherModelIsNamedInTheRelease) {
  auto engine = client::Subscriber::Open(Place("engine-other"));
  client::Layout other = Boxes(6, {RowsAt(0, 6, 0)});
  other.canonical->tensors[0].name = "v";
  ASSERT_TRUE((*engine)->Bind(other).ok());
  auto publisher = OpenPublisher();
  ASSERT_TRUE(publisher->Bind(Boxes(6, {RowsAt(0, 6, 0)})).ok());
  ASSERT_TRUE(publisher->Publish(Version(5)).ok());
  const auto released = publisher->WaitReleased(Version(5), kPatience);
  ASSERT_FALSE(released.has_value());
  EXPECT_NE(released.error().rank().find("engine-other"), std::string::npos)
      << released.error().ToString();
}

}  // namespace
}  // namespace weightwire::integration
