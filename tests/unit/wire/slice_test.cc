#include "server/wire/slice.h"

#include <gtest/gtest.h>

#include <functional>

#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

std::vector<v1::SlicePart> PartsOf(const plan::RankSlice& slice, size_t bytes_max,
                                   bool names_shared = false) {
  SliceWriter writer(std::make_shared<const plan::RankSlice>(slice), bytes_max, names_shared);
  std::vector<v1::SlicePart> parts;
  for (v1::SlicePart part; writer.Next(&part);) {
    v1::SlicePart copy;
    EXPECT_TRUE(copy.ParseFromString(part.SerializeAsString()));
    parts.push_back(copy);
  }
  return parts;
}

Result<plan::RankSlice> SliceOfParts(const std::vector<v1::SlicePart>& parts) {
  SliceReader reader;
  for (const v1::SlicePart& part : parts) WW_FAIL_IF_ERROR(reader.Add(part));
  return reader.Finish();
}

TEST(SliceWire, ComesBackEqualFromPartsOfEverySize) {
  const uint64_t seed = SeedFromEnvironment();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Dice dice(seed);
  for (int i = 0; i < 200; ++i) {
    const plan::RankSlice slice = RandomSlice(dice, 6, 60);
    const size_t bytes_max = 4'096 + dice.Below(8'192);
    const auto parts = PartsOf(slice, bytes_max, dice.Coin());
    for (const v1::SlicePart& part : parts) ASSERT_LE(part.ByteSizeLong(), bytes_max);
    auto back = SliceOfParts(parts);
    ASSERT_TRUE(back) << back.error().ToString();
    ASSERT_EQ(*back, slice) << "round " << i;
  }
}

TEST(SliceWire, PartsOfALargeSliceStayBelowOneMebibyte) {
  Dice dice(5);
  plan::RankSlice slice = RandomSlice(dice, 0, 1);
  slice.side = plan::Side::kTarget;
  plan::Stream stream{3, 0, slice.rank, 0, {}};
  for (int i = 0; i < 40'000; ++i) {
    stream.ops.push_back(
        {0, 1, 2, layout::DType::kF32, layout::DType::kF32, {5, 3}, 1, {9, 1}, i, {3, 1}});
    stream.bytes += 60;
  }
  slice.streams.push_back(stream);
  const auto parts = PartsOf(slice, kPartBytesMax);
  EXPECT_GT(parts.size(), 1u);
  for (const v1::SlicePart& part : parts) EXPECT_LE(part.ByteSizeLong(), kPartBytesMax);
  EXPECT_EQ(SliceOfParts(parts), slice);
}

TEST(SliceWire, EmptySliceIsOnePart) {
  plan::RankSlice slice;
  slice.rank = 3;
  const auto parts = PartsOf(slice, 4'096);
  EXPECT_EQ(parts.size(), 1u);
  EXPECT_EQ(SliceOfParts(parts), slice);
}

/// Names as models have them, some of more bytes than characters.
plan::RankSlice Named() {
  plan::RankSlice slice;
  for (int layer = 0; layer < 7; ++layer) {
    for (int expert = 0; expert < 13; ++expert) {
      slice.tensor_names.push_back("model.layers." + std::to_string(layer) + ".mlp.experts." +
                                   std::to_string(expert) + ".down_proj.weight");
    }
  }
  // é, è and ê differ in their second byte; what is left off ends before the first one.
  for (const char* name : {"\xC3\xA9", "\xC3\xA8t", "\xC3\xAA", "", "", "x", "xy", "x"}) {
    slice.tensor_names.emplace_back(name);
  }
  return slice;
}

TEST(SliceWire, NamesLeaveOffWhatTheyShareForThoseWhoUnderstand) {
  const plan::RankSlice slice = Named();
  const auto bytes = [&](bool shared) {
    size_t all = 0;
    for (const v1::SlicePart& part : PartsOf(slice, 4'096, shared)) {
      EXPECT_EQ(part.names_shared_size(), shared ? part.tensor_names_size() : 0);
      all += part.ByteSizeLong();
    }
    EXPECT_EQ(SliceOfParts(PartsOf(slice, 4'096, shared)), slice);
    return all;
  };
  EXPECT_GT(bytes(false), 13 * 7 * 40u);
  EXPECT_LT(bytes(true), 13 * 7 * 25u);
}

TEST(SliceWire, RefusesNamesThatShareWhatThereIsNot) {
  using Damage = std::function<void(v1::SlicePart&)>;
  const std::vector<std::pair<const char*, Damage>> damages = {
      {"the first one", [](auto& p) { p.set_names_shared(0, 1); }},
      {"more than there is",
       [](auto& p) { p.set_names_shared(1, static_cast<uint32_t>(p.tensor_names(0).size()) + 1); }},
      {"half a character", [](auto& p) { p.set_names_shared(p.names_shared_size() - 7, 1); }},
      {"fewer", [](auto& p) { p.mutable_names_shared()->RemoveLast(); }},
      {"too long",
       [](auto& p) {
         p.set_tensor_names(1, std::string(kNameBytesMax - p.names_shared(1) + 1, 'x'));
       }},
  };
  for (const auto& [name, damage] : damages) {
    auto parts = PartsOf(Named(), 1 << 20, true);
    ASSERT_EQ(parts.size(), 1u);
    damage(parts[0]);
    const auto back = SliceOfParts(parts);
    ASSERT_FALSE(back) << name;
    EXPECT_EQ(back.error().code(), Code::kInvalidArgument) << name;
  }
}

TEST(SliceWire, RefusesNamesThatGrowOutOfFewBytes) {
  SliceReader reader;
  v1::SlicePart part;
  part.mutable_header()->set_side(v1::SIDE_SOURCE);
  part.mutable_header()->set_name_count(kTensorsMax);
  part.add_tensor_names(std::string(kNameBytesMax, 'x'));
  part.add_names_shared(0);
  ASSERT_TRUE(reader.Add(part).ok());
  part.clear_header();
  part.set_tensor_names(0, "");
  part.set_names_shared(0, kNameBytesMax);
  for (int i = 1; i < 1'000; ++i) {
    part.add_tensor_names("");
    part.add_names_shared(kNameBytesMax);
  }
  Status status;
  int parts = 0;
  for (; status.ok() && parts < 1'000; ++parts) status = reader.Add(part);
  EXPECT_EQ(status.reason(), Reason::kMessageTooLarge);
  EXPECT_LE(static_cast<size_t>(parts) * 1'000 * kNameBytesMax,
            kSliceNameBytesMax + 1'000 * kNameBytesMax);
}

plan::RankSlice TwoStreams() {
  plan::RankSlice slice;
  slice.side = plan::Side::kSource;
  slice.rank = 4;
  slice.tensor_names = {"a", "b"};
  for (uint32_t id : {1u, 6u}) {
    plan::CopyOp op{1,      0, 0,     layout::DType::kBF16, layout::DType::kF32, {7, 5}, 2,
                    {5, 1}, 0, {5, 1}};
    slice.streams.push_back({id, 4, id, 280, {op, op}});
  }
  return slice;
}

TEST(SliceWire, RefusesEveryDamage) {
  using Damage = std::function<void(std::vector<v1::SlicePart>&)>;
  auto stream = [](auto change) {
    return [change](std::vector<v1::SlicePart>& p) { change(p[0].mutable_streams(0)); };
  };
  auto op = [](auto change) {
    return [change](std::vector<v1::SlicePart>& p) {
      change(p[0].mutable_streams(0)->mutable_ops(0));
    };
  };
  const std::vector<std::pair<const char*, Damage>> damages = {
      {"no header", [](auto& p) { p[0].clear_header(); }},
      {"header twice", [](auto& p) { p.push_back(p[0]); }},
      {"side", [](auto& p) { p[0].mutable_header()->set_side(v1::SIDE_UNSPECIFIED); }},
      {"too few streams", [](auto& p) { p[0].mutable_streams()->RemoveLast(); }},
      {"too many streams", [](auto& p) { p[0].mutable_header()->set_stream_count(1); }},
      {"huge stream count", [](auto& p) { p[0].mutable_header()->set_stream_count(1u << 31); }},
      {"too few names", [](auto& p) { p[0].mutable_tensor_names()->RemoveLast(); }},
      {"too many names", [](auto& p) { p[0].add_tensor_names(std::string(1, 'c')); }},
      {"streams out of order", [](auto& p) { p[0].mutable_streams()->SwapElements(0, 1); }},
      {"stream of another rank", stream([](auto* s) { s->set_source_rank(5); })},
      {"too few ops", stream([](auto* s) { s->mutable_ops()->RemoveLast(); })},
      {"too many ops", stream([](auto* s) { s->set_op_count(1); })},
      {"no op", stream([](auto* s) {
         s->clear_ops();
         s->set_op_count(0);
         s->set_bytes(0);
       })},
      {"bytes", stream([](auto* s) { s->set_bytes(281); })},
      {"canonical", op([](auto* o) { o->set_canonical(2); })},
      {"dtype", op([](auto* o) { o->set_source_dtype(v1::DTYPE_UNSPECIFIED); })},
      {"makes", op([](auto* o) { o->set_makes(static_cast<v1::Makes>(9)); })},
      {"codes without blocks", op([](auto* o) { o->set_makes(v1::MAKES_CODES); })},
      {"many extents of a block", op([](auto* o) { o->mutable_block()->Resize(9, 1); })},
      {"a block of nothing", op([](auto* o) { o->mutable_block()->Resize(2, 0); })},
      {"extents at the source", op([](auto* o) { o->mutable_source_extent()->Resize(2, 1); })},
      {"extent 0", op([](auto* o) { o->set_extent(0, 0); })},
      {"extent lists", op([](auto* o) { o->mutable_source_stride()->RemoveLast(); })},
      {"stride 0", op([](auto* o) { o->set_target_stride(1, 0); })},
      {"negative offset", op([](auto* o) { o->set_source_offset(-1); })},
      {"reach", op([](auto* o) { o->set_source_stride(0, INT64_MAX); })},
      {"offset reach", op([](auto* o) { o->set_target_offset(INT64_MAX); })},
      {"bytes overflow", op([](auto* o) {
         o->set_extent(0, int64_t{1} << 40);
         o->set_extent(1, int64_t{1} << 40);
         o->set_source_stride(0, 1);
         o->set_target_stride(0, 1);
       })},
      {"nothing", [](auto& p) { p.clear(); }},
  };
  ASSERT_TRUE(SliceOfParts(PartsOf(TwoStreams(), 4'096)));
  for (const auto& [name, damage] : damages) {
    auto parts = PartsOf(TwoStreams(), 4'096);
    damage(parts);
    auto back = SliceOfParts(parts);
    ASSERT_FALSE(back) << name;
    EXPECT_EQ(back.error().code(), Code::kInvalidArgument) << name;
  }
}

/// Two streams, and codes and scales of what they gather.
plan::RankSlice Gathering() {
  plan::RankSlice slice = TwoStreams();
  slice.side = plan::Side::kTarget;
  for (plan::Stream& stream : slice.streams) std::swap(stream.source_rank, stream.target_rank);
  plan::CopyOp codes{0,      2, 0,     layout::DType::kF32, layout::DType::kF8E4M3, {7, 5}, 0,
                     {5, 1}, 0, {5, 1}};
  codes.transform = plan::Transform::kCodes;
  codes.block = {4, 4};
  plan::CopyOp scales = codes;
  scales.transform = plan::Transform::kScales;
  scales.target_dtype = layout::DType::kF32;
  scales.source_extent = {7, 5};
  scales.extent = {2, 2};
  slice.gathered = {layout::DType::kF32, 35, {codes, scales}};
  return slice;
}

TEST(SliceWire, RefusesEveryDamageOfWhatIsGathered) {
  using Damage = std::function<void(std::vector<v1::SlicePart>&)>;
  const std::vector<std::pair<const char*, Damage>> damages = {
      {"no elements", [](auto& p) { p[0].mutable_header()->set_gathered_elements(0); }},
      {"negative", [](auto& p) { p[0].mutable_header()->set_gathered_elements(-1); }},
      {"dtype", [](auto& p) { p[0].mutable_header()->set_gathered_dtype(v1::DTYPE_UNSPECIFIED); }},
      {"a source",
       [](auto& p) {
         p[0].mutable_header()->set_side(v1::SIDE_SOURCE);
         for (auto& stream : *p[0].mutable_streams()) stream.set_source_rank(4);
       }},
      {"nothing made",
       [](auto& p) {
         p[0].mutable_header()->set_made_count(0);
         p[0].clear_made();
       }},
      {"too few made", [](auto& p) { p[0].mutable_made()->RemoveLast(); }},
      {"too many made", [](auto& p) { p[0].mutable_header()->set_made_count(1); }},
      {"elements made", [](auto& p) { p[0].mutable_made(0)->set_makes(v1::MAKES_ELEMENTS); }},
      {"dtype of codes", [](auto& p) { p[0].mutable_made(0)->set_target_dtype(v1::DTYPE_BF16); }},
      {"reach", [](auto& p) { p[0].mutable_made(0)->set_source_stride(0, INT64_MAX); }},
      {"before the streams",
       [](auto& p) {
         p.push_back(p[0]);
         p[1].clear_header();
         p[1].clear_tensor_names();
         p[1].clear_made();
         p[0].clear_streams();
       }},
      {"inside a stream", [](auto& p) { p[0].mutable_streams(1)->mutable_ops()->RemoveLast(); }},
  };
  ASSERT_EQ(SliceOfParts(PartsOf(Gathering(), 4'096)), Gathering());
  for (const auto& [name, damage] : damages) {
    auto parts = PartsOf(Gathering(), 4'096);
    damage(parts);
    auto back = SliceOfParts(parts);
    ASSERT_FALSE(back) << name;
    EXPECT_EQ(back.error().code(), Code::kInvalidArgument) << name;
  }
}

TEST(SliceWire, StaysFailed) {
  SliceReader reader;
  EXPECT_FALSE(reader.Add(v1::SlicePart()).ok());
  EXPECT_FALSE(reader.Add(PartsOf(TwoStreams(), 4'096)[0]).ok());
  EXPECT_FALSE(reader.Finish());
}

}  // namespace
}  // namespace weightwire::wire
