// Whoever describes a model, by its scheme, by boxes as transformers holds the tensors, or by what
// a loader was seen to do, joins whoever describes it otherwise; and every element arrives where
// the target's own description has it. For every family and every listing of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "server/coordinator/work.h"
#include "server/layout/families/family.h"
#include "server/layout/schemes/flat.h"
#include "tests/support/plan_run.h"

namespace weightwire::coordinator {
namespace {

using layout::CanonicalSpace;
using layout::ModelLayout;
using layout::Shape;

std::string Folder() {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  return std::string(root == nullptr ? "." : root) + "/tests/data/transformers";
}

/// What transformers saves of a model.
struct Listing {
  std::string name;
  nlohmann::json config;
  CanonicalSpace tensors;
};

std::vector<Listing> Listings() {
  std::vector<Listing> listings;
  for (const auto& file : std::filesystem::directory_iterator(Folder())) {
    const auto json = nlohmann::json::parse(std::ifstream(file.path()));
    Listing listing{file.path().stem(), json.at("config"), {}};
    // transformers saves no MTP layers.
    for (nlohmann::json* level : {&listing.config, &listing.config["text_config"]}) {
      if (level->contains("num_nextn_predict_layers")) (*level)["num_nextn_predict_layers"] = 0;
    }
    if (listing.config["text_config"].is_null()) listing.config.erase("text_config");
    for (const auto& [name, spec] : json.at("tensors").items()) {
      listing.tensors.tensors.push_back(
          {name, *layout::DTypeFromName(spec[0].get<std::string>()), spec[1].get<Shape>()});
    }
    std::ranges::sort(listing.tensors.tensors, {}, &layout::TensorSpec::name);
    listings.push_back(std::move(listing));
  }
  std::ranges::sort(listings, {}, &Listing::name);
  return listings;
}

Result<AgreedLayoutPtr> Group(const std::vector<control::LayoutSubmission>& ranks,
                              const SchemeLayout& scheme) {
  const Work work;
  std::shared_ptr<const CanonicalSpace> canonical;
  std::vector<std::shared_ptr<const layout::RankLayout>> layouts;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    WW_ASSIGN(RankOffer offer,
              work.Offer(ranks[rank], scheme, rank, static_cast<uint32_t>(ranks.size())));
    WW_CHECK(canonical == nullptr || *canonical == *offer.canonical);
    canonical = offer.canonical;
    layouts.push_back(offer.layout);
  }
  return work.Assemble(*canonical, layouts);
}

Result<AgreedLayoutPtr> ByBoxes(const Listing& listing) {
  control::LayoutSubmission submission;
  submission.canonical = listing.tensors;
  submission.layout.emplace();
  for (uint32_t t = 0; t < listing.tensors.tensors.size(); ++t) {
    const layout::TensorSpec& spec = listing.tensors.tensors[t];
    submission.layout->tensors.push_back(
        {spec.name,
         spec.dtype,
         spec.shape,
         {{t, {Shape(spec.shape.size(), 0), spec.shape}, 0, layout::RowMajorStrides(spec.shape)}}});
  }
  return Group({submission}, {});
}

Result<AgreedLayoutPtr> ByScheme(const Listing& listing, const std::string& spec) {
  WW_ASSIGN(const SchemeLayout scheme, Work().Scheme(listing.config.dump(), spec));
  std::vector<control::LayoutSubmission> ranks;
  for (const layout::RankLayout& rank : scheme.model->ranks) {
    control::LayoutSubmission& submission = ranks.emplace_back();
    submission.spec = spec;
    for (const auto& tensor : rank.tensors) {
      submission.observed.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
  }
  return Group(ranks, scheme);
}

/// Two ranks of an engine whose loader gives each the half of every tensor along its last dimension
/// of an even size, and the whole of others.
std::vector<control::LayoutSubmission> Recorded(const Listing& listing) {
  std::vector<control::LayoutSubmission> ranks(2);
  for (int64_t rank = 0; rank < 2; ++rank) {
    control::LayoutSubmission& submission = ranks[static_cast<size_t>(rank)];
    submission.config_json = listing.config.dump();
    for (const layout::TensorSpec& spec : listing.tensors.tensors) {
      layout::TraceRow row{spec.name, {}, "engine." + spec.name, 0, spec.shape, {}, spec.dtype};
      for (size_t d = spec.shape.size(); d-- > 0;) {
        if (spec.shape[d] % 2 != 0) continue;
        row.shape[d] /= 2;
        row.ops = {{"narrow", {static_cast<int64_t>(d), rank * row.shape[d], row.shape[d]}}};
        break;
      }
      row.stride = layout::RowMajorStrides(row.shape);
      submission.observed.push_back({row.param, row.dtype, row.shape});
      submission.trace.push_back(std::move(row));
    }
  }
  return ranks;
}

Result<AgreedLayoutPtr> ByTrace(const Listing& listing) {
  WW_ASSIGN(const SchemeLayout scheme, Work().Scheme(listing.config.dump(), "hf"));
  return Group(Recorded(listing), scheme);
}

/// As a model that no family describes.
Result<AgreedLayoutPtr> ByTraceAlone(const Listing& listing) {
  std::vector<control::LayoutSubmission> ranks = Recorded(listing);
  for (control::LayoutSubmission& rank : ranks) {
    for (const layout::TensorSpec& spec : listing.tensors.tensors) {
      rank.checkpoint.push_back({spec.name, spec.dtype, spec.shape});
    }
  }
  return Group(ranks, {});
}

/// Calls visit(value, local element) for what a piece holds. The value tells the tensor's name and
/// the element's place in row-major order, whatever the shape.
void ForEachElement(const CanonicalSpace& canonical, const layout::Piece& piece,
                    const auto& visit) {
  const layout::TensorSpec& spec = canonical.tensors[piece.tensor];
  const Shape strides = layout::RowMajorStrides(spec.shape);
  const uint64_t name = std::hash<std::string>()(spec.name) << 24;
  testing::ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
    const size_t first = testing::StridedAt(0, strides, piece.box.begin);
    visit(name + first + testing::StridedAt(0, strides, index),
          testing::StridedAt(piece.local_offset, piece.local_stride, index));
  });
}

testing::Memory Filled(const ModelLayout& model) {
  testing::Memory memory = testing::EmptyMemory(model);
  for (size_t rank = 0; rank < model.ranks.size(); ++rank) {
    for (size_t t = 0; t < model.ranks[rank].tensors.size(); ++t) {
      for (const layout::Piece& piece : model.ranks[rank].tensors[t].pieces) {
        ForEachElement(model.canonical, piece,
                       [&](uint64_t value, size_t at) { memory[rank][t].at(at) = value; });
      }
    }
  }
  return memory;
}

void ExpectArrives(const AgreedLayoutPtr& source, const AgreedLayoutPtr& target,
                   const std::string& what) {
  const auto pair = Work().Plan(source, target);
  ASSERT_TRUE(pair.has_value()) << what << ": " << pair.error().ToString();
  testing::Memory arrived = testing::EmptyMemory(target->model);
  EXPECT_EQ(testing::RunPlan(*(*pair)->plan, Filled(source->model), arrived), 0) << what;
  EXPECT_TRUE(arrived == Filled(target->model)) << what << ": elements are not where they belong";
}

// Sanitizers make it slower by an order of magnitude: one listing of a family there, from boxes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kAll = false;
#else
constexpr bool kAll = true;
#endif

TEST(Joins, EveryFamilyBySchemeByTraceAndByBoxes) {
  std::set<std::string> missing;
  for (const layout::Family& family : layout::Families()) missing.emplace(family.model_type);
  size_t plans = 0;
  size_t cuts_blocks = 0;
  std::set<std::string> undescribed;
  for (const Listing& listing : Listings()) {
    if (!kAll && !listing.name.ends_with("-plain")) continue;
    missing.erase(listing.config.at("model_type").get<std::string>());
    std::map<std::string, Result<AgreedLayoutPtr>> trainers, engines;
    trainers.emplace("boxes", ByBoxes(listing));
    if (kAll) {
      trainers.emplace("hf", ByScheme(listing, "hf"));
      trainers.emplace("fsdp:dp2", ByScheme(listing, "fsdp:dp2"));
    }
    engines.emplace("trace", ByTrace(listing));
    engines.emplace("trace alone", ByTraceAlone(listing));
    for (const char* spec : {"hf", "vllm:tp2", "sglang:tp2"}) {
      auto engine = ByScheme(listing, spec);
      if (!engine && listing.config.contains("quantization_config")) {
        EXPECT_EQ(engine.error().reason(), Reason::kShapeMismatch) << engine.error().ToString();
        ++cuts_blocks;  // as engines do, it refuses to cut through blocks that share one scale
        continue;
      }
      if (!engine && (engine.error().reason() == Reason::kUnknownModel ||
                      engine.error().reason() == Reason::kUnknownScheme)) {
        undescribed.insert(listing.config.at("model_type").get<std::string>() + " " + spec);
        continue;  // by name; such an engine joins by its trace
      }
      engines.emplace(spec, std::move(engine));
    }
    for (const auto& [by, trainer] : trainers) {
      ASSERT_TRUE(trainer.has_value()) << listing.name << " " << by << trainer.error().ToString();
      for (const auto& [to, engine] : engines) {
        ASSERT_TRUE(engine.has_value()) << listing.name << " " << to << engine.error().ToString();
        ExpectArrives(*trainer, *engine, listing.name + ": " + by + " -> " + to);
        ++plans;
      }
    }
    ExpectArrives(*engines.at("trace"), *engines.at("hf"), listing.name + ": a fill");
    ExpectArrives(*engines.at("trace alone"), *engines.at("trace"), listing.name + ": a fill");
  }
  if (!kAll) {
    EXPECT_GT(plans, 100u);
    return;
  }
  EXPECT_THAT(missing, ::testing::IsEmpty()) << "families without a listing";
  EXPECT_THAT(undescribed,
              ::testing::ElementsAre(
                  "deepseek_v32 sglang:tp2", "gemma3 sglang:tp2", "gemma4 sglang:tp2",
                  "gemma4_text sglang:tp2", "glm_moe_dsa sglang:tp2", "kimi_k25 sglang:tp2",
                  "llama4 sglang:tp2", "minimax_m2 sglang:tp2", "mistral3 sglang:tp2",
                  "nemotron_h sglang:tp2", "nemotron_h vllm:tp2", "qwen3_5 sglang:tp2",
                  "qwen3_5_moe sglang:tp2", "qwen3_5_moe_text sglang:tp2",
                  "qwen3_5_text sglang:tp2", "qwen3_vl sglang:tp2", "qwen3_vl_moe sglang:tp2"));
  std::printf("%zu plans; %zu engines would cut through blocks of fp8\n", plans, cuts_blocks);
  EXPECT_GT(plans, 40 * cuts_blocks);
}

TEST(Joins, ATraceOfAFamilyIsAgreedInItsShapesAndOfNoFamilyInTheCheckpoints) {
  for (const Listing& listing : Listings()) {
    if (listing.name != "gpt_oss-plain") continue;
    const std::string name = "model.layers.0.mlp.experts.gate_up_proj";
    const auto dims = [&](const Result<AgreedLayoutPtr>& group) {
      const CanonicalSpace& space = (*group)->model.canonical;
      return space.tensors[*space.Find(name)].shape.size();
    };
    EXPECT_EQ(dims(ByTrace(listing)), 4u);
    EXPECT_EQ(dims(ByTraceAlone(listing)), 3u);
    EXPECT_EQ((*ByTrace(listing))->elements, (*ByScheme(listing, "vllm:tp2"))->elements);
    return;
  }
  FAIL() << "no listing of gpt_oss";
}

TEST(Joins, WhatATraceDoesNotSayIsRefusedByName) {
  const Listing listing = Listings().front();
  std::vector<control::LayoutSubmission> ranks = Recorded(listing);
  const auto refused = [&](const std::vector<layout::ObservedTensor>& checkpoint) {
    ranks[0].checkpoint = checkpoint;
    const auto offer = Work().Offer(ranks[0], {}, 0, 2);
    return offer ? OkStatus() : offer.error();
  };
  std::vector<layout::ObservedTensor> all;
  for (const layout::TensorSpec& spec : listing.tensors.tensors) {
    all.push_back({spec.name, spec.dtype, spec.shape});
  }
  EXPECT_TRUE(refused(all).ok());
  auto less = all;
  less.pop_back();
  EXPECT_EQ(refused(less).reason(), Reason::kTensorMissing);
  EXPECT_NE(refused(less).message().find(all.back().name), std::string::npos);
  auto other = all;
  other.back().shape.push_back(2);
  EXPECT_EQ(refused(other).reason(), Reason::kShapeMismatch);
  auto twice = all;
  twice.push_back(all.front());
  EXPECT_EQ(refused(twice).tensor(), all.front().name);
}

TEST(Joins, AHeadThatConfigTiesIsNoneOfTheModels) {
  const std::vector<layout::ObservedTensor> checkpoint = {
      {"lm_head.weight", layout::DType::kBF16, {4, 2}},
      {"model.embed_tokens.weight", layout::DType::kBF16, {4, 2}}};
  const auto tensors = [&](const char* config) {
    const auto made = layout::CanonicalFromCheckpoint(config, checkpoint);
    return made ? static_cast<int>(made->tensors.size()) : -1;
  };
  EXPECT_EQ(tensors(R"({})"), 2);
  EXPECT_EQ(tensors(R"({"tie_word_embeddings": false})"), 2);
  EXPECT_EQ(tensors(R"({"tie_word_embeddings": true})"), 1);
  EXPECT_EQ(tensors(R"({"text_config": {"tie_word_embeddings": true}})"), 1);
  EXPECT_EQ(
      tensors(R"({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}})"),
      -1);
  EXPECT_EQ(tensors("no json"), -1);

  // Whether a head that the loader leaves alone is the embedding is not guessed.
  const auto reason = [&](const char* config, const std::vector<std::string>& read) {
    control::LayoutSubmission submission;
    submission.config_json = config;
    submission.checkpoint = checkpoint;
    for (const std::string& name : read) {
      submission.trace.push_back({name, {}, name, 0, {4, 2}, {2, 1}, layout::DType::kBF16});
      submission.observed.push_back({name, layout::DType::kBF16, {4, 2}});
    }
    const auto offer = Work().Offer(submission, {}, 0, 1);
    return offer ? std::string() : offer.error().tensor() + ": " + offer.error().remedy();
  };
  const std::string embed = "model.embed_tokens.weight", head = "lm_head.weight";
  EXPECT_THAT(reason(R"({})", {embed}), ::testing::HasSubstr("lm_head.weight: set tie_word_embed"));
  EXPECT_EQ(reason(R"({})", {embed, head}), "");
  EXPECT_EQ(reason(R"({})", {head}), "") << "of the last stage";
  EXPECT_EQ(reason(R"({"tie_word_embeddings": true})", {embed}), "");
  EXPECT_EQ(reason(R"({"tie_word_embeddings": false})", {embed}), "") << "of the first stage";
  EXPECT_NE(reason(R"({"tie_word_embeddings": true})", {embed, head}), "");
}

}  // namespace
}  // namespace weightwire::coordinator
