#include <gtest/gtest.h>
#include <xxhash.h>

#include <functional>
#include <limits>

#include "server/layout/torch_dtype.h"
#include "server/layout/types.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(DType, NamesAndNumbersGoBothWays) {
  for (int number = 1; number <= 15; ++number) {
    const auto dtype = DTypeFromNumber(number);
    ASSERT_TRUE(dtype.has_value());
    EXPECT_EQ(DTypeFromName(DTypeName(*dtype)), dtype);
  }
  EXPECT_FALSE(DTypeFromNumber(0));
  EXPECT_FALSE(DTypeFromNumber(16));
  EXPECT_FALSE(DTypeFromName("bf16"));
  EXPECT_EQ(DTypeFromName("F8_E4M3"), DType::kF8E4M3);
  EXPECT_EQ(DTypeFromTorchName("float8_e4m3fn"), DType::kF8E4M3);
  EXPECT_FALSE(DTypeFromTorchName("BF16"));
}

TEST(DType, HasTheBytesOfItsName) {
  EXPECT_EQ(ElementBytes(DType::kBF16), 2);
  EXPECT_EQ(ElementBytes(DType::kF32), 4);
  EXPECT_EQ(ElementBytes(DType::kI64), 8);
  EXPECT_EQ(ElementBytes(DType::kBool), 1);
  EXPECT_EQ(ElementBytes(DType::kF8E5M2), 1);
}

TEST(Box, IntersectIsTheCommonBlock) {
  const Box a{{0, 3}, {5, 4}};
  const auto common = Intersect(a, {{4, 0}, {9, 5}});
  ASSERT_TRUE(common.has_value());
  EXPECT_EQ(*common, (Box{{4, 3}, {1, 2}}));
  EXPECT_EQ(ElementCount(*common), 2);
  EXPECT_FALSE(Intersect(a, {{5, 0}, {1, 9}}));
  EXPECT_TRUE(Intersect(Box{}, Box{}).has_value());
  EXPECT_EQ(ElementCount(Box{}), 1);
}

TEST(StorageBytes, IsEmptyWhenItDoesNotFit) {
  EXPECT_EQ(StorageBytes(DType::kF32, Shape{3, 5}), 60);
  EXPECT_EQ(StorageBytes(DType::kF32, Shape{}), 4);
  EXPECT_EQ(StorageBytes(DType::kU8, Shape{kHuge}), kHuge);
  EXPECT_FALSE(StorageBytes(DType::kBF16, Shape{kHuge}));
  EXPECT_FALSE(StorageBytes(DType::kU8, Shape{kHuge, 2}));
  EXPECT_FALSE(StorageBytes(DType::kU8, Shape{-1}));
}

TEST(CanonicalSpace, FindsByName) {
  const CanonicalSpace space{{{"a", DType::kBF16, {1}}, {"c", DType::kBF16, {1}}}};
  EXPECT_EQ(space.Find("c"), 1u);
  EXPECT_FALSE(space.Find("b"));
  EXPECT_FALSE(space.Find("d"));
  EXPECT_FALSE(CanonicalSpace{}.Find("a"));
}

/// One rank with a fused tensor of two pieces, and a scalar.
ModelLayout Sample() {
  ModelLayout layout;
  layout.canonical.tensors = {
      {"k", DType::kBF16, {4, 6}}, {"q", DType::kBF16, {8, 6}}, {"s", DType::kF32, {}}};
  LocalTensor fused{"qk", DType::kBF16, {6, 6}, {}};
  fused.pieces.push_back({1, {{0, 0}, {4, 6}}, 0, {6, 1}});
  fused.pieces.push_back({0, {{0, 0}, {2, 6}}, 24, {6, 1}});
  layout.ranks.push_back({{fused, {"s", DType::kF32, {}, {{2, {{}, {}}, 0, {}}}}}});
  return layout;
}

struct BadLayout {
  const char* what;
  Reason reason;
  std::function<void(ModelLayout&)> spoil;
};

Piece& FirstPiece(ModelLayout& layout) { return layout.ranks[0].tensors[0].pieces[0]; }

TEST(Validate, AcceptsTheSample) { EXPECT_EQ(Validate(Sample()), OkStatus()); }

TEST(Validate, RefusesWhatIsWrong) {
  const std::vector<BadLayout> table = {
      {"canonical overflow", Reason::kShapeOverflow,
       [](ModelLayout& l) {
         l.canonical.tensors[0].shape = {kHuge, 6};
       }},
      {"canonical byte overflow", Reason::kShapeOverflow,
       [](ModelLayout& l) { l.canonical.tensors[0].shape = {kHuge}; }},
      {"local overflow", Reason::kShapeOverflow,
       [](ModelLayout& l) {
         l.ranks[0].tensors[0].shape = {kHuge, kHuge};
       }},
      {"canonical ndim over 8", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.canonical.tensors[0].shape = Shape(9, 1); }},
      {"local ndim over 8", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.ranks[0].tensors[0].shape = Shape(9, 2); }},
      {"negative local extent", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         l.ranks[0].tensors[0].shape = {-6, -6};
       }},
      {"negative canonical extent", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.canonical.tensors[0].shape[0] = -1; }},
      {"canonical names unsorted", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.canonical.tensors[0].name = "z"; }},
      {"canonical name twice", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.canonical.tensors[0].name = "q"; }},
      {"canonical name empty", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.canonical.tensors[0].name = ""; }},
      {"local name empty", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.ranks[0].tensors[0].name = ""; }},
      {"local name twice", Reason::kInvalidRequest,
       [](ModelLayout& l) { l.ranks[0].tensors[0].name = "s"; }},
      {"name too long", Reason::kLimitExceeded,
       [](ModelLayout& l) { l.ranks[0].tensors[0].name = std::string(1'025, 'x'); }},
      {"box ndim", Reason::kInvalidRequest, [](ModelLayout& l) { FirstPiece(l).box.begin = {0}; }},
      {"extent ndim", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         FirstPiece(l).box.extent = {4, 6, 1};
       }},
      {"stride ndim", Reason::kInvalidRequest,
       [](ModelLayout& l) { FirstPiece(l).local_stride = {6}; }},
      {"stride zero", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         FirstPiece(l).local_stride = {6, 0};
       }},
      {"stride negative", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         FirstPiece(l).local_stride = {-6, 1};
       }},
      {"box empty", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         FirstPiece(l).box.extent = {0, 6};
       }},
      {"box extent negative", Reason::kInvalidRequest,
       [](ModelLayout& l) {
         FirstPiece(l).box.extent = {-1, 6};
       }},
      {"unknown canonical tensor", Reason::kTensorMissing,
       [](ModelLayout& l) { FirstPiece(l).tensor = 3; }},
      {"box begins before its tensor", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         FirstPiece(l).box.begin = {-1, 0};
       }},
      {"box leaves its tensor", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         FirstPiece(l).box.begin = {5, 0};
       }},
      {"box end overflows", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         FirstPiece(l).box.begin = {kHuge, 0};
       }},
      {"box extent huge", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         FirstPiece(l).box.extent = {kHuge, 6};
       }},
      {"offset negative", Reason::kShapeMismatch,
       [](ModelLayout& l) { FirstPiece(l).local_offset = -1; }},
      {"offset overflows", Reason::kShapeMismatch,
       [](ModelLayout& l) { FirstPiece(l).local_offset = kHuge; }},
      {"leaves storage by one", Reason::kShapeMismatch,
       [](ModelLayout& l) { l.ranks[0].tensors[0].pieces[1].local_offset = 25; }},
      {"stride overflows", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         FirstPiece(l).local_stride = {kHuge, 1};
       }},
      {"no storage", Reason::kShapeMismatch,
       [](ModelLayout& l) {
         l.ranks[0].tensors[0].shape = {0, 6};
       }},
      {"overlap by one element", Reason::kOverlappingShards,
       [](ModelLayout& l) { l.ranks[0].tensors[0].pieces[1].local_offset = 23; }},
      {"piece overlaps itself", Reason::kOverlappingShards,
       [](ModelLayout& l) {
         FirstPiece(l).local_stride = {5, 1};
       }},
  };
  for (const BadLayout& row : table) {
    SCOPED_TRACE(row.what);
    ModelLayout layout = Sample();
    row.spoil(layout);
    const Status status = Validate(layout);
    EXPECT_EQ(status.reason(), row.reason) << status.ToString();
    EXPECT_EQ(status.code(), row.reason == Reason::kLimitExceeded ? Code::kResourceExhausted
                                                                  : Code::kInvalidArgument);
  }
}

TEST(Validate, NamesRankAndTensor) {
  ModelLayout layout = Sample();
  layout.ranks.push_back(layout.ranks[0]);
  layout.ranks[1].tensors[0].pieces[0].local_offset = -1;
  const Status status = Validate(layout);
  EXPECT_EQ(status.rank(), "rank 1");
  EXPECT_EQ(status.tensor(), "qk");
}

TEST(Validate, HoldsEveryLimit) {
  const std::vector<std::function<void(LayoutLimits&)>> table = {
      [](LayoutLimits& limits) { limits.canonical_tensors_max = 2; },
      [](LayoutLimits& limits) { limits.local_tensors_per_rank_max = 1; },
      [](LayoutLimits& limits) { limits.pieces_per_rank_max = 2; },
      [](LayoutLimits& limits) { limits.ranks_max = 0; },
      [](LayoutLimits& limits) { limits.name_bytes_max = 1; },
  };
  for (const auto& tighten : table) {
    LayoutLimits limits;
    tighten(limits);
    const Status status = Validate(Sample(), limits);
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.reason(), Reason::kLimitExceeded);
  }
}

/// The digest's input, spelled out again.
class Bytes {
 public:
  Bytes& Word(uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) text_ += static_cast<char>(value & 0xff);
    return *this;
  }
  Bytes& Text(const std::string& text) {
    Word(text.size());
    text_ += text;
    return *this;
  }
  Bytes& List(const std::vector<uint64_t>& values) {
    Word(values.size());
    for (uint64_t value : values) Word(value);
    return *this;
  }
  Fingerprint Digest() const {
    const XXH128_hash_t hash = XXH3_128bits(text_.data(), text_.size());
    return {hash.high64, hash.low64};
  }

 private:
  std::string text_;
};

TEST(Fingerprint, IsTheDigestOfTheStatedBytes) {
  Bytes bytes;
  bytes.Text("weightwire.layout.v1").Word(3);
  bytes.Text("k").Word(1).List({4, 6});
  bytes.Text("q").Word(1).List({8, 6});
  bytes.Text("s").Word(3).List({});
  bytes.Word(1).Word(2);
  bytes.Text("qk").Word(1).List({6, 6}).Word(2);
  bytes.Word(1).List({0, 0}).List({4, 6}).Word(0).List({6, 1});
  bytes.Word(0).List({0, 0}).List({2, 6}).Word(24).List({6, 1});
  bytes.Text("s").Word(3).List({}).Word(1);
  bytes.Word(2).List({}).List({}).Word(0).List({});
  EXPECT_EQ(FingerprintOf(Sample()), bytes.Digest());
  EXPECT_EQ(FingerprintOf(Sample()).ToHex().size(), 32u);
}

TEST(Fingerprint, ChangesWithEachField) {
  const std::vector<std::function<void(ModelLayout&)>> table = {
      [](ModelLayout& l) { l.canonical.tensors[0].name = "j"; },
      [](ModelLayout& l) { l.canonical.tensors[0].dtype = DType::kF16; },
      [](ModelLayout& l) {
        l.canonical.tensors[0].shape = {6, 4};
      },
      [](ModelLayout& l) { l.ranks.emplace_back(); },
      [](ModelLayout& l) { l.ranks[0].tensors[0].name = "kq"; },
      [](ModelLayout& l) { l.ranks[0].tensors[0].dtype = DType::kF16; },
      [](ModelLayout& l) { l.ranks[0].tensors[0].shape = {36}; },
      [](ModelLayout& l) { FirstPiece(l).tensor = 0; },
      [](ModelLayout& l) { FirstPiece(l).box.begin[0] = 1; },
      [](ModelLayout& l) { FirstPiece(l).box.extent[0] = 3; },
      [](ModelLayout& l) { FirstPiece(l).local_offset = 1; },
      [](ModelLayout& l) {
        FirstPiece(l).local_stride = {1, 6};
      },
      [](ModelLayout& l) { std::swap(l.ranks[0].tensors[0], l.ranks[0].tensors[1]); },
  };
  for (size_t i = 0; i < table.size(); ++i) {
    ModelLayout layout = Sample();
    table[i](layout);
    EXPECT_NE(FingerprintOf(layout), FingerprintOf(Sample())) << "row " << i;
  }
  EXPECT_NE(FingerprintOf(ModelLayout{}), FingerprintOf(CanonicalSpace{}));
}

}  // namespace
}  // namespace weightwire::layout
