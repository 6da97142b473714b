#include "bench/transfer/small_model.h"

#include <string>

namespace weightwire::bench {
namespace {

constexpr int64_t kHidden = 896, kInner = 4'864, kKeyValue = 128, kVocabulary = 151'936;
constexpr uint32_t kLayers = 24;

enum class Cut { kRows, kColumns, kNone };

uint16_t Pattern(uint32_t tensor, int64_t element) {
  const auto i = static_cast<uint64_t>(element);
  return static_cast<uint16_t>(tensor * 7'919u + i * 40'503u + (i >> 16));
}

class Builder {
 public:
  Builder() {
    model.source_tensor_bytes.resize(kSourceRanks);
    model.plan.id = {1, 2};
    model.plan.source_ranks = kSourceRanks;
    model.plan.target_ranks = 1;
    model.plan.streams.resize(kSourceRanks);
    for (uint32_t rank = 0; rank < kSourceRanks; ++rank) {
      model.plan.streams[rank].id = rank;
      model.plan.streams[rank].source_rank = rank;
    }
  }

  // Source rank = pp · 2 + tp. A tensor that is not cut comes from tp 0.
  void Add(const std::string& name, uint32_t pp, int64_t rows, int64_t columns, Cut cut) {
    const auto target = static_cast<uint32_t>(model.target_tensor_bytes.size());
    model.plan.tensor_names.push_back(name);
    model.target_tensor_bytes.push_back(static_cast<uint64_t>(2 * rows * columns));
    for (uint32_t tp = 0; tp < (cut == Cut::kNone ? 1u : 2u); ++tp) {
      const uint32_t rank = pp * 2 + tp;
      plan::CopyOp op;
      op.canonical = op.target_tensor = target;
      op.source_tensor = static_cast<uint32_t>(model.source_tensor_bytes[rank].size());
      op.extent = {cut == Cut::kRows ? rows / 2 : rows,
                   cut == Cut::kColumns ? columns / 2 : columns};
      op.source_stride = {op.extent[1], 1};
      op.target_stride = {columns, 1};
      if (tp == 1) op.target_offset = cut == Cut::kRows ? op.extent[0] * columns : op.extent[1];
      const int64_t bytes = 2 * op.extent[0] * op.extent[1];
      model.source_tensor_bytes[rank].push_back(static_cast<uint64_t>(bytes));
      model.plan.streams[rank].bytes += bytes;
      model.plan.bytes_total += bytes;
      model.plan.streams[rank].ops.push_back(std::move(op));
    }
  }

  SmallModel model;
};

template <typename Visit>
void ForEachElement(const plan::CopyOp& op, const Visit& visit) {
  for (int64_t row = 0; row < op.extent[0]; ++row) {
    for (int64_t column = 0; column < op.extent[1]; ++column) {
      visit(op.source_offset + row * op.source_stride[0] + column,
            op.target_offset + row * op.target_stride[0] + column);
    }
  }
}

}  // namespace

SmallModel MakeSmallModel() {
  Builder b;
  b.Add("model.embed_tokens.weight", 0, kVocabulary, kHidden, Cut::kRows);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const uint32_t pp = layer / (kLayers / 2);
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    b.Add(prefix + "input_layernorm.weight", pp, 1, kHidden, Cut::kNone);
    b.Add(prefix + "mlp.down_proj.weight", pp, kHidden, kInner, Cut::kColumns);
    b.Add(prefix + "mlp.gate_proj.weight", pp, kInner, kHidden, Cut::kRows);
    b.Add(prefix + "mlp.up_proj.weight", pp, kInner, kHidden, Cut::kRows);
    b.Add(prefix + "post_attention_layernorm.weight", pp, 1, kHidden, Cut::kNone);
    b.Add(prefix + "self_attn.k_proj.bias", pp, 1, kKeyValue, Cut::kColumns);
    b.Add(prefix + "self_attn.k_proj.weight", pp, kKeyValue, kHidden, Cut::kRows);
    b.Add(prefix + "self_attn.o_proj.weight", pp, kHidden, kHidden, Cut::kColumns);
    b.Add(prefix + "self_attn.q_proj.bias", pp, 1, kHidden, Cut::kColumns);
    b.Add(prefix + "self_attn.q_proj.weight", pp, kHidden, kHidden, Cut::kRows);
    b.Add(prefix + "self_attn.v_proj.bias", pp, 1, kKeyValue, Cut::kColumns);
    b.Add(prefix + "self_attn.v_proj.weight", pp, kKeyValue, kHidden, Cut::kRows);
  }
  b.Add("model.norm.weight", 1, 1, kHidden, Cut::kNone);
  return std::move(b.model);
}

transfer::Binding Allocate(const char* name, const std::vector<uint64_t>& tensor_bytes) {
  uint64_t end = 0;
  std::vector<uint64_t> offsets;
  for (uint64_t bytes : tensor_bytes) {
    offsets.push_back(end);
    end = (end + bytes + 63) / 64 * 64;
  }
  auto region = memory::MemoryRegion::Allocate(name, end).value();
  transfer::Binding binding;
  for (size_t i = 0; i < offsets.size(); ++i) {
    binding.push_back({region, offsets[i], tensor_bytes[i]});
  }
  return binding;
}

void FillSource(const SmallModel& model, uint32_t rank, const transfer::Binding& binding) {
  for (const plan::CopyOp& op : model.plan.streams[rank].ops) {
    auto* data = reinterpret_cast<uint16_t*>(binding[op.source_tensor].data());
    ForEachElement(
        op, [&](int64_t source, int64_t target) { data[source] = Pattern(op.canonical, target); });
  }
}

int64_t CheckTarget(const SmallModel& model, const transfer::Binding& binding) {
  int64_t wrong = 0;
  for (uint32_t tensor = 0; tensor < binding.size(); ++tensor) {
    const auto* data = reinterpret_cast<const uint16_t*>(binding[tensor].data());
    const auto elements = static_cast<int64_t>(model.target_tensor_bytes[tensor] / 2);
    for (int64_t i = 0; i < elements; ++i) wrong += data[i] != Pattern(tensor, i);
  }
  return wrong;
}

}  // namespace weightwire::bench
