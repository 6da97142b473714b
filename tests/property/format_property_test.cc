#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/property/family_generator.h"
#include "tests/support/fp8_oracle.h"
#include "tests/support/plan_run.h"

// Random models whose trainer holds floats, whoever cut them, and whose engine holds a checkpoint
// in one of the formats of wwctl convert, whole or cut between groups. The oracle quantizes the
// checkpoint's whole tensors; a plan must give each rank its part of them, element by element.
// Plans are then changed by chance: the proof, or the elements, must tell. WEIGHTWIRE_SEED=N
// replays a run.
namespace weightwire {
namespace {

using family_oracle::Array;
using family_oracle::Config;
using family_oracle::Quantization;
using family_oracle::Tensors;
using layout::DType;
using layout::LocalTensor;
using layout::ModelLayout;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kTransfers = 100;
#else
constexpr int kTransfers = 3000;
#endif
/// Of one model, so that its matrices are few or small.
constexpr size_t kElementsMax = 30'000;

enum class Names { kParts, kExpressions, kGlobs };

/// A dialect's way to say a format, and what the checkpoint then holds.
struct Format {
  const char* name;
  int64_t rows;     ///< of a group; 0: all
  int64_t columns;  ///< the same; what all matrices have a multiple of where several are packed
  int64_t packed;
  const char* suffix;
  Names names;
  const char* config;  ///< quantization_config, but for the list of modules
  const char* spec = "hf";
};

constexpr Format kFormats[] = {
    {"fp8-tensor", 0, 0, 1, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": "tensor"}}})"},
    {"fp8-channel", 1, 0, 1, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": "channel"}}})"},
    {"fp8-block", 3, 2, 1, "_scale_inv", Names::kParts,
     R"("quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [3, 2])"},
    {"fp8-block-ue8m0", 2, 5, 1, "_scale_inv", Names::kParts,
     R"("quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [2, 5])"},
    {"fp8-block-compressed-tensors", 4, 3, 1, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": "block",
                    "block_structure": [4, 3]}}})"},
    {"mxfp8", 1, 32, 1, "_scale_inv", Names::kParts,
     R"("quant_method": "mxfp8", "weight_block_size": [1, 32])"},
    {"mxfp8-modelopt", 1, 32, 1, "_scale", Names::kGlobs,
     R"("quant_method": "modelopt", "quant_algo": "MXFP8")"},
    {"fp8-modelopt", 0, 0, 1, "_scale", Names::kGlobs,
     R"("quant_method": "modelopt", "quant_algo": "FP8")", "hf:skip=*.input_scale"},
    {"fp8-channel-modelopt", 1, 0, 1, "_scale", Names::kGlobs,
     R"("quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN")"},
    {"mxfp8-compressed-tensors", 1, 32, 1, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": "group",
                    "group_size": 32, "scale_dtype": "torch.uint8"}}})"},
    {"mxfp4-compressed-tensors", 1, 32, 2, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "symmetric": true, "dynamic": false, "strategy": "group",
                    "group_size": 32, "scale_dtype": "torch.uint8"}}})"},
    {"int4, groups of 8", 1, 8, 8, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": true, "dynamic": false, "strategy": "group",
                    "group_size": 8}}})",
     "hf:skip=*.weight_shape"},
    {"int4, groups of 24", 1, 24, 8, "_scale", Names::kExpressions,
     R"("quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": true, "dynamic": false, "strategy": "group",
                    "group_size": 24}}})",
     "hf:skip=*.weight_shape"},
};

/// Modules that may be left out, and how each dialect writes them.
struct Module {
  const char* part;
  const char* expression;
  const char* glob;
};
constexpr Module kModules[] = {
    {"lm_head", "lm_head", "lm_head"},
    {"gate", R"(re:.*\\.gate$)", "*.gate"},
    {"self_attn", R"(re:.*\\.self_attn\\..*)", "*.self_attn.*"},
    {"experts", R"(re:.*\\.experts\\..*)", "*.experts.*"},
    {"model.layers.0", R"(re:model\\.layers\\.0\\..*)", "model.layers.0"}};

enum class Outcome { kSkipped, kMoved, kGathered };

class Trial {
 public:
  explicit Trial(uint64_t seed) : random_(seed) {
    format_ = &kFormats[In(0, std::ssize(kFormats) - 1)];
    for (bool again = true; again;) {  // most are small enough
      case_ = FamilyGenerator(random_()).Draw();
      Config& c = case_.config;
      // Of experts modelopt makes one scale of gate and up, which nothing makes on the way.
      const bool no_experts = format_->name == std::string_view("fp8-modelopt");
      again = (no_experts && c.experts > 0) ||
              c.Is({"gpt_oss", "llama4_text", "phi3", "glm4", "qwen2_5_vl", "minimax_m2"}) ||
              c.Wraps() || c.Indexed() || case_.from.lora > 0 || !case_.from.only.empty() ||
              !case_.from.skip.empty();
      if (again) continue;
      if (case_.from.kind == Party::Kind::kEngine || !case_.from.mtp) c.mtp = 0;
      Widen(c);
      again = !case_.from.Fits(c) || Elements(c) > kElementsMax;
    }
    for (const Module& module : kModules) {
      if (In(1, 6) == 1) left_out_.push_back(&module);
      if (!left_out_.empty() && left_out_.back() == &module) skipped_.skipped.insert(module.part);
    }
  }

  std::string Text() const {
    return case_.from.Spec() + " to " + format_->name + " of " + ConfigText();
  }
  const char* format() const { return format_->name; }
  const std::string& source() const { return case_.from.scheme; }
  const std::string& family() const { return case_.config.family; }
  bool is_cut() const { return cut_; }
  int caught() const { return caught_; }

  Outcome Run() {
    const Config& c = case_.config;
    const Tensors hf = family_oracle::HuggingFace(c);
    const Tensors whole = Quantized(hf);
    if (whole.size() == hf.size()) return Outcome::kSkipped;  // all is left out
    const auto source = LayoutOf(family_oracle::ConfigJson(c), case_.from.Spec());
    auto target = LayoutOf(ConfigText(), format_->spec);
    EXPECT_TRUE(source.has_value()) << source.error().ToString();
    EXPECT_TRUE(target.has_value()) << target.error().ToString();
    if (!source || !target) return Outcome::kSkipped;
    cut_ = In(0, 1) == 1;
    if (cut_) CutBetweenGroups(*target);
    const testing::Memory sent =
        MemoryOf(*source, case_.from.Ranks(c, hf, family_oracle::Load(c, hf)));
    const auto plan = plan::BuildPlan(*source, *target);
    EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
    if (!plan) return Outcome::kSkipped;
    const testing::Memory wanted = Wanted(*target, whole);
    ExpectMoved(*plan, sent, *source, *target, wanted);
    if (!::testing::Test::HasFailure()) Damage(*plan, sent, *source, *target, wanted);
    return plan->gathered.empty() ? Outcome::kMoved : Outcome::kGathered;
  }

 private:
  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  /// All that is the columns of a matrix becomes whole groups.
  void Widen(Config& c) const {
    if (format_->packed == 1) return;
    for (int64_t* size :
         {&c.intermediate, &c.moe_intermediate, &c.shared_intermediate, &c.q_lora, &c.kv_lora}) {
      *size = std::lcm(*size, format_->columns);
    }
    c.hidden = std::lcm(std::min<int64_t>(c.hidden, 2), format_->columns);
    for (int64_t* size : {&c.head_dim, &c.v_dim}) {  // heads · size
      *size = format_->columns / std::gcd(c.heads, format_->columns);
    }
    c.says_head_dim = true;
  }

  static size_t Elements(const Config& c) {
    // Before any is made: of the layers' matrices, roughly.
    const auto outputs = static_cast<size_t>(c.heads + 2 * c.kv_heads) * c.head_dim;
    const auto inner = static_cast<size_t>(c.intermediate) +
                       static_cast<size_t>(c.moe_intermediate * c.experts + c.shared_intermediate);
    const size_t latent = !c.Latent() ? 0
                                      : static_cast<size_t>(c.heads * (c.nope + c.rope + c.v_dim)) *
                                            static_cast<size_t>(c.q_lora + c.kv_lora + c.hidden);
    return static_cast<size_t>(c.layers) *
           (static_cast<size_t>(c.hidden) * (2 * outputs + 3 * inner) + latent);
  }

  std::string ConfigText() const {
    std::string list;
    for (const Module* module : left_out_) {
      list.append(list.empty() ? "\"" : ", \"")
          .append(format_->names == Names::kParts         ? module->part
                  : format_->names == Names::kExpressions ? module->expression
                                                          : module->glob)
          .append("\"");
    }
    std::string json = family_oracle::ConfigJson(case_.config);
    json.pop_back();
    return json + R"(, "quantization_config": {)" + format_->config +
           (format_->names == Names::kParts ? R"(, "modules_to_not_convert": [)"
                                            : R"(, "ignore": [)") +
           list + "]}}";
  }

  static Result<ModelLayout> LayoutOf(const std::string& json, const std::string& text) {
    WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(text));
    return layout::LayoutFromScheme(json, spec);
  }

  /// The checkpoint's whole tensors in the format.
  Tensors Quantized(const Tensors& hf) const {
    Tensors made;
    for (const auto& [name, array] : hf) {
      if (!family_oracle::IsQuantized(case_.config, skipped_, name)) {
        made[name] = array;
        continue;
      }
      const int64_t rows = array.shape.at(0), columns = array.shape.at(1);
      const int64_t down = format_->rows == 0 ? rows : format_->rows;
      const int64_t across = format_->columns == 0 ? columns : format_->columns;
      Array scales, codes;
      scales.shape = {(rows + down - 1) / down, (columns + across - 1) / across};
      codes.shape = {rows, columns / format_->packed};
      std::vector<uint64_t> each(array.cells.size());
      for (int64_t r = 0; r < rows; r += down) {
        for (int64_t k = 0; k < columns; k += across) {
          std::vector<size_t> at;
          for (int64_t row = r; row < std::min(rows, r + down); ++row) {
            for (int64_t column = k; column < std::min(columns, k + across); ++column) {
              at.push_back(static_cast<size_t>(row * columns + column));
            }
          }
          std::vector<uint64_t> elements;
          for (size_t i : at) elements.push_back(array.cells.at(i));
          scales.cells.push_back(testing::ScaleOf(elements));
          for (size_t i : at) each[i] = testing::CodeOf(array.cells[i], scales.cells.back());
        }
      }
      for (size_t i = 0; i < each.size(); i += static_cast<size_t>(format_->packed)) {
        const auto first = each.begin() + static_cast<ptrdiff_t>(i);
        codes.cells.push_back(
            format_->packed == 1 ? *first : testing::PackedOf({first, first + format_->packed}));
      }
      made[format_->packed == 1 ? name : name + "_packed"] = std::move(codes);
      made[name + format_->suffix] = std::move(scales);
    }
    return made;
  }

  /// Instead of one rank that holds all, two or three, each of which holds a run of rows of blocks
  /// or of columns of blocks of a weight, with its scales; the first one has all else.
  void CutBetweenGroups(ModelLayout& target) {
    const auto ranks = static_cast<size_t>(In(2, 3));
    const std::vector<LocalTensor> all = std::move(target.ranks.at(0).tensors);
    target.ranks.assign(ranks, {});
    for (const LocalTensor& tensor : all) {
      const auto& canonical = target.canonical;
      if (tensor.pieces.size() != 1) continue;
      const uint32_t id = tensor.pieces[0].tensor;
      if (canonical.WeightOf(id)) continue;  // with its weight
      const layout::TensorSpec& spec = canonical.tensors[id];
      const auto scales = spec.block.empty() ? std::nullopt : canonical.ScalesOf(spec.name);
      if (!scales) {
        target.ranks[0].tensors.push_back(tensor);
        continue;
      }
      const layout::Shape& grid = canonical.tensors[*scales].shape;
      const size_t d = static_cast<size_t>(In(0, 1));
      int64_t begin = 0;
      for (size_t rank = 0; rank < ranks; ++rank) {
        const int64_t end = rank + 1 == ranks ? grid[d] : In(begin, grid[d]);
        if (begin == end) continue;
        layout::Box of_scales{{0, 0}, grid}, of_codes{{0, 0}, spec.shape};
        of_scales.begin[d] = begin;
        of_scales.extent[d] = end - begin;
        of_codes.begin[d] = begin * spec.block[d];
        of_codes.extent[d] = std::min(end * spec.block[d], spec.shape[d]) - of_codes.begin[d];
        target.ranks[rank].tensors.push_back(Local(spec.name, spec.dtype, id, of_codes));
        target.ranks[rank].tensors.push_back(Local(
            canonical.tensors[*scales].name, canonical.tensors[*scales].dtype, *scales, of_scales));
        begin = end;
      }
    }
    std::erase_if(target.ranks,
                  [](const layout::RankLayout& rank) { return rank.tensors.empty(); });
  }

  static LocalTensor Local(const std::string& name, DType dtype, uint32_t id,
                           const layout::Box& box) {
    return {name, dtype, box.extent, {{id, box, 0, {box.extent[1], 1}}}};
  }

  static testing::Memory MemoryOf(const ModelLayout& layout, const std::vector<Tensors>& ranks) {
    testing::Memory memory;
    for (size_t r = 0; r < ranks.size(); ++r) {
      auto& tensors = memory.emplace_back();
      for (const LocalTensor& local : layout.ranks.at(r).tensors) {
        tensors.push_back(ranks[r].at(local.name).cells);
      }
    }
    return memory;
  }

  /// Each rank's part of the whole tensors.
  static testing::Memory Wanted(const ModelLayout& target, const Tensors& whole) {
    testing::Memory wanted = testing::EmptyMemory(target);
    for (size_t r = 0; r < target.ranks.size(); ++r) {
      for (size_t t = 0; t < target.ranks[r].tensors.size(); ++t) {
        for (const layout::Piece& piece : target.ranks[r].tensors[t].pieces) {
          const layout::TensorSpec& spec = target.canonical.tensors[piece.tensor];
          const Array& array = whole.at(spec.name);
          std::vector<int64_t> stride(spec.shape.size(), 1);
          for (size_t d = spec.shape.size(); d-- > 1;) stride[d - 1] = stride[d] * spec.shape[d];
          testing::ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
            std::vector<int64_t> element = index;
            for (size_t d = 0; d < index.size(); ++d) element[d] += piece.box.begin[d];
            wanted[r][t].at(testing::StridedAt(piece.local_offset, piece.local_stride, index)) =
                array.cells.at(testing::StridedAt(0, stride, element));
          });
        }
      }
    }
    return wanted;
  }

  static void ExpectMoved(const plan::TransferPlan& plan, const testing::Memory& sent,
                          const ModelLayout& source, const ModelLayout& target,
                          const testing::Memory& wanted) {
    testing::Memory got = testing::EmptyMemory(target);
    EXPECT_EQ(testing::RunPlan(plan, sent, got), 0) << "elements were written twice";
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t r = 0; r < wanted.size(); ++r) {
      for (size_t t = 0; t < wanted[r].size(); ++t) {
        ASSERT_TRUE(got[r][t] == wanted[r][t])
            << "rank " << r << " " << target.ranks[r].tensors[t].name;
      }
    }
    const Status proof = plan::VerifyPlan(plan, source, target);
    EXPECT_TRUE(proof.ok()) << proof.ToString();
    const plan::PlanReport report = plan::Report(plan, source, target);
    EXPECT_GE(report.egress_over_bound, 1 - 1e-9);
    EXPECT_NEAR(report.ingress_over_bound, 1, 1e-9);
  }

  /// Something that a copy says which makes codes or scales, by chance.
  void Change(plan::CopyOp& op) {
    const auto d = static_cast<size_t>(In(0, 1));
    const int64_t by = In(0, 1) == 0 ? 1 : -1;
    testing::Mistake(
        op, In(0, testing::kMistakes - 1), d, by,
        op.rule == layout::ScaleRule::kInt4 ? layout::ScaleRule::kMxFp4 : layout::ScaleRule::kInt4);
  }

  /// A mistake in the plan is proved, unless it makes no difference.
  void Damage(plan::TransferPlan plan, const testing::Memory& sent, const ModelLayout& source,
              const ModelLayout& target, const testing::Memory& wanted) {
    std::vector<plan::CopyOp*> ops;
    for (auto& [rank, gathered] : plan.gathered) {
      for (plan::CopyOp& op : gathered.made) ops.push_back(&op);
    }
    for (plan::Stream& stream : plan.streams) {
      for (plan::CopyOp& op : stream.ops) {
        if (op.transform != plan::Transform::kElements) ops.push_back(&op);
      }
    }
    ASSERT_FALSE(ops.empty());
    Change(*ops[static_cast<size_t>(In(0, std::ssize(ops) - 1))]);
    testing::CountBytes(plan);
    if (plan::VerifyPlan(plan, source, target).ok()) {
      return ExpectMoved(plan, sent, source, target, wanted);
    }
    ++caught_;
  }

  std::mt19937_64 random_;
  const Format* format_ = nullptr;
  Case case_;
  std::vector<const Module*> left_out_;
  Quantization skipped_;  ///< only what is left out
  bool cut_ = false;
  int caught_ = 0;
};

TEST(FormatTransfer, EqualsTheWholeTensorsInTheFormat) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::map<std::string, int> formats, sources, families;
  int moved = 0, gathered = 0, cut = 0, caught = 0;
  for (uint64_t round = 0; round < 4 * kTransfers && moved < kTransfers; ++round) {
    Trial trial(seed + round);
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed + round) +
                 " (the first of its run): " + trial.Text());
    const Outcome outcome = trial.Run();
    if (HasFailure()) return;
    if (outcome == Outcome::kSkipped) continue;
    ++moved;
    ++formats[trial.format()];
    ++sources[trial.source()];
    ++families[trial.family()];
    gathered += outcome == Outcome::kGathered;
    cut += trial.is_cut();
    caught += trial.caught();
  }
  for (const auto* drawn : {&formats, &sources, &families}) {
    for (const auto& [what, count] : *drawn) std::printf("%6d %s\n", count, what.c_str());
  }
  std::printf("%d moved, %d gathered, %d cut, %d changed plans proved wrong\n", moved, gathered,
              cut, caught);
  EXPECT_EQ(moved, kTransfers);
  EXPECT_EQ(formats.size(), std::size(kFormats));
  EXPECT_EQ(sources.size(), 5u);
  EXPECT_GT(families.size(), 12u);
  EXPECT_GT(gathered, kTransfers / 10);
  EXPECT_GT(cut, kTransfers / 4);
  EXPECT_GT(caught, kTransfers / 2);
}

}  // namespace
}  // namespace weightwire
