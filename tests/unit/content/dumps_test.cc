#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/content/hash_plan.h"
#include "server/layout/scheme.h"
#include "server/transfer/segment_copy.h"
#include "tests/support/safetensors.h"

// What real Megatron-core processes held, rank by rank, against the roots of the checkpoints that
// they loaded: these come from a NumPy oracle (tests/python/content_oracle.py).
namespace weightwire::content {
namespace {

struct Dump {
  const char* model;
  const char* folder;
  const char* spec;
};
const Dump kDumps[] = {
    {"megatron/qwen2", "mcore-tp4", "megatron:tp4,vocab_pad=512"},
    {"megatron/qwen2", "mcore-tp2pp2", "megatron:tp2,pp2,vocab_pad=256"},
    {"megatron/qwen2", "mcore-pp2-first1", "megatron:pp2,first=1,vocab_pad=256"},
    {"megatron/qwen2", "mcore-pp2vpp2", "megatron:pp2,vpp2,vocab_pad=256"},
    {"megatron/qwen2_kv2", "mcore-tp4", "megatron:tp4,vocab_pad=512"},
    {"megatron/qwen2_tied", "mcore-tp2pp2", "megatron:tp2,pp2,vocab_pad=256"},
    {"megatron/qwen2_tied", "mcore-pp2vpp2", "megatron:pp2,vpp2,vocab_pad=256"},
    {"megatron/deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "megatron:tp2,ep2,etp1,pp2,vocab_pad=256"},
    {"megatron/mixtral", "mcore-tp2ep2etp1-seq", "megatron:tp2,ep2,etp1,vocab_pad=256"},
    {"megatron/qwen2_moe", "mcore-tp2ep2etp2-seq", "megatron:tp2,ep2,etp2,dp2,vocab_pad=256"},
    {"megatron/qwen3_moe", "mcore-ep2-grouped", "megatron:ep2,dp2,experts=grouped,vocab_pad=256"},
    {"megatron-te/qwen2_mqa", "tp4", "megatron:tp4,spec=te,vocab_pad=256"},
    {"megatron-te/deepseek_v3_mtp", "pp2ep2",
     "megatron:pp2,ep2,dp2,first=31,spec=te,vocab_pad=none"},
    {"megatron-te/qwen2_moe", "w8_tp4ep4etp2", "megatron:tp4,ep4,etp2,dp2,spec=te,vocab_pad=256"},
};

std::string DataDir() { return testing::SourceDir() + "/tests/data/"; }

std::vector<testing::TensorFile> Ranks(const std::string& folder, size_t count) {
  std::vector<testing::TensorFile> ranks;
  for (size_t rank = 0; rank < count; ++rank) {
    const std::string number = (rank < 10 ? "0" : "") + std::to_string(rank);
    ranks.push_back(testing::ReadSafetensors(folder + "/rank" + number + ".safetensors"));
  }
  return ranks;
}

/// The scheme's layout with the dtypes that the files have.
layout::ModelLayout LayoutOf(const std::string& config, const std::string& spec,
                             const std::string& folder, std::vector<testing::TensorFile>& files) {
  auto parsed = layout::ParseParallelSpec(spec);
  if (!parsed) throw std::runtime_error(parsed.error().ToString());
  auto made = layout::LayoutFromScheme(config, *parsed);
  if (!made) throw std::runtime_error(made.error().ToString());
  files = Ranks(folder, made->ranks.size());
  for (size_t rank = 0; rank < files.size(); ++rank) {
    for (layout::LocalTensor& tensor : made->ranks[rank].tensors) {
      tensor.dtype = *layout::DTypeFromName(files[rank].at(tensor.name).dtype);
    }
  }
  return std::move(*made);
}

std::vector<std::vector<kernels::KeyedSum>> SumsOf(const HashPlan& hash_plan,
                                                   const layout::ModelLayout& layout,
                                                   const std::vector<testing::TensorFile>& files) {
  std::vector<std::vector<kernels::KeyedSum>> sums(hash_plan.ranks.size());
  for (size_t rank = 0; rank < sums.size(); ++rank) {
    for (const plan::CopyOp& op : hash_plan.ranks[rank].ops) {
      const std::string& name = layout.ranks[rank].tensors[op.source_tensor].name;
      const transfer::SegmentCopy copy =
          transfer::CopyOf(op, {0, std::vector<int64_t>(op.extent.size(), 0), op.extent, 0});
      kernels::AddKeyed(sums[rank].emplace_back(), SeedOf(hash_plan.tensors[op.canonical].name),
                        files[rank].at(name).bytes.data() + copy.source_offset, copy.box, copy.from,
                        copy.to, op.target_offset);
    }
  }
  return sums;
}

TEST(Dumps, HaveTheRootsOfTheCheckpointsThatTheyWereMadeFrom) {
  const auto roots = nlohmann::json::parse(testing::ReadText(DataDir() + "content_roots.json"));
  for (const Dump& dump : kDumps) {
    const std::string base = DataDir() + dump.model;
    std::vector<testing::TensorFile> files;
    const layout::ModelLayout layout = LayoutOf(testing::ReadText(base + "/hf/config.json"),
                                                dump.spec, base + "/" + dump.folder, files);
    const auto hash_plan = HashPlanOf(layout, layout::FingerprintOf(layout));
    ASSERT_TRUE(hash_plan) << hash_plan.error().ToString();
    const Content content = Combine(*hash_plan, SumsOf(*hash_plan, layout, files));
    EXPECT_TRUE(content.disagreements.empty()) << dump.model << " " << dump.folder;
    EXPECT_EQ(RootOf(content.leaves).ToHex(), roots.at(dump.model).get<std::string>())
        << dump.folder;
  }
}

}  // namespace
}  // namespace weightwire::content
