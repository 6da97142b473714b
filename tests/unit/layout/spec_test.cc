#include <gtest/gtest.h>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

TEST(ParseParallelSpec, ReadsSizesAndOptions) {
  const auto spec = ParseParallelSpec("megatron:tp2,pp3,first=1,layers=7-7-6,te");
  ASSERT_TRUE(spec.has_value());
  EXPECT_EQ(spec->scheme, "megatron");
  EXPECT_EQ(spec->sizes, (std::map<std::string, int64_t>{{"tp", 2}, {"pp", 3}}));
  EXPECT_EQ(spec->options, (std::map<std::string, std::string>{
                               {"first", "1"}, {"layers", "7-7-6"}, {"te", "true"}}));
  EXPECT_EQ(spec->SizeOr("tp", 9), 2);
  EXPECT_EQ(spec->SizeOr("dp", 9), 9);
  EXPECT_EQ(ParseParallelSpec("hf")->scheme, "hf");
}

TEST(ParallelSpec, TextIsSortedAndParsesBack) {
  for (const char* text : {"hf", "megatron:tp2,pp2,first=1", "vllm:vocab_pad_to=64,dp3,tp4",
                           "x:b,a=true,c65536", "megatron:zz=!@#%-x,aa1"}) {
    const auto spec = ParseParallelSpec(text);
    ASSERT_TRUE(spec.has_value()) << text;
    const auto again = ParseParallelSpec(spec->ToString());
    ASSERT_TRUE(again.has_value()) << spec->ToString();
    EXPECT_EQ(again->scheme, spec->scheme);
    EXPECT_EQ(again->sizes, spec->sizes);
    EXPECT_EQ(again->options, spec->options);
  }
  EXPECT_EQ(ParseParallelSpec("megatron:tp2,pp4,first=1")->ToString(), "megatron:first=1,pp4,tp2");
}

TEST(ParseParallelSpec, RefusesWhatIsNotOfTheForm) {
  for (const char* text : {"",
                           ":",
                           ":tp2",
                           "megatron:",
                           "megatron:,",
                           "megatron:tp2,",
                           "megatron:,tp2",
                           "megatron:tp2,,pp2",
                           "megatron:tp0",
                           "megatron:tp65537",
                           "megatron:tp-1",
                           "megatron:tp99999999999999999999",
                           "megatron:2",
                           "megatron:2tp",
                           "megatron:tp2x",
                           "megatron:tp2,tp4",
                           "megatron:tp2,tp=4",
                           "megatron:first=1,first=2",
                           "megatron:=1",
                           "megatron:first=",
                           "megatron:first=1=2",
                           "megatron:first=a b",
                           "Megatron:tp2",
                           "megatron tp2",
                           "megatron:TP2",
                           "megatron:tp 2",
                           "megatron:tp2:pp2",
                           "megatron:f1=3"}) {
    const auto spec = ParseParallelSpec(text);
    ASSERT_FALSE(spec.has_value()) << text;
    EXPECT_EQ(spec.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(spec.error().reason(), Reason::kUnknownScheme);
  }
  EXPECT_FALSE(ParseParallelSpec("x:" + std::string(5'000, 'a')).has_value());
}

}  // namespace
}  // namespace weightwire::layout
