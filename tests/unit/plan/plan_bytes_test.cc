#include "server/plan/plan_bytes.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using layout::DType;
using layout::ModelLayout;
using testing::BoxTensor;
using testing::Cut;

/// Rows to columns, with a replica of every row shard, and a scalar.
struct Case {
  ModelLayout source;
  ModelLayout target;
  TransferPlan plan;
};
Case MakeCase() {
  Case c;
  c.source.canonical.tensors = {{"a", DType::kBF16, {12, 8}}, {"b", DType::kF32, {}}};
  c.target.canonical = c.source.canonical;
  for (const auto& box : Cut({12, 8}, 0, 4)) {
    c.source.ranks.push_back({{BoxTensor("a", 0, box), BoxTensor("b", 1, {{}, {}}, DType::kF32)}});
  }
  for (const auto& box : Cut({12, 8}, 1, 2)) {
    c.target.ranks.push_back({{BoxTensor("a", 0, box), BoxTensor("b", 1, {{}, {}}, DType::kF32)}});
  }
  c.plan = BuildPlan(c.source, c.target).value();
  return c;
}

TEST(PlanBytes, ReadBackWhatWasWritten) {
  const Case c = MakeCase();
  const auto read = FromBytes(ToBytes(c.plan));
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, c.plan);
  EXPECT_EQ(VerifyPlan(*read, c.source, c.target), OkStatus());
}

TEST(PlanBytes, RefuseEveryTruncation) {
  const std::string bytes = ToBytes(MakeCase().plan);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto read = FromBytes(std::string_view(bytes).substr(0, size));
    ASSERT_FALSE(read.has_value()) << size;
    EXPECT_EQ(read.error().code(), Code::kInvalidArgument);
  }
  EXPECT_FALSE(FromBytes(bytes + std::string(1, '\0')).has_value());
}

TEST(PlanBytes, RefuseNumbersThatDoNotFit) {
  TransferPlan plan = MakeCase().plan;
  plan.streams[0].ops[0].extent[0] = -1;
  EXPECT_FALSE(FromBytes(ToBytes(plan)).has_value());
  plan.streams[0].ops[0].extent[0] = int64_t{1} << 62;
  EXPECT_FALSE(FromBytes(ToBytes(plan)).has_value());
  plan = MakeCase().plan;
  plan.streams[0].ops[0].source_dtype = static_cast<DType>(99);
  EXPECT_EQ(FromBytes(ToBytes(plan)).error().reason(), Reason::kUnknownEnum);
  EXPECT_FALSE(FromBytes(std::string("wwplan2\n") + std::string(10, '\xff')).has_value());
}

/// No flip of a bit gives a plan that is read, proved, and yet moves something else.
TEST(PlanBytes, AreProvedWrongAfterAnyFlippedBitThatMatters) {
  const Case c = MakeCase();
  const std::string bytes = ToBytes(c.plan);
  int proved_wrong = 0;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    auto read = FromBytes(flipped);
    if (!read.has_value()) continue;
    if (!VerifyPlan(*read, c.source, c.target).ok()) {
      ++proved_wrong;
      continue;
    }
    // What is left: the id, strides along extents of 1, and another replica as the source.
    read->id = c.plan.id;
    for (size_t s = 0; s < read->streams.size(); ++s) {
      ASSERT_EQ(read->streams[s].target_rank, c.plan.streams[s].target_rank);
      for (size_t i = 0; i < read->streams[s].ops.size(); ++i) {
        const CopyOp& now = read->streams[s].ops[i];
        const CopyOp& was = c.plan.streams[s].ops[i];
        ASSERT_EQ(now.extent, was.extent);
        ASSERT_EQ(now.target_offset, was.target_offset);
        ASSERT_EQ(now.source_offset, was.source_offset);
      }
    }
  }
  EXPECT_GT(proved_wrong, 1000);
}

struct Mutant {
  const char* name;
  std::function<void(TransferPlan&)> apply;
};
class PlanBytesMutant : public ::testing::TestWithParam<Mutant> {};

/// Mutants keep all totals true, so that only the copies can give them away.
TEST_P(PlanBytesMutant, IsCaughtAfterTheFileWasRead) {
  Case c = MakeCase();
  const TransferPlan before = c.plan;
  GetParam().apply(c.plan);
  c.plan.bytes_total = 0;
  c.plan.copies_total = 0;
  for (Stream& stream : c.plan.streams) {
    stream.bytes = 0;
    for (const CopyOp& op : stream.ops) stream.bytes += WireBytes(op);
    c.plan.bytes_total += stream.bytes;
    c.plan.copies_total += stream.ops.size();
  }
  ASSERT_NE(c.plan, before);
  const auto read = FromBytes(ToBytes(c.plan));
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(VerifyPlan(*read, c.source, c.target).code(), Code::kInternal);
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanBytesMutant,
    ::testing::Values(
        Mutant{"Dropped",
               [](TransferPlan& p) { p.streams[1].ops.erase(p.streams[1].ops.begin()); }},
        Mutant{"Doubled",
               [](TransferPlan& p) {
                 auto& ops = p.streams[1].ops;
                 ops.insert(ops.begin(), ops.front());
               }},
        Mutant{"DoubledFromAnotherSource",
               [](TransferPlan& p) {
                 auto& from = p.streams[1].ops;
                 p.streams[0].ops.insert(p.streams[0].ops.end(), from.begin(), from.end());
               }},
        Mutant{"ShiftedTarget", [](TransferPlan& p) { p.streams[1].ops[0].target_offset += 4; }},
        Mutant{"ShiftedSource", [](TransferPlan& p) { p.streams[1].ops[0].source_offset += 1; }},
        Mutant{"SwappedSources",
               [](TransferPlan& p) { std::swap(p.streams[0].ops, p.streams[1].ops); }},
        Mutant{"WrongSourceDtype",
               [](TransferPlan& p) { p.streams[1].ops[0].source_dtype = DType::kF16; }},
        Mutant{"WrongTargetDtype",
               [](TransferPlan& p) { p.streams[1].ops[0].target_dtype = DType::kF32; }},
        Mutant{"Overlapping",
               [](TransferPlan& p) {
                 CopyOp again = p.streams[1].ops[0];
                 again.extent[0] -= 1;
                 again.source_offset += again.source_stride[0];
                 again.target_offset += again.target_stride[0];
                 p.streams[1].ops.insert(p.streams[1].ops.begin() + 1, again);
               }}),
    [](const auto& mutant) { return std::string(mutant.param.name); });

}  // namespace
}  // namespace weightwire::plan
