#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <random>

#include "server/plan/plan.h"
#include "tests/support/plan_run.h"
#include "tests/unit/plan/hand_layouts.h"

// Random layouts: sources that tile the tensor by random cuts, with replicas and unequal extra
// shards; targets with random boxes; storage with random dimension order, gaps and several pieces
// per local tensor. Elements are compared one by one.
namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;
using layout::Piece;
using layout::Shape;
using testing::Whole;

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  std::vector<layout::TensorSpec> Specs() {
    std::vector<layout::TensorSpec> specs;
    for (int64_t t = In(1, 4); t > 0; --t) {
      Shape shape;
      for (int64_t d = In(0, 3); d > 0; --d) shape.push_back(In(1, 9));
      specs.push_back(
          {std::string("t") + std::to_string(specs.size()), layout::DType::kBF16, shape});
    }
    return specs;
  }

  /// Boxes that tile `box`.
  void Tile(const Box& box, int cuts, std::vector<Box>& out) {
    std::vector<size_t> splittable;
    for (size_t d = 0; d < box.extent.size(); ++d) {
      if (box.extent[d] > 1) splittable.push_back(d);
    }
    if (cuts == 0 || splittable.empty()) {
      out.push_back(box);
      return;
    }
    const size_t d = splittable[static_cast<size_t>(In(0, std::ssize(splittable) - 1))];
    const int64_t at = In(1, box.extent[d] - 1);
    Box left = box, right = box;
    left.extent[d] = at;
    right.begin[d] += at;
    right.extent[d] -= at;
    Tile(left, cuts - 1, out);
    Tile(right, cuts - 1, out);
  }

  Box SubBox(const Shape& shape) {
    Box box = Whole(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      box.begin[d] = In(0, shape[d] - 1);
      box.extent[d] = In(1, shape[d] - box.begin[d]);
    }
    return box;
  }

  /// Spreads (tensor, box) pairs over `ranks`, a few of them sharing one local tensor.
  layout::RankLayout Store(std::vector<std::pair<uint32_t, Box>> holds) {
    std::shuffle(holds.begin(), holds.end(), random_);
    layout::RankLayout rank;
    while (!holds.empty()) {
      layout::LocalTensor local{
          std::string("l") + std::to_string(rank.tensors.size()), layout::DType::kBF16, {}, {}};
      int64_t next = 0;
      for (int64_t count = In(1, 3); count > 0 && !holds.empty(); --count) {
        next += In(0, 2);
        auto& [tensor, box] = holds.back();
        Piece piece{tensor, box, next, std::vector<int64_t>(box.extent.size())};
        std::vector<size_t> dims(box.extent.size());
        std::iota(dims.begin(), dims.end(), size_t{0});
        if (In(0, 1) == 0) std::shuffle(dims.begin(), dims.end(), random_);
        int64_t stride = 1;
        for (size_t i = dims.size(); i-- > 0;) {
          piece.local_stride[dims[i]] = stride;
          stride = stride * box.extent[dims[i]] + (In(0, 2) == 0 ? In(0, 3) : 0);
        }
        next += stride;
        local.pieces.push_back(std::move(piece));
        holds.pop_back();
      }
      local.shape = {next + In(0, 3)};
      rank.tensors.push_back(std::move(local));
    }
    return rank;
  }

  ModelLayout Source(const std::vector<layout::TensorSpec>& specs) {
    ModelLayout layout{{specs}, {}};
    std::vector<std::vector<std::pair<uint32_t, Box>>> holds(static_cast<size_t>(In(1, 6)));
    const auto any_rank = [&]() -> auto& {
      return holds[static_cast<size_t>(In(0, std::ssize(holds) - 1))];
    };
    for (uint32_t t = 0; t < specs.size(); ++t) {
      std::vector<Box> tiles;
      Tile(Whole(specs[t].shape), static_cast<int>(In(0, 4)), tiles);
      for (const Box& box : tiles) {
        for (int64_t copies = In(1, 3); copies > 0; --copies) any_rank().emplace_back(t, box);
      }
      for (int64_t extra = In(0, 2); extra > 0; --extra) {
        any_rank().emplace_back(t, SubBox(specs[t].shape));
      }
    }
    for (auto& hold : holds) layout.ranks.push_back(Store(std::move(hold)));
    return layout;
  }

  ModelLayout Target(const std::vector<layout::TensorSpec>& specs) {
    ModelLayout layout{{specs}, {}};
    for (int64_t ranks = In(1, 5); ranks > 0; --ranks) {
      std::vector<std::pair<uint32_t, Box>> holds;
      for (uint32_t t = 0; t < specs.size(); ++t) {
        for (int64_t boxes = In(0, 2); boxes > 0; --boxes) {
          holds.emplace_back(t, SubBox(specs[t].shape));
        }
        if (In(0, 2) > 0) continue;
        std::vector<Box> tiles;
        Tile(Whole(specs[t].shape), 2, tiles);
        for (const Box& box : tiles) holds.emplace_back(t, box);
      }
      layout.ranks.push_back(Store(std::move(holds)));
    }
    return layout;
  }

 private:
  std::mt19937_64 random_;
};

TEST(BuildPlan, WritesEveryElementOnceFromItsOwnInRandomLayouts) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  uint64_t copies = 0;
  for (uint64_t round = 0; round < 3000; ++round) {
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed) + std::string(" round ") +
                 std::to_string(round));
    Generator generator(seed + round);
    const auto specs = generator.Specs();
    const ModelLayout source = generator.Source(specs);
    const ModelLayout target = generator.Target(specs);
    const auto plan = BuildPlan(source, target);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    auto memory = weightwire::testing::EmptyMemory(target);
    ASSERT_EQ(
        weightwire::testing::RunPlan(*plan, weightwire::testing::FilledMemory(source), memory), 0);
    ASSERT_EQ(memory, weightwire::testing::FilledMemory(target));
    const Status proof = VerifyPlan(*plan, source, target);
    ASSERT_TRUE(proof.ok()) << proof.ToString();
    const PlanReport report = Report(*plan, source, target);
    ASSERT_GE(report.egress_over_bound, 1 - 1e-9);
    // Elements are 2 bytes: rounding to whole ones may cost some where a rank sends only dozens.
    ASSERT_LE(static_cast<double>(report.egress_max), report.egress_bound * 1.01 + 8);
    ASSERT_DOUBLE_EQ(report.ingress_over_bound, 1.0);
    ASSERT_GE(report.simulated_over_bound, 1 - 1e-6);
    copies += plan->copies_total;
  }
  EXPECT_GT(copies, 3000u);
}

}  // namespace
}  // namespace weightwire::plan
