#include "server/layout/schemes/fsdp_order.h"

#include <algorithm>
#include <charconv>

namespace weightwire::layout {
namespace {

struct FamilyOrder {
  std::string_view family;
  bool experts_first = false;  ///< before the router
};
constexpr FamilyOrder kFamilies[] = {
    {"deepseek_v2", true},
    {"deepseek_v3", true},
    {"gemma"},
    {"gemma2"},
    {"gemma3_text"},
    {"glm4_moe", true},
    {"gpt_oss"},
    {"llama"},
    {"mistral"},
    {"mixtral"},
    {"qwen2"},
    {"qwen2_moe"},
    {"qwen3"},
    {"qwen3_moe"},
};

/// Parts of names: those that are found beside one another in a module stand in its order.
constexpr std::string_view kWords[] = {
    // a module's own parameters
    "sinks", "weight", "bias", "gate_up_proj", "gate_up_proj_bias",
    // the model
    "model", "embed_tokens", "layers", "self_attn",
    // attention
    "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa",
    "kv_a_layernorm", "kv_b_proj", "o_proj", "q_norm", "k_norm",
    // mixtures of experts
    "mlp", "block_sparse_moe", "router", "gate", "experts", "shared_expert", "shared_expert_gate",
    "gate", "shared_experts",
    // dense MLPs, experts
    "gate_proj", "up_proj", "down_proj", "down_proj_bias", "w1", "w2", "w3",
    // norms of a layer, the end of the model
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "norm", "lm_head"};

/// The place of a part among its neighbours; −1 when it is not known.
int64_t PlaceOf(std::string_view part, bool experts_first) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
  if (error == std::errc() && end == part.data() + part.size()) return number;
  const auto first = std::find(std::begin(kWords), std::end(kWords), part);
  if (first == std::end(kWords)) return -1;
  if (!experts_first) return first - std::begin(kWords);
  const auto last = std::find(std::rbegin(kWords), std::rend(kWords), part);
  return last.base() - 1 - std::begin(kWords);
}

struct Placed {
  std::vector<int64_t> places;
  uint32_t tensor = 0;
};

Status Unknown(std::string message) {
  return Status(Code::kInvalidArgument, Reason::kUnknownModel, std::move(message))
      .Remedy("flat parameters need that order: use kind=fsdp2, or send explicit layouts");
}

}  // namespace

Status SortInModuleOrder(std::string_view family, const CanonicalSpace& canonical,
                         std::vector<uint32_t>& tensors) {
  const auto order =
      std::find_if(std::begin(kFamilies), std::end(kFamilies),
                   [family](const FamilyOrder& known) { return known.family == family; });
  if (order == std::end(kFamilies)) {
    return Unknown("the order of parameters in models of family " + std::string(family) +
                   " is not known");
  }
  std::vector<Placed> placed;
  for (uint32_t tensor : tensors) {
    const std::string& name = canonical.tensors[tensor].name;
    std::vector<int64_t> places;
    std::string_view rest = name;
    for (bool more = true; more;) {
      const size_t dot = rest.find('.');
      places.push_back(PlaceOf(rest.substr(0, dot), order->experts_first));
      if (places.back() < 0) {
        return Unknown("where \"" + std::string(rest.substr(0, dot)) +
                       "\" stands in its module is not known")
            .AtTensor(name);
      }
      more = dot != std::string_view::npos;
      if (more) rest.remove_prefix(dot + 1);
    }
    placed.push_back({std::move(places), tensor});
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.places < b.places; });
  std::transform(placed.begin(), placed.end(), tensors.begin(),
                 [](const Placed& one) { return one.tensor; });
  return OkStatus();
}

}  // namespace weightwire::layout
