#include "server/content/identity.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weightwire::content {
namespace {

using layout::DType;

std::vector<Leaf> Leaves() {
  std::vector<Leaf> leaves;
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    leaves.push_back({{name, DType::kBF16, {4, 6}}, {{leaves.size() + 1, 7}}});
  }
  return leaves;
}

TEST(Root, IsOfEachLeafsNameDtypeElementsAndBothLanes) {
  const std::vector<Leaf> leaves = Leaves();
  const layout::Fingerprint root = RootOf(leaves);
  EXPECT_EQ(RootOf(leaves), root);
  const auto differs = [&](auto change) {
    for (size_t i = 0; i < leaves.size(); ++i) {
      std::vector<Leaf> changed = leaves;
      change(changed[i]);
      EXPECT_NE(RootOf(changed), root) << i;
    }
  };
  differs([](Leaf& leaf) { leaf.tensor.name += "x"; });
  differs([](Leaf& leaf) { leaf.tensor.dtype = DType::kF16; });
  differs([](Leaf& leaf) { leaf.tensor.shape = {4, 7}; });
  differs([](Leaf& leaf) { leaf.sum.lane[0] ^= 1; });
  differs([](Leaf& leaf) { leaf.sum.lane[1] ^= uint64_t{1} << 63; });
}

TEST(Root, AndClassAreTheSameWhetherDimensionsAreSplitOrJoined) {
  const std::vector<Leaf> leaves = Leaves();
  std::vector<Leaf> split = leaves;
  split[1].tensor.shape = {4, 3, 2};
  split[3].tensor.shape = {24};
  EXPECT_EQ(RootOf(split), RootOf(leaves));
  EXPECT_EQ(ClassOf(split), ClassOf(leaves));
}

TEST(Root, OfOneLeafMoreOrLessIsAnotherOne) {
  const std::vector<Leaf> leaves = Leaves();
  std::vector<layout::Fingerprint> roots;
  for (size_t count = 0; count <= leaves.size(); ++count) {
    roots.push_back(RootOf(std::span(leaves).first(count)));
  }
  std::sort(roots.begin(), roots.end());
  EXPECT_EQ(std::unique(roots.begin(), roots.end()), roots.end());
}

TEST(Class, IsOfEverythingButTheSums) {
  std::vector<Leaf> leaves = Leaves();
  const layout::Fingerprint before = ClassOf(leaves);
  leaves[2].sum.lane[0] += 5;
  EXPECT_EQ(ClassOf(leaves), before);
  leaves[2].tensor.dtype = DType::kF8E4M3;
  EXPECT_NE(ClassOf(leaves), before);
}

TEST(Seed, IsTheNamesAlone) {
  EXPECT_EQ(SeedOf("abc").lane[0], SeedOf("abc").lane[0]);
  EXPECT_NE(SeedOf("abc").lane[0], SeedOf("abc").lane[1]);
  EXPECT_NE(SeedOf("abc").lane[0], SeedOf("abd").lane[0]);
  EXPECT_NE(SeedOf("12345678").lane[1], SeedOf("123456780").lane[1]);
}

}  // namespace
}  // namespace weightwire::content
