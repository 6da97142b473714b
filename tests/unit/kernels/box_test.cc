#include <gtest/gtest.h>

#include <vector>

#include "kernels/kernels.h"

namespace weightwire::kernels {
namespace {

StridedBox Box(std::vector<int64_t> extent, std::vector<int64_t> source,
               std::vector<int64_t> target) {
  StridedBox box;
  for (size_t d = 0; d < extent.size(); ++d) {
    box.extent[d] = extent[d];
    box.source_stride[d] = source[d];
    box.target_stride[d] = target[d];
  }
  box.ndim = static_cast<int>(extent.size());
  return box;
}

std::vector<int64_t> Extents(const StridedBox& box) { return {box.extent, box.extent + box.ndim}; }

TEST(Normalize, MergesWhatIsContiguousOnBothSides) {
  StridedBox merged = Normalize(Box({3, 5, 7}, {35, 7, 1}, {35, 7, 1}));
  EXPECT_EQ(Extents(merged), std::vector<int64_t>({105}));
  EXPECT_EQ(merged.source_stride[0], 1);
  EXPECT_EQ(merged.target_stride[0], 1);
}

TEST(Normalize, KeepsAGapOfEitherSide) {
  EXPECT_EQ(Extents(Normalize(Box({3, 5}, {6, 1}, {5, 1}))), std::vector<int64_t>({3, 5}));
  EXPECT_EQ(Extents(Normalize(Box({3, 5}, {5, 1}, {6, 1}))), std::vector<int64_t>({3, 5}));
}

TEST(Normalize, MergesRowsWithEqualGaps) {
  StridedBox merged = Normalize(Box({3, 5, 7}, {50, 10, 1}, {45, 9, 1}));
  EXPECT_EQ(Extents(merged), std::vector<int64_t>({15, 7}));
  EXPECT_EQ(merged.source_stride[0], 10);
  EXPECT_EQ(merged.target_stride[0], 9);
}

TEST(Normalize, DropsExtentsOfOneWhateverTheirStrides) {
  EXPECT_EQ(Extents(Normalize(Box({1, 4, 1, 6, 1}, {999, 6, 7, 1, 3}, {0, 6, 5, 1, 8}))),
            std::vector<int64_t>({24}));
}

TEST(Normalize, MakesOneElementOfNoDimensions) {
  EXPECT_EQ(Normalize(Box({}, {}, {})).ndim, 0);
  EXPECT_EQ(Normalize(Box({1, 1}, {5, 1}, {1, 1})).ndim, 0);
}

TEST(Normalize, KeepsATranspose) {
  EXPECT_EQ(Extents(Normalize(Box({3, 5}, {1, 3}, {5, 1}))), std::vector<int64_t>({3, 5}));
}

TEST(RunBytes, SpeaksOfEachSideAlone) {
  StridedBox box = Box({3, 5}, {1, 3}, {7, 1});
  EXPECT_EQ(SourceRunBytes(box, 2), 2);
  EXPECT_EQ(TargetRunBytes(box, 2), 10);
}

TEST(RunBytes, IsOneElementWithoutDimensions) {
  EXPECT_EQ(SourceRunBytes(StridedBox{}, 4), 4);
  EXPECT_EQ(TargetRunBytes(StridedBox{}, 4), 4);
}

TEST(CastKnown, AllowsFloatCastsAndCopiesOfEqualSize) {
  EXPECT_TRUE(CastKnown(Element::kBF16, Element::kF16));
  EXPECT_TRUE(CastKnown(Element::kF32, Element::kBF16));
  EXPECT_TRUE(CastKnown(Element::kOpaque8, Element::kOpaque8));
  EXPECT_TRUE(CastKnown(Element::kOpaque2, Element::kBF16));
}

TEST(CastKnown, RefusesToResizeWhatIsOpaque) {
  EXPECT_FALSE(CastKnown(Element::kOpaque2, Element::kF32));
  EXPECT_FALSE(CastKnown(Element::kOpaque4, Element::kOpaque8));
  EXPECT_FALSE(CastKnown(Element::kBF16, Element::kOpaque1));
}

TEST(CopyDeathTest, AbortsOnAnUnknownCast) {
  char source[8] = {};
  char target[8];
  EXPECT_DEATH(Copy(target, source, StridedBox{}, Element::kOpaque2, Element::kF32), "no cast");
}

}  // namespace
}  // namespace weightwire::kernels
