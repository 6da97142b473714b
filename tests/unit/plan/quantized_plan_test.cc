// Weights that become fp8 codes and scales on the way, on layouts written by hand.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "server/plan/explain.h"
#include "server/plan/plan.h"
#include "server/plan/plan_bytes.h"
#include "server/plan/relayed.h"
#include "server/plan/segments.h"
#include "tests/support/plan_run.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::DType;
using layout::LocalTensor;
using layout::ModelLayout;
using layout::Piece;
using layout::Shape;
using testing::BoxTensor;
using testing::Cut;
using testing::Whole;
using weightwire::testing::Memory;

int64_t Blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

/// "w" of `shape` at the trainer, as it is cut there.
ModelLayout Trainer(const Shape& shape, const std::vector<Box>& boxes, DType dtype = DType::kBF16) {
  return testing::OneTensor(shape, boxes, dtype);
}

/// The scales of a box, counted here anew.
Box ScaleBox(const Box& box, const Shape& block) {
  Box scales = box;
  for (size_t d = 0; d < 2; ++d) {
    scales.begin[d] = box.begin[d] / block[d];
    scales.extent[d] = Blocks(box.begin[d] + box.extent[d], block[d]) - scales.begin[d];
  }
  return scales;
}

/// The same "w" in fp8 at an engine, one box a rank with its scales.
ModelLayout Engine(const Shape& shape, const Shape& block, const std::vector<Box>& boxes) {
  ModelLayout layout;
  layout.canonical.tensors = {
      {"w", DType::kF8E4M3, shape, block},
      {"w_scale_inv", DType::kF32, {Blocks(shape[0], block[0]), Blocks(shape[1], block[1])}}};
  for (const Box& box : boxes) {
    layout.ranks.push_back({{BoxTensor("codes", 0, box, DType::kF8E4M3),
                             BoxTensor("scales", 1, ScaleBox(box, block), DType::kF32)}});
  }
  return layout;
}

/// What the engine must hold: the whole matrix quantized, then cut.
Memory Wanted(const ModelLayout& engine) {
  const layout::TensorSpec& weight = engine.canonical.tensors[0];
  const auto id = [&](int64_t row, int64_t column) {
    return weightwire::testing::ElementId(0, weight.shape, {row, column});
  };
  const auto scale = [&](int64_t block_row, int64_t block_column) {
    std::vector<uint64_t> elements;
    for (int64_t r = block_row * weight.block[0];
         r < std::min(weight.shape[0], (block_row + 1) * weight.block[0]); ++r) {
      for (int64_t c = block_column * weight.block[1];
           c < std::min(weight.shape[1], (block_column + 1) * weight.block[1]); ++c) {
        elements.push_back(id(r, c));
      }
    }
    return weightwire::testing::ScaleOf(elements);
  };
  Memory memory = weightwire::testing::EmptyMemory(engine);
  for (size_t rank = 0; rank < engine.ranks.size(); ++rank) {
    for (size_t t = 0; t < engine.ranks[rank].tensors.size(); ++t) {
      for (const Piece& piece : engine.ranks[rank].tensors[t].pieces) {
        weightwire::testing::ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
          const int64_t row = piece.box.begin[0] + index[0];
          const int64_t column = piece.box.begin[1] + index[1];
          memory[rank][t].at(
              weightwire::testing::StridedAt(piece.local_offset, piece.local_stride, index)) =
              piece.tensor == 1
                  ? scale(row, column)
                  : weightwire::testing::CodeOf(
                        id(row, column), scale(row / weight.block[0], column / weight.block[1]));
        });
      }
    }
  }
  return memory;
}

void ExpectQuantized(const ModelLayout& trainer, const ModelLayout& engine) {
  const auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  Memory got = weightwire::testing::EmptyMemory(engine);
  EXPECT_EQ(weightwire::testing::RunPlan(*plan, weightwire::testing::FilledMemory(trainer), got),
            0);
  EXPECT_EQ(got, Wanted(engine));
  EXPECT_EQ(VerifyPlan(*plan, trainer, engine), OkStatus());
  EXPECT_EQ(FromBytes(ToBytes(*plan)).value(), *plan);
  const PlanReport report = Report(*plan, trainer, engine);
  EXPECT_GE(report.egress_over_bound, 1 - 1e-9);
  EXPECT_DOUBLE_EQ(report.ingress_over_bound, 1.0);
}

TEST(QuantizedPlan, QuantizesWholeBlocksWhereTheyLie) {
  const Shape shape = {37, 29}, block = {8, 6};
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    ExpectQuantized(Trainer(shape, {Whole(shape)}, dtype), Engine(shape, block, {Whole(shape)}));
  }
  // Rows of the trainer and columns of the engine, both at blocks; the last ones are partial.
  const std::vector<Box> rows = {{{0, 0}, {16, 29}}, {{16, 0}, {16, 29}}, {{32, 0}, {5, 29}}};
  const std::vector<Box> columns = {{{0, 0}, {37, 12}}, {{0, 12}, {37, 17}}};
  ExpectQuantized(Trainer(shape, rows), Engine(shape, block, columns));
  ExpectQuantized(Trainer(shape, columns), Engine(shape, block, rows));
  // A block that is larger than the matrix.
  ExpectQuantized(Trainer(shape, {Whole(shape)}), Engine(shape, {64, 64}, {Whole(shape)}));
}

TEST(QuantizedPlan, ReadsTransposedAndReplicatedShards) {
  const Shape shape = {24, 20}, block = {4, 5};
  ModelLayout trainer = Trainer(shape, Cut(shape, 1, 2));  // as GroupedMLP holds its experts
  for (layout::RankLayout& rank : trainer.ranks) {
    rank.tensors[0].shape = {10, 24};
    rank.tensors[0].pieces[0].local_stride = {1, 24};
  }
  trainer.ranks.push_back(trainer.ranks[0]);
  trainer.ranks.push_back(trainer.ranks[1]);
  ExpectQuantized(trainer, Engine(shape, block, Cut(shape, 0, 3)));
  const auto plan = BuildPlan(trainer, Engine(shape, block, Cut(shape, 0, 3)));
  ASSERT_TRUE(plan.has_value());
  std::vector<int64_t> egress(4, 0);
  for (const Stream& stream : plan->streams) egress[stream.source_rank] += stream.bytes;
  for (int64_t bytes : egress) EXPECT_GT(bytes, 0);
}

/// One copy would be cut at half of its rows, 48: blocks of 32 rows must stay whole.
TEST(QuantizedPlan, SharesAReplicatedTensorAtBlocksOnly) {
  const Shape shape = {96, 40}, block = {32, 40};
  const ModelLayout trainer = Trainer(shape, {Whole(shape), Whole(shape)});
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  ExpectQuantized(trainer, engine);
  const auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  std::vector<int64_t> rows;
  for (const Stream& stream : plan->streams) {
    for (const CopyOp& op : stream.ops) {
      if (op.transform == Transform::kCodes) rows.push_back(op.extent[0]);
    }
  }
  std::ranges::sort(rows);
  EXPECT_EQ(rows, (std::vector<int64_t>{32, 32, 32}));
}

/// Rows of FSDP, columns of tensor parallelism, both, one piece of two, partial blocks at the ends.
TEST(QuantizedPlan, GathersBlocksThatLieInSeveralPieces) {
  const Shape shape = {37, 29}, block = {8, 6};
  const std::vector<Box> rows = {{{0, 0}, {13, 29}}, {{13, 0}, {1, 29}}, {{14, 0}, {23, 29}}};
  const std::vector<Box> columns = {{{0, 0}, {37, 11}}, {{0, 11}, {37, 18}}};
  std::vector<Box> both;
  for (const Box& row : rows) {
    for (const Box& column : columns) both.push_back(*layout::Intersect(row, column));
  }
  const std::vector<Box> engine_rows = {{{0, 0}, {16, 29}}, {{16, 0}, {21, 29}}};
  const std::vector<Box> engine_columns = {{{0, 0}, {37, 6}}, {{0, 6}, {37, 23}}};
  for (const auto& cut : {rows, columns, both}) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const ModelLayout trainer = Trainer(shape, cut, dtype);
      for (const auto& boxes : {std::vector<Box>{Whole(shape)}, engine_rows, engine_columns}) {
        ExpectQuantized(trainer, Engine(shape, block, boxes));
        ExpectQuantized(trainer, Engine(shape, {64, 64}, {Whole(shape)}));
        const auto plan = BuildPlan(trainer, Engine(shape, block, boxes));
        ASSERT_TRUE(plan.has_value());
        EXPECT_FALSE(plan->gathered.empty());
        for (const auto& [rank, gathered] : plan->gathered) EXPECT_EQ(gathered.dtype, dtype);
      }
    }
  }
  ModelLayout pieces = Trainer(shape, {Whole(shape)});
  pieces.ranks[0].tensors = {BoxTensor("above", 0, rows[0]), BoxTensor("middle", 0, rows[1]),
                             BoxTensor("below", 0, rows[2])};
  ExpectQuantized(pieces, Engine(shape, block, engine_columns));
}

/// What is whole on one rank still travels as codes: only the bands that are cut are floats.
TEST(QuantizedPlan, GathersNothingElse) {
  const Shape shape = {40, 12}, block = {8, 6};
  const auto plan = BuildPlan(Trainer(shape, {{{0, 0}, {19, 12}}, {{19, 0}, {21, 12}}}),
                              Engine(shape, block, {Whole(shape)}));
  ASSERT_TRUE(plan.has_value());
  const GatherBuffer& gathered = plan->gathered.at(0);
  EXPECT_EQ(gathered.elements, 8 * 12);  // rows 16 to 24
  EXPECT_EQ(gathered.made.size(), 2u);
  EXPECT_EQ(plan->bytes_total, 8 * 12 * 2 + 32 * 12 + 4 * 2 * 4);
  EXPECT_EQ(SliceOf(*plan, Side::kTarget, 0).gathered, gathered);
  EXPECT_EQ(SliceOf(*plan, Side::kSource, 0).gathered, GatherBuffer{});
}

TEST(QuantizedPlan, GathersFromReplicasAndInTurnedMatrices) {
  const Shape shape = {24, 20}, block = {4, 5};
  ModelLayout trainer = Trainer(shape, {{{0, 0}, {24, 7}}, {{0, 7}, {24, 13}}});
  for (layout::RankLayout& rank : trainer.ranks) {
    const Box& box = rank.tensors[0].pieces[0].box;
    rank.tensors[0].shape = {box.extent[1], 24};
    rank.tensors[0].pieces[0].local_stride = {1, 24};
  }
  trainer.ranks.push_back(trainer.ranks[0]);
  trainer.ranks.push_back(trainer.ranks[1]);
  ExpectQuantized(trainer, Engine(shape, block, Cut(shape, 0, 3)));
}

/// Shards of several dtypes: what is gathered must hold each of them exactly.
TEST(QuantizedPlan, GathersInFloat32WhereDtypesDiffer) {
  const Shape shape = {16, 12}, block = {4, 4};
  ModelLayout trainer = Trainer(shape, {{{0, 0}, {6, 12}}, {{6, 0}, {10, 12}}});
  trainer.ranks[1].tensors[0].dtype = DType::kF16;
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  ExpectQuantized(trainer, engine);
  EXPECT_EQ(BuildPlan(trainer, engine)->gathered.at(0).dtype, DType::kF32);
}

/// Two tensors of an engine's rank that hold the same codes: their blocks are gathered once.
TEST(QuantizedPlan, GathersOnceWhatARankHoldsTwice) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {{{0, 0}, {6, 12}}, {{6, 0}, {10, 12}}});
  ModelLayout engine = Engine(shape, block, {Whole(shape)});
  auto& tensors = engine.ranks[0].tensors;
  tensors.push_back(tensors[0]);
  tensors.back().name = "tied codes";
  tensors.push_back(tensors[1]);
  tensors.back().name = "tied scales";
  const auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->gathered.at(0).elements, 4 * 12);
  EXPECT_EQ(plan->gathered.at(0).made.size(), 4u);
  EXPECT_EQ(VerifyPlan(*plan, trainer, engine), OkStatus());
  Memory got = weightwire::testing::EmptyMemory(engine);
  EXPECT_EQ(weightwire::testing::RunPlan(*plan, weightwire::testing::FilledMemory(trainer), got),
            0);
  EXPECT_EQ(got, Wanted(engine));
}

/// The same "w" in four bits at an engine, a box of packed elements a rank with its scales.
ModelLayout PackedEngine(const layout::TensorSpec& weight, DType scale,
                         const std::vector<Box>& boxes) {
  ModelLayout layout;
  layout.canonical.tensors = {
      weight, {"w_scale", scale, ScaleBox(Whole(weight.shape), weight.block).extent}};
  for (const Box& box : boxes) {
    layout.ranks.push_back({{BoxTensor("codes", 0, box, weight.dtype),
                             BoxTensor("scales", 1, ScaleBox(box, weight.block), scale)}});
  }
  return layout;
}

struct Refusal {
  const char* what;
  ModelLayout trainer;
  ModelLayout engine;
  Reason reason;
  std::string rank;
  std::vector<const char*> words;
};

std::vector<Refusal> Refusals() {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {Whole(shape)});
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  ModelLayout no_scales = engine, no_codes = engine, cut = engine, unknown = engine;
  no_scales.ranks[0].tensors.pop_back();
  no_codes.ranks[0].tensors.erase(no_codes.ranks[0].tensors.begin());
  cut.ranks[0].tensors[0] = BoxTensor("codes", 0, {{2, 0}, {14, 12}}, DType::kF8E4M3);
  unknown.canonical.tensors[0].block.clear();
  ModelLayout own_kind = engine;
  own_kind.canonical.tensors[0].scale_rule = layout::ScaleRule::kOwnKind;
  ModelLayout has_scales = trainer;
  has_scales.canonical.tensors.push_back(engine.canonical.tensors[1]);
  has_scales.ranks[0].tensors.push_back(
      BoxTensor("scales", 1, Whole(engine.canonical.tensors[1].shape), DType::kF32));
  ModelLayout integers = trainer;
  integers.ranks[0].tensors[0].dtype = DType::kI8;
  const Shape wide = {8, 64};
  const ModelLayout wide_trainer = Trainer(wide, {Whole(wide)});
  // Groups of 32 in INT4 are 4 words, in MXFP4 16 bytes.
  const layout::TensorSpec int4{"w_packed", DType::kI32, {8, 8}, {1, 4}, layout::ScaleRule::kInt4,
                                8};
  const layout::TensorSpec mxfp4{
      "w_packed", DType::kU8, {8, 32}, {1, 16}, layout::ScaleRule::kMxFp4Rounded, 2};
  const layout::TensorSpec nvfp4{"w_packed", DType::kU8, {8, 32}, {1, 8}, layout::ScaleRule::kNvFp4,
                                 2};
  ModelLayout nv_engine = PackedEngine(nvfp4, DType::kF8E4M3, {Whole(nvfp4.shape)});
  layout::TensorSpec modelopt = nvfp4;
  modelopt.name = "w";
  modelopt.scale_rule = layout::ScaleRule::kNvFp4Modelopt;
  ModelLayout global_alone = nv_engine;
  global_alone.canonical.tensors.insert(global_alone.canonical.tensors.begin(),
                                        {"w_global_scale", DType::kF32, {1}});
  global_alone.ranks[0].tensors = {BoxTensor("global", 0, Whole({1}), DType::kF32)};
  ModelLayout int4_engine = PackedEngine(int4, DType::kBF16, {Whole(int4.shape)});
  int4_engine.canonical.tensors.push_back({"w_shape", DType::kI64, {2}});
  int4_engine.ranks[0].tensors.push_back(BoxTensor("shape", 2, Whole({2}), DType::kI64));
  return {
      {"groups of INT4 that are cut between words",
       wide_trainer,
       PackedEngine(int4, DType::kBF16, {{{0, 0}, {8, 4}}, {{0, 4}, {8, 3}}, {{0, 7}, {8, 1}}}),
       Reason::kShapeMismatch,
       "target/1",
       {"[0:8, 32:56]", "1 × 32", "must begin and end at multiples of 32"}},
      {"groups of MXFP4 that are cut between bytes",
       wide_trainer,
       PackedEngine(mxfp4, DType::kU8, {{{0, 0}, {8, 8}}, {{0, 8}, {8, 24}}}),
       Reason::kShapeMismatch,
       "target/0",
       {"[0:8, 0:16]", "1 × 32", "must begin and end at multiples of 32"}},
      {"NVFP4",
       wide_trainer,
       nv_engine,
       Reason::kDtypeMismatch,
       "",
       {"NVFP4", "global scale", "wwctl convert --quantize", "MXFP4 or INT4"}},
      {"modelopt's NVFP4, under the weight's own name",
       wide_trainer,
       PackedEngine(modelopt, DType::kF8E4M3, {Whole(nvfp4.shape)}),
       Reason::kDtypeMismatch,
       "",
       {"NVFP4", "global scale", "wwctl convert --quantize", "MXFP4 or INT4"}},
      {"the global scale of NVFP4 alone",
       wide_trainer,
       global_alone,
       Reason::kDtypeMismatch,
       "target/0",
       {"NVFP4", "wwctl convert --quantize", "MXFP4 or INT4"}},
      {"the shape of INT4",
       wide_trainer,
       int4_engine,
       Reason::kTensorMissing,
       "target/0",
       {"w_shape", "not sent", "hf:skip=*.weight_shape"}},
      {"codes without scales",
       trainer,
       no_scales,
       Reason::kTensorMissing,
       "target/0",
       {"w_scale_inv", "only= and skip="}},
      {"scales without codes",
       trainer,
       no_codes,
       Reason::kTensorMissing,
       "target/0",
       {"belongs to it of w", "only= and skip="}},
      {"codes that begin inside a block",
       trainer,
       cut,
       Reason::kShapeMismatch,
       "target/0",
       {"[2:16, 0:12]", "4 × 4"}},
      {"blocks of unknown size",
       trainer,
       unknown,
       Reason::kDtypeMismatch,
       "target/0",
       {"source/0 holds BF16", "target/0 wants F8_E4M3", "quantization_config"}},
      {"scales of BF16 in F32, of a format that has them in BF16",
       trainer,
       own_kind,
       Reason::kDtypeMismatch,
       "target/0",
       {"w_scale_inv", "source/0 holds BF16, target/0 wants F32", "hf_sharded"}},
      {"scales beside floats",
       has_scales,
       engine,
       Reason::kDtypeMismatch,
       "",
       {"w_scale_inv", "not fp8"}},
      {"integers", integers, engine, Reason::kDtypeMismatch, "target/0", {"source/0 holds I8"}},
      {"codes back to floats",
       engine,
       trainer,
       Reason::kDtypeMismatch,
       "target/0",
       {"source/0 holds F8_E4M3", "not dequantized"}},
  };
}

TEST(QuantizedPlan, RefusesWhatItCannotQuantizeRight) {
  for (const Refusal& row : Refusals()) {
    const auto plan = BuildPlan(row.trainer, row.engine);
    ASSERT_FALSE(plan.has_value()) << row.what;
    const Status& status = plan.error();
    EXPECT_EQ(status.code(), Code::kFailedPrecondition) << row.what;
    EXPECT_EQ(status.reason(), row.reason) << row.what << ": " << status.ToString();
    EXPECT_EQ(status.rank(), row.rank) << row.what << ": " << status.ToString();
    EXPECT_TRUE(status.tensor().starts_with("w")) << row.what << ": " << status.ToString();
    for (const char* word : row.words) {
      EXPECT_NE(status.ToString().find(word), std::string::npos)
          << row.what << ", " << word << ": " << status.ToString();
    }
  }
}

struct Mutant {
  const char* name;
  std::function<void(CopyOp& codes, CopyOp& scales)> apply;
};
class QuantizedMutant : public ::testing::TestWithParam<Mutant> {};

/// Both copies begin inside the matrix, so that they could read elsewhere.
TEST_P(QuantizedMutant, IsProvedWrong) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {Whole(shape)});
  const ModelLayout engine = Engine(shape, block, {{{4, 4}, {12, 8}}});
  auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(VerifyPlan(*plan, trainer, engine), OkStatus());
  auto& ops = plan->streams.at(0).ops;
  ASSERT_EQ(ops.size(), 2u);
  ASSERT_EQ(ops[0].transform, Transform::kCodes);
  ASSERT_EQ(ops[1].transform, Transform::kScales);
  GetParam().apply(ops[0], ops[1]);
  plan->bytes_total = plan->streams[0].bytes = WireBytes(ops[0]) + WireBytes(ops[1]);
  const Status proof = VerifyPlan(*plan, trainer, engine);
  EXPECT_EQ(proof.code(), Code::kInternal) << GetParam().name;
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedMutant,
    ::testing::Values(
        Mutant{"CodesAreCast",
               [](CopyOp& codes, CopyOp&) { codes.transform = Transform::kElements; }},
        Mutant{"ScalesAreCast",
               [](CopyOp&, CopyOp& scales) { scales.transform = Transform::kElements; }},
        Mutant{"ScalesAreElements",
               [](CopyOp&, CopyOp& scales) {
                 scales.transform = Transform::kElements;
                 scales.block.clear();
                 scales.source_extent.clear();
               }},
        Mutant{"KindsExchanged",
               [](CopyOp& codes, CopyOp& scales) { std::swap(codes.transform, scales.transform); }},
        Mutant{"CodesOfOtherBlocks",
               [](CopyOp& codes, CopyOp&) {
                 codes.block = {2, 4};
               }},
        Mutant{"ScalesOfOtherBlocks",
               [](CopyOp&, CopyOp& scales) {
                 scales.block = {2, 4};
                 scales.source_extent[0] = 6;
               }},
        Mutant{"ScalesOfAPartialBlock",
               [](CopyOp&, CopyOp& scales) { scales.source_extent[0] -= 1; }},
        Mutant{"ScalesOfTheBlockBefore",
               [](CopyOp&, CopyOp& scales) { scales.source_offset -= 4; }},
        Mutant{"ScalesOfTheRowBefore", [](CopyOp&, CopyOp& scales) { scales.source_offset -= 12; }},
        Mutant{"ScalesOfEveryOtherRow",
               [](CopyOp&, CopyOp& scales) { scales.source_stride[0] *= 2; }},
        Mutant{"CodesOfTheRowBefore", [](CopyOp& codes, CopyOp&) { codes.source_offset -= 12; }},
        Mutant{"CodesWithoutTheLastRow", [](CopyOp& codes, CopyOp&) { codes.extent[0] -= 1; }}),
    [](const auto& mutant) { return std::string(mutant.param.name); });

struct GatherMutant {
  const char* name;
  std::function<void(TransferPlan& plan, CopyOp& floats, CopyOp& codes, CopyOp& scales)> apply;
};
class GatheredMutant : public ::testing::TestWithParam<GatherMutant> {};

/// Two bands of blocks are gathered, with rows of two ranks each; the first one's copies are
/// changed.
TEST_P(GatheredMutant, IsProvedWrong) {
  const Shape shape = {24, 12}, block = {4, 4};
  const ModelLayout trainer =
      Trainer(shape, {{{0, 0}, {6, 12}}, {{6, 0}, {11, 12}}, {{17, 0}, {7, 12}}});
  const ModelLayout engine = Engine(shape, block, {Whole(shape), Whole(shape)});
  auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(VerifyPlan(*plan, trainer, engine), OkStatus());
  auto& made = plan->gathered.at(0).made;
  ASSERT_EQ(made.size(), 4u);
  ASSERT_EQ(made[0].transform, Transform::kCodes);
  ASSERT_EQ(made[2].transform, Transform::kScales);
  Stream& stream = plan->streams.at(0);
  const auto floats =
      std::ranges::find_if(stream.ops, [](const CopyOp& op) { return op.target_tensor == 2; });
  ASSERT_NE(floats, stream.ops.end());
  GetParam().apply(*plan, *floats, made[0], made[2]);
  for (Stream& each : plan->streams) {
    plan->bytes_total -= each.bytes;
    each.bytes = 0;
    for (const CopyOp& op : each.ops) each.bytes += WireBytes(op);
    plan->bytes_total += each.bytes;
  }
  const Status proof = VerifyPlan(*plan, trainer, engine);
  EXPECT_EQ(proof.code(), Code::kInternal) << GetParam().name;
}

using Plan = TransferPlan;
INSTANTIATE_TEST_SUITE_P(All, GatheredMutant,
                         ::
                             testing::
                                 Values(
                                     GatherMutant{"NothingIsGathered",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    plan.gathered.clear();
                                                  }},
                                     GatherMutant{"OneRankGathersNothing",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    plan.gathered.erase(1);
                                                  }},
                                     GatherMutant{"ARankThatIsNone",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    plan.gathered[2] = plan.gathered[1];
                                                  }},
                                     GatherMutant{"TooLittleMemory",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    --plan.gathered[0].elements;
                                                  }},
                                     GatherMutant{"OtherDtype",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    plan.gathered[0].dtype = DType::kF16;
                                                  }},
                                     GatherMutant{"ScalesAreNotMade",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    auto& made = plan.gathered[0].made;
                                                    made.erase(made.begin() + 2);
                                                  }},
                                     GatherMutant{"CodesAreNotMade",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    auto& made = plan.gathered[0].made;
                                                    made.erase(made.begin());
                                                  }},
                                     GatherMutant{"CodesAreMadeTwice",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    auto& made = plan.gathered[0].made;
                                                    made.push_back(made[0]);
                                                  }},
                                     GatherMutant{
                                         "FloatsOfTheRowBefore",
                                         [](Plan&, CopyOp& floats, auto&, auto&) {
                                           floats.source_offset -= 12;
                                         }},
                                     GatherMutant{"FloatsARowTooFar",
                                                  [](Plan&, CopyOp& floats, auto&, auto&) {
                                                    floats.target_offset += 12;
                                                  }},
                                     GatherMutant{"FloatsWithoutARow",
                                                  [](Plan&, CopyOp& floats, auto&, auto&) {
                                                    floats.extent[0] -= 1;
                                                  }},
                                     GatherMutant{"FloatsAreQuantized",
                                                  [](Plan&, CopyOp& floats, auto&, auto&) {
                                                    floats.transform = Transform::kCodes;
                                                    floats.block = {4, 4};
                                                  }},
                                     GatherMutant{"CodesOfTheOtherBand",
                                                  [](Plan& plan, auto&, CopyOp& codes, auto&) {
                                                    codes.source_offset =
                                                        plan.gathered[0].made[1].source_offset;
                                                  }},
                                     GatherMutant{"CodesOverTheOtherBand",
                                                  [](Plan& plan, auto&, CopyOp& codes, auto&) {
                                                    codes.target_offset =
                                                        plan.gathered[0].made[1].target_offset;
                                                  }},
                                     GatherMutant{"CodesOfTheRowBelow",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.source_offset += 12;
                                                  }},
                                     GatherMutant{"CodesOfHalfABlock",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.extent[0] = 2;
                                                  }},
                                     GatherMutant{"CodesOfOtherBlocks",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.block = {2, 4};
                                                  }},
                                     GatherMutant{"CodesFromATensor",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.source_tensor = 0;
                                                  }},
                                     GatherMutant{"CodesIntoWhatIsGathered",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.target_tensor = 2;
                                                  }},
                                     GatherMutant{"CodesAreCast",
                                                  [](Plan&, auto&, CopyOp& codes, auto&) {
                                                    codes.transform = Transform::kElements;
                                                  }},
                                     GatherMutant{"ScalesOfTheOtherBand",
                                                  [](Plan& plan, auto&, auto&, CopyOp& scales) {
                                                    scales.source_offset =
                                                        plan.gathered[0].made[3].source_offset;
                                                  }},
                                     GatherMutant{"ScalesOfTheNextBlock",
                                                  [](Plan&, auto&, auto&, CopyOp& scales) {
                                                    scales.source_offset += 4;
                                                  }},
                                     GatherMutant{"ScalesOverTheNextOnes",
                                                  [](Plan&, auto&, auto&, CopyOp& scales) {
                                                    scales.target_offset += 3;
                                                  }},
                                     GatherMutant{"ScalesOfPartOfThem",
                                                  [](Plan&, auto&, auto&, CopyOp& scales) {
                                                    scales.extent[1] = 2;
                                                    scales.source_extent[1] = 8;
                                                  }},
                                     GatherMutant{"BandsInOnePlace",
                                                  [](Plan& plan, auto&, auto&, auto&) {
                                                    auto& made = plan.gathered[0].made;
                                                    const int64_t apart = made[1].source_offset -
                                                                          made[0].source_offset;
                                                    made[1].source_offset -= apart;
                                                    made[3].source_offset -= apart;
                                                    for (Stream& stream : plan.streams) {
                                                      if (stream.target_rank != 0) continue;
                                                      for (CopyOp& op : stream.ops) {
                                                        if (op.target_tensor == 2 &&
                                                            op.target_offset >= apart) {
                                                          op.target_offset -= apart;
                                                        }
                                                      }
                                                    }
                                                  }}),
                         [](const auto& mutant) { return std::string(mutant.param.name); });

/// A gather of fp32 shards that would round them to bf16 on the way.
TEST(QuantizedPlan, IsProvedWrongWhereWhatIsGatheredIsRounded) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {{{0, 0}, {6, 12}}, {{6, 0}, {10, 12}}}, DType::kF32);
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  plan->gathered.at(0).dtype = DType::kBF16;
  for (CopyOp& op : plan->gathered.at(0).made) op.source_dtype = DType::kBF16;
  plan->bytes_total = 0;
  for (Stream& stream : plan->streams) {
    stream.bytes = 0;
    for (CopyOp& op : stream.ops) {
      if (op.target_tensor == 2) op.target_dtype = DType::kBF16;
      stream.bytes += WireBytes(op);
    }
    plan->bytes_total += stream.bytes;
  }
  const Status proof = VerifyPlan(*plan, trainer, engine);
  EXPECT_NE(proof.message().find("rounds what it gathers"), std::string::npos) << proof.ToString();
}

/// A copy of codes that is cut inside a block writes every code once, but with two scales.
TEST(QuantizedPlan, IsProvedWrongWhereABlockIsCut) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {Whole(shape)});
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  auto& ops = plan->streams.at(0).ops;
  CopyOp rest = ops[0];
  ops[0].extent[0] = 6;
  rest.extent[0] = 10;
  rest.source_offset += 6 * 12;
  rest.target_offset += 6 * 12;
  ops.insert(ops.begin() + 1, rest);
  ++plan->copies_total;
  const Status proof = VerifyPlan(*plan, trainer, engine);
  EXPECT_EQ(proof.code(), Code::kInternal);
  EXPECT_NE(proof.message().find("parts of blocks"), std::string::npos) << proof.ToString();
}

/// Segments of codes are whole blocks of the copy, cover it once, and fit.
TEST(QuantizedPlan, SegmentsOfCodesAreWholeBlocks) {
  std::mt19937_64 random(7);
  const auto in = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int tiles = 0;
  for (int round = 0; round < 300; ++round) {
    CopyOp op;
    op.transform = Transform::kCodes;
    op.target_dtype = DType::kF8E4M3;
    op.block = {in(1, 9), in(1, 9)};
    op.extent = {in(1, 40), in(1, 40)};
    const int64_t most = std::max<int64_t>(8, LargestBlockBytes(op)) + in(0, 200);
    Stream stream{.bytes = WireBytes(op), .ops = {op}};
    std::vector<int> covered(static_cast<size_t>(ElementCount(op)), 0);
    const StreamSchedule schedule = ScheduleOf(stream, most, most + 128);
    for (const Segment& segment : schedule.segments) {
      EXPECT_LE(segment.bytes, most);
      EXPECT_EQ(segment.bytes, segment.extent[0] * segment.extent[1]);
      if (segment.extent[1] < op.extent[1]) ++tiles;
      for (size_t d = 0; d < 2; ++d) {
        const int64_t end = segment.begin[d] + segment.extent[d];
        EXPECT_EQ(segment.begin[d] % op.block[d], 0);
        EXPECT_TRUE(end % op.block[d] == 0 || end == op.extent[d]);
      }
      for (int64_t r = 0; r < segment.extent[0]; ++r) {
        for (int64_t c = 0; c < segment.extent[1]; ++c) {
          ++covered[static_cast<size_t>((segment.begin[0] + r) * op.extent[1] + segment.begin[1] +
                                        c)];
        }
      }
    }
    for (int times : covered) ASSERT_EQ(times, 1);
  }
  EXPECT_GT(tiles, 100);
}

TEST(QuantizedPlan, RelaysPassOnWhatWasQuantizedInTheSameSegments) {
  const Shape shape = {40, 30}, block = {8, 8};
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  const auto plan = BuildPlan(Trainer(shape, {Whole(shape)}), engine);
  ASSERT_TRUE(plan.has_value());
  const RankSlice target = SliceOf(*plan, Side::kTarget, 0);
  const RankSlice relayed = RelayedSlice(target, Side::kSource);
  const StreamSchedule own = ScheduleOf(target.streams[0], 100, 1'024);
  const StreamSchedule passed_on = ScheduleOf(relayed.streams[0], 100, 1'024);
  ASSERT_EQ(own.segments.size(), passed_on.segments.size());
  EXPECT_GT(own.segments.size(), 10u);
  for (size_t i = 0; i < own.segments.size(); ++i) {
    EXPECT_EQ(own.segments[i].begin, passed_on.segments[i].begin);
    EXPECT_EQ(own.segments[i].extent, passed_on.segments[i].extent);
  }
  for (const CopyOp& op : relayed.streams[0].ops) {
    EXPECT_EQ(op.transform, Transform::kElements);
    EXPECT_EQ(op.source_dtype, op.target_dtype);
    EXPECT_TRUE(op.source_extent.empty());
  }
}

/// Who reads from a rank of an equal layout gets the floats that it gathered, and makes the same.
TEST(QuantizedPlan, RelaysPassOnWhatTheyGathered) {
  const Shape shape = {40, 30}, block = {8, 8};
  const auto plan = BuildPlan(Trainer(shape, {{{0, 0}, {21, 30}}, {{21, 0}, {19, 30}}}),
                              Engine(shape, block, {Whole(shape)}));
  ASSERT_TRUE(plan.has_value());
  const RankSlice target = SliceOf(*plan, Side::kTarget, 0);
  EXPECT_EQ(RelayedSlice(target, Side::kTarget).gathered, target.gathered);
  const RankSlice relayed = RelayedSlice(target, Side::kSource);
  EXPECT_EQ(relayed.gathered, GatherBuffer{});
  int gathered = 0;
  for (const Stream& stream : relayed.streams) {
    for (const CopyOp& op : stream.ops) {
      if (op.target_tensor != 2) continue;
      ++gathered;
      EXPECT_EQ(op.source_tensor, 2u);
      EXPECT_EQ(op.source_dtype, DType::kBF16);
      EXPECT_EQ(op.source_offset, op.target_offset);
    }
  }
  EXPECT_EQ(gathered, 2);
}

TEST(QuantizedPlan, ExplainsWhatIsGathered) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {{{0, 0}, {6, 12}}, {{6, 0}, {10, 12}}});
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  const auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  const std::string text = Explain(*plan, trainer, engine, "w");
  for (const char* words :
       {"target/0 gathers 96 B of BF16", "[4:6, 0:12]  source/0", "[6:8, 0:12]  source/1",
        "[4:8, 0:12]  target/0 (gathered) BF16@0 strides [12, 1] -> target/0 codes F8_E4M3@48"}) {
    EXPECT_NE(text.find(words), std::string::npos) << words << "\n" << text;
  }
  EXPECT_NE(Explain(*plan, trainer, engine, "w_scale_inv").find("(gathered)"), std::string::npos);
}

TEST(QuantizedPlan, ExplainsWhatIsQuantized) {
  const Shape shape = {16, 12}, block = {4, 4};
  const ModelLayout trainer = Trainer(shape, {Whole(shape)});
  const ModelLayout engine = Engine(shape, block, {Whole(shape)});
  const auto plan = BuildPlan(trainer, engine);
  ASSERT_TRUE(plan.has_value());
  EXPECT_NE(Explain(*plan, trainer, engine, "w").find("codes of blocks [4, 4]"), std::string::npos);
  EXPECT_NE(Explain(*plan, trainer, engine, "w_scale_inv")
                .find("scales of blocks [4, 4] in elements [16, 12]"),
            std::string::npos);
}

}  // namespace
}  // namespace weightwire::plan
