#include "server/layout/joined.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>

#include "server/layout/schemes/flat.h"
#include "tests/support/plan_run.h"

namespace weightwire::layout {
namespace {

using Parts = std::vector<size_t>;

TEST(PartsOf, AreNeighboursOfWhichEachDimensionIsTheProduct) {
  EXPECT_EQ(PartsOf({4, 6, 10}, {4, 6, 5, 2}), (Parts{1, 1, 2}));
  EXPECT_EQ(PartsOf({24, 10}, {2, 3, 4, 5, 2}), (Parts{3, 2}));
  EXPECT_EQ(PartsOf({240}, {4, 6, 10}), (Parts{3}));
  EXPECT_EQ(PartsOf({4, 6}, {4, 6}), (Parts{1, 1}));
  EXPECT_EQ(PartsOf({7, 3}, {7, 1, 3}), (Parts{1, 2}));  // a unit that only one of them has
  EXPECT_EQ(PartsOf({7, 3}, {7, 3, 1}), (Parts{1, 2}));
  EXPECT_EQ(PartsOf({1, 7}, {7}), (Parts{0, 1}));
  EXPECT_EQ(PartsOf({1}, {}), (Parts{0}));
}

TEST(PartsOf, AreNoneWhereDimensionsAreNotJoined) {
  for (const auto& [joined, split] : std::vector<std::pair<Shape, Shape>>{
           {{4, 6}, {6, 4}},        // transposed, or anything else
           {{4, 6}, {4, 3, 3}},     // too many elements
           {{4, 6}, {4, 3}},        // too few
           {{4, 6}, {4, 3, 2, 2}},  // more behind
           {{4, 6, 5}, {4, 5, 6}},
           {{4, 5, 2}, {4, 10}},  // the other way round
           {{6, 4}, {3, 8}},      // the same count, cut elsewhere
           {{0, 4}, {0, 2, 2}},
           {{4}, {2, 0}},
           {{}, {1}},
       }) {
    EXPECT_EQ(PartsOf(joined, split), std::nullopt);
  }
}

/// Place of a canonical element in row-major order → its place in local storage.
std::map<int64_t, int64_t> PlacesOf(const Shape& shape, const std::vector<Piece>& pieces) {
  std::map<int64_t, int64_t> places;
  const Shape strides = RowMajorStrides(shape);
  for (const Piece& piece : pieces) {
    testing::ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
      int64_t element = 0, local = piece.local_offset;
      for (size_t d = 0; d < index.size(); ++d) {
        element += (piece.box.begin[d] + index[d]) * strides[d];
        local += index[d] * piece.local_stride[d];
      }
      EXPECT_TRUE(places.emplace(element, local).second) << "element " << element << " twice";
    });
  }
  return places;
}

/// A model of one tensor, of which each rank holds one box in the middle of its storage, with the
/// dimensions in any order and gaps between them.
ModelLayout Drawn(std::mt19937_64& random, const Shape& shape) {
  const auto in = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  ModelLayout model{{{{"t", DType::kBF16, shape}}}, {}};
  for (int64_t rank = 0; rank < 3; ++rank) {
    Piece piece;
    piece.local_offset = in(0, 3);
    std::vector<size_t> order;
    for (size_t d = 0; d < shape.size(); ++d) {
      piece.box.begin.push_back(in(0, shape[d] - 1));
      piece.box.extent.push_back(in(1, shape[d] - piece.box.begin.back()));
      order.push_back(d);
    }
    std::ranges::shuffle(order, random);
    piece.local_stride.resize(shape.size());
    int64_t stride = in(1, 2), end = piece.local_offset + 1;
    for (size_t d : order) {
      piece.local_stride[d] = stride;
      end += (piece.box.extent[d] - 1) * stride;
      stride = stride * piece.box.extent[d] + in(0, 2);
    }
    model.ranks.push_back({{{"local", DType::kBF16, {end}, {piece}}}});
  }
  return model;
}

TEST(Split, KeepsEveryElementWhereItIs) {
  std::mt19937_64 random(11);
  const auto in = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  size_t most = 0, one = 0;
  for (int round = 0; round < 3000; ++round) {
    Shape fine, joined;
    for (int64_t d = in(1, 4); d > 0; --d) {
      joined.push_back(1);
      for (int64_t part = in(1, 3); part > 0 && fine.size() < 6; --part) {
        fine.push_back(in(1, 4));
        joined.back() *= fine.back();
      }
    }
    const ModelLayout model = Drawn(random, joined);
    ASSERT_TRUE(Validate(model).ok()) << Validate(model).ToString();
    const CanonicalSpace other{{{"a", DType::kBF16, {2}}, {"t", DType::kBF16, fine}}};
    auto [here, there] = SplitsBetween(model.canonical, other);
    ASSERT_EQ(here.size(), joined == fine ? 0 : 1);
    EXPECT_TRUE(there.empty());
    const auto split = Split(model, here);
    ASSERT_TRUE(split.has_value());
    ASSERT_TRUE(Validate(*split).ok()) << Validate(*split).ToString();
    EXPECT_EQ(split->canonical.tensors[0].shape, fine);
    for (size_t rank = 0; rank < model.ranks.size(); ++rank) {
      const LocalTensor& before = model.ranks[rank].tensors[0];
      const LocalTensor& after = split->ranks[rank].tensors[0];
      EXPECT_EQ(after.shape, before.shape);
      ASSERT_EQ(PlacesOf(fine, after.pieces), PlacesOf(joined, before.pieces));
      most = std::max(most, after.pieces.size());
      one += after.pieces.size() == 1;
    }
  }
  EXPECT_GT(most, 3u);
  EXPECT_GT(one, 1000u);
}

TEST(Split, OfARangeIsOneBoxWhereItIsWholeSlicesAndThreePiecesElsewhere) {
  // gpt-oss: gate and up alternate. Columns 2 to 8 are three pairs; columns 1 to 8 a half before.
  const auto pieces = [](int64_t begin, int64_t extent) {
    ModelLayout model{{{{"t", DType::kBF16, {3, 10}}}}, {}};
    model.ranks.push_back(
        {{{"local", DType::kBF16, {3, extent}, {{0, {{0, begin}, {3, extent}}, 0, {extent, 1}}}}}});
    const SplitTensor split{0, {3, 5, 2}, {1, 2}};
    return Split(model, {&split, 1})->ranks[0].tensors[0].pieces;
  };
  EXPECT_EQ(pieces(2, 6), (std::vector<Piece>{{0, {{0, 1, 0}, {3, 3, 2}}, 0, {6, 2, 1}}}));
  EXPECT_EQ(pieces(1, 8).size(), 3u);
  EXPECT_EQ(pieces(1, 7).size(), 2u);
  EXPECT_EQ(pieces(4, 1).size(), 1u);
}

TEST(Split, IsOfEitherSideAndOnlyOfTensorsOfOneName) {
  CanonicalSpace a{{{"both", DType::kBF16, {4, 6}},
                    {"mine", DType::kBF16, {24}},
                    {"more", DType::kBF16, {4, 3, 2}},
                    {"other", DType::kBF16, {4, 6}}}};
  CanonicalSpace b{{{"both", DType::kF32, {4, 6}},
                    {"more", DType::kF32, {4, 6}},
                    {"other", DType::kF32, {6, 4}},
                    {"yours", DType::kF32, {2, 2}}}};
  const auto [of_a, of_b] = SplitsBetween(a, b);
  EXPECT_TRUE(of_a.empty());
  ASSERT_EQ(of_b.size(), 1u);
  EXPECT_EQ(of_b[0].tensor, 1u);
  EXPECT_EQ(of_b[0].shape, (Shape{4, 3, 2}));
  EXPECT_EQ(SplitsBetween(b, a).first.size(), 1u);
  b.tensors[1].block = {2, 2};  // what has blocks is a matrix
  EXPECT_TRUE(SplitsBetween(a, b).second.empty());
}

TEST(Split, SurvivesStridesOfUnitsThatNoProductFits) {
  ModelLayout model{{{{"t", DType::kBF16, {6, 2}}}}, {}};
  const int64_t huge = std::numeric_limits<int64_t>::max();
  model.ranks.push_back({{{"local", DType::kBF16, {2}, {{0, {{3, 0}, {1, 2}}, 0, {huge, 1}}}}}});
  ASSERT_TRUE(Validate(model).ok());
  const SplitTensor split{0, {3, 2, 2}, {2, 1}};
  const auto made = Split(model, {&split, 1});
  EXPECT_TRUE(Validate(*made).ok());
  EXPECT_EQ(made->ranks[0].tensors[0].pieces[0].box.begin, (std::vector<int64_t>{1, 1, 0}));
}

TEST(ElementsFingerprint, IsTheSameWhetherDimensionsAreSplitOrJoined) {
  const CanonicalSpace joined{{{"t", DType::kBF16, {4, 6}}}};
  CanonicalSpace other = joined;
  other.tensors[0].shape = {4, 3, 2};
  EXPECT_EQ(ElementsFingerprintOf(other), ElementsFingerprintOf(joined));
  EXPECT_NE(FingerprintOf(other), FingerprintOf(joined));
  other.tensors[0].shape = {4, 7};
  EXPECT_NE(ElementsFingerprintOf(other), ElementsFingerprintOf(joined));
  other = joined;
  other.tensors[0].dtype = DType::kF32;
  EXPECT_NE(ElementsFingerprintOf(other), ElementsFingerprintOf(joined));
  other = joined;
  other.tensors[0].name = "u";
  EXPECT_NE(ElementsFingerprintOf(other), ElementsFingerprintOf(joined));
}

}  // namespace
}  // namespace weightwire::layout
