#include "server/content/hash_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "server/layout/scheme.h"
#include "server/transfer/segment_copy.h"
#include "tests/support/plan_run.h"

// One model in many layouts: every rank's memory is filled element by element from what the element
// *is*, padding with noise, and the roots compared.
namespace weightwire::content {
namespace {

using kernels::KeyedSum;
using layout::ModelLayout;
using Memory = std::vector<std::vector<std::vector<unsigned char>>>;  ///< [rank][tensor][byte]

uint64_t ValueOf(uint32_t tensor, int64_t index) {
  return kernels::Mix(uint64_t{tensor} << 40 ^ static_cast<uint64_t>(index));
}

ModelLayout LayoutOf(const std::string& model, const std::string& spec,
                     const std::string& with = {}) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  std::ifstream file(std::string(root == nullptr ? "." : root) + "/tests/data/" + model +
                     "/hf/config.json");
  std::stringstream text;
  text << file.rdbuf();
  std::string config = text.str();
  if (!with.empty()) config.insert(config.rfind('}'), ", " + with);
  auto parsed = layout::ParseParallelSpec(spec);
  if (!parsed) throw std::runtime_error(spec + ": " + parsed.error().ToString());
  auto made = layout::LayoutFromScheme(config, *parsed);
  if (!made) throw std::runtime_error(spec + ": " + made.error().ToString());
  return *made;
}

template <typename Visit>
void ForEachElement(const layout::Shape& shape, const layout::Piece& piece, Visit visit) {
  testing::ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
    int64_t canonical = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      canonical = canonical * shape[d] + piece.box.begin[d] + index[d];
    }
    visit(testing::StridedAt(piece.local_offset, piece.local_stride, index), canonical);
  });
}

Memory Filled(const ModelLayout& layout, unsigned char padding) {
  Memory memory(layout.ranks.size());
  for (size_t rank = 0; rank < layout.ranks.size(); ++rank) {
    for (const layout::LocalTensor& tensor : layout.ranks[rank].tensors) {
      const auto bytes = static_cast<size_t>(layout::ElementBytes(tensor.dtype));
      auto& to = memory[rank].emplace_back(
          static_cast<size_t>(*layout::StorageBytes(tensor.dtype, tensor.shape)), padding);
      for (const layout::Piece& piece : tensor.pieces) {
        ForEachElement(layout.canonical.tensors[piece.tensor].shape, piece,
                       [&](size_t at, int64_t index) {
                         const uint64_t value = ValueOf(piece.tensor, index);
                         std::memcpy(to.data() + at * bytes, &value, bytes);
                       });
      }
    }
  }
  return memory;
}

std::vector<std::vector<KeyedSum>> SumsOf(const HashPlan& hash_plan, const Memory& memory) {
  std::vector<std::vector<KeyedSum>> sums(hash_plan.ranks.size());
  for (uint32_t rank = 0; rank < hash_plan.ranks.size(); ++rank) {
    for (const plan::CopyOp& op : hash_plan.ranks[rank].ops) {
      const transfer::SegmentCopy copy =
          transfer::CopyOf(op, {0, std::vector<int64_t>(op.extent.size(), 0), op.extent, 0});
      kernels::AddKeyed(sums[rank].emplace_back(), SeedOf(hash_plan.tensors[op.canonical].name),
                        memory[rank][op.source_tensor].data() + copy.source_offset, copy.box,
                        copy.from, copy.to, op.target_offset);
    }
  }
  return sums;
}

struct Read {
  HashPlan hash_plan;
  Content content;
};
Read ReadAll(const ModelLayout& layout, const Memory& memory) {
  auto hash_plan = HashPlanOf(layout, layout::FingerprintOf(layout));
  if (!hash_plan) throw std::runtime_error(hash_plan.error().ToString());
  Content content = Combine(*hash_plan, SumsOf(*hash_plan, memory));
  return {std::move(*hash_plan), std::move(content)};
}

struct Model {
  const char* folder;
  std::vector<const char*> specs;
  const char* with = "";
};
const Model kModels[] = {
    {"megatron/qwen2_tied",
     {"hf", "megatron:tp2,pp2", "megatron:pp2,vpp2,dp2", "megatron:tp4,vocab_pad=260",
      "vllm:tp2,pp2", "vllm:tp4,dp2", "sglang:tp2", "fsdp:dp3", "fsdp:dp3,kind=fsdp1",
      "fsdp:dp2,hsdp2,kind=zero3"}},
    {"megatron/qwen2_kv2", {"hf", "megatron:tp4", "vllm:tp4", "sglang:tp4,dp2"}},
    {"megatron/qwen3_moe",
     {"hf", "megatron:tp2,ep2,etp1", "megatron:ep2,dp2,experts=grouped", "vllm:tp2,ep",
      "vllm:tp2,ep,redundant=2", "sglang:tp4,ep2"}},
    {"megatron/deepseek_v3",
     {"hf:mtp=none", "megatron:tp2,ep2,etp1,pp2", "vllm:tp2", "sglang:tp2,ep2"}},
    {"megatron/qwen3_moe",
     {"hf", "vllm:tp2,ep", "sglang:tp2,ep2", "fsdp:dp3"},
     R"("quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [16, 16]})"},
};

TEST(HashPlan, GivesOneRootForAllLayoutsOfAModel) {
  for (const Model& model : kModels) {
    const ModelLayout whole = LayoutOf(model.folder, model.specs[0], model.with);
    const Content expected = ReadAll(whole, Filled(whole, 0)).content;
    ASSERT_EQ(expected.leaves.size(), whole.canonical.tensors.size());
    for (const char* spec : model.specs) {
      const ModelLayout layout = LayoutOf(model.folder, spec, model.with);
      const Content content = ReadAll(layout, Filled(layout, 0xa5)).content;
      EXPECT_TRUE(content.disagreements.empty()) << spec;
      EXPECT_EQ(RootOf(content.leaves), RootOf(expected.leaves)) << model.folder << " " << spec;
      EXPECT_EQ(ClassOf(content.leaves), ClassOf(expected.leaves)) << model.folder << " " << spec;
    }
  }
}

/// Flips a bit of an element that a piece covers; says which canonical tensor that is.
uint32_t FlipSome(const ModelLayout& layout, uint64_t seed, uint32_t rank, Memory& memory,
                  uint32_t* local) {
  const auto& tensors = layout.ranks[rank].tensors;
  *local = static_cast<uint32_t>(kernels::Mix(seed) % tensors.size());
  while (tensors[*local].pieces.empty())
    *local = (*local + 1) % static_cast<uint32_t>(tensors.size());
  const auto& pieces = tensors[*local].pieces;
  const layout::Piece& piece = pieces[kernels::Mix(seed + 1) % pieces.size()];
  std::vector<size_t> places;
  ForEachElement(layout.canonical.tensors[piece.tensor].shape, piece,
                 [&](size_t at, int64_t) { places.push_back(at); });
  const auto bytes = static_cast<size_t>(layout::ElementBytes(tensors[*local].dtype));
  const uint64_t bit = kernels::Mix(seed + 2) % (8 * bytes);
  memory[rank][*local][places[kernels::Mix(seed + 3) % places.size()] * bytes + bit / 8] ^=
      static_cast<unsigned char>(1u << bit % 8);
  return piece.tensor;
}

TEST(HashPlan, NamesTheTensorOfAnyBitThatDiffers) {
  for (const Model& model : kModels) {
    for (const char* spec : model.specs) {
      const ModelLayout layout = LayoutOf(model.folder, spec, model.with);
      const Memory filled = Filled(layout, 0);
      const Read whole = ReadAll(layout, filled);
      for (uint64_t seed = 100; seed < 112; ++seed) {
        Memory memory = filled;
        const auto rank = static_cast<uint32_t>(seed % layout.ranks.size());
        uint32_t local = 0;
        const uint32_t tensor = FlipSome(layout, seed, rank, memory, &local);
        const Content content = Combine(whole.hash_plan, SumsOf(whole.hash_plan, memory));
        const std::string where = std::string(spec) + " rank " + std::to_string(rank) + " " +
                                  layout.ranks[rank].tensors[local].name;
        for (size_t leaf = 0; leaf < content.leaves.size(); ++leaf) {
          if (content.leaves[leaf] == whole.content.leaves[leaf]) continue;
          EXPECT_EQ(content.leaves[leaf].tensor.name, layout.canonical.tensors[tensor].name)
              << where;
        }
        // A replica that differs is outvoted or found by its twin; what has no replica by its sum.
        const bool changed = RootOf(content.leaves) != RootOf(whole.content.leaves);
        EXPECT_TRUE(changed || !content.disagreements.empty()) << where;
        for (const Disagreement& found : content.disagreements) {
          EXPECT_EQ(found.tensor, tensor) << where;
          EXPECT_TRUE(found.rank == rank || (!found.outvoted && found.other_rank == rank)) << where;
        }
      }
    }
  }
}

TEST(HashPlan, OutvotesTheReplicaThatDiffers) {
  const ModelLayout layout = LayoutOf("megatron/qwen2_tied", "megatron:tp4");
  Memory memory = Filled(layout, 0);
  const Read whole = ReadAll(layout, memory);
  const auto& tensors = layout.ranks[2].tensors;
  const auto norm =
      std::ranges::find(tensors, "decoder.final_layernorm.weight", &layout::LocalTensor::name) -
      tensors.begin();
  memory[2][static_cast<size_t>(norm)][5] ^= 4;
  const Content content = Combine(whole.hash_plan, SumsOf(whole.hash_plan, memory));
  EXPECT_EQ(content.leaves, whole.content.leaves);
  ASSERT_EQ(content.disagreements.size(), 1u);
  EXPECT_EQ(content.disagreements[0].rank, 2u);
  EXPECT_EQ(content.disagreements[0].other_rank, 0u);
  EXPECT_TRUE(content.disagreements[0].outvoted);
  EXPECT_EQ(whole.hash_plan.tensors[content.disagreements[0].tensor].name, "model.norm.weight");
}

TEST(HashPlan, LeavesOutTensorsThatAreNotHeldWhole) {
  const ModelLayout all = LayoutOf("megatron/qwen2_tied", "vllm:tp2");
  ModelLayout part = all;
  part.ranks.pop_back();
  const Content content = ReadAll(part, Filled(part, 0)).content;
  EXPECT_LT(content.leaves.size(), all.canonical.tensors.size());
  EXPECT_NE(std::ranges::find(content.leaves, "model.norm.weight",
                              [](const Leaf& leaf) { return leaf.tensor.name; }),
            content.leaves.end());
  const ModelLayout filtered = LayoutOf("megatron/qwen2_tied", "vllm:tp2,skip=*layernorm*");
  const Content rest = ReadAll(filtered, Filled(filtered, 0)).content;
  for (const Leaf& leaf : rest.leaves) {
    EXPECT_EQ(leaf.tensor.name.find("layernorm"), std::string::npos) << leaf.tensor.name;
  }
}

TEST(HashPlan, OfAnotherDtypeIsOfAnotherClass) {
  const ModelLayout half = LayoutOf("megatron/qwen2_tied", "hf");
  ModelLayout full = half;
  for (auto& tensor : full.ranks[0].tensors) tensor.dtype = layout::DType::kF32;
  EXPECT_NE(ClassOf(ReadAll(half, Filled(half, 0)).content.leaves),
            ClassOf(ReadAll(full, Filled(full, 0)).content.leaves));
}

TEST(HashPlan, SlicesNameEveryPlaceOnceInTheOrderOfTheSums) {
  const ModelLayout layout = LayoutOf("megatron/qwen3_moe", "megatron:tp2,ep2,etp1");
  const Read whole = ReadAll(layout, Filled(layout, 0));
  for (uint32_t rank = 0; rank < layout.ranks.size(); ++rank) {
    const plan::RankSlice slice = SliceOf(whole.hash_plan, rank);
    ASSERT_EQ(slice.streams.size(), 1u);
    EXPECT_EQ(slice.plan, whole.hash_plan.id);
    const auto& ops = whole.hash_plan.ranks[rank].ops;
    ASSERT_EQ(slice.streams[0].ops.size(), ops.size());
    for (size_t i = 0; i < ops.size(); ++i) {
      plan::CopyOp op = slice.streams[0].ops[i];
      EXPECT_EQ(slice.tensor_names.at(op.canonical),
                whole.hash_plan.tensors[ops[i].canonical].name);
      op.canonical = ops[i].canonical;
      EXPECT_EQ(op, ops[i]);
    }
  }
}

TEST(HashPlan, RefusesDtypesWithoutACast) {
  ModelLayout layout = LayoutOf("megatron/qwen2_tied", "megatron:tp2");
  layout.ranks[1].tensors[0].dtype = layout::DType::kI16;
  const auto hash_plan = HashPlanOf(layout, layout::FingerprintOf(layout));
  ASSERT_FALSE(hash_plan);
  EXPECT_EQ(hash_plan.error().reason(), Reason::kDtypeMismatch);
  EXPECT_EQ(hash_plan.error().rank(), "rank 1");
}

}  // namespace
}  // namespace weightwire::content
