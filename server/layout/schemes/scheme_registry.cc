#include "server/layout/schemes/scheme_registry.h"

#include <algorithm>

#include "server/layout/scheme_words.h"
#include "server/layout/schemes/filter.h"
#include "server/layout/schemes/linear_attention.h"
#include "server/layout/schemes/lora.h"
#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

/// What every scheme knows; read by LayoutFromScheme itself.
constexpr std::string_view kCommonOptions[] = {"lora", "only", "replicas", "skip", "targets"};

constexpr std::string_view kFsdpSizes[] = {"dp", "hsdp", "tp"};
constexpr std::string_view kFsdpOptions[] = {"align", "dim", "kind", "mtp"};
constexpr std::string_view kHfOptions[] = {"mtp"};
constexpr std::string_view kMegatronSizes[] = {"cp", "dp", "ep", "etp", "pp", "tp", "vpp"};
constexpr std::string_view kMegatronOptions[] = {"account_embedding",
                                                 "account_loss",
                                                 "conv",
                                                 "experts",
                                                 "first",
                                                 "last",
                                                 "layers",
                                                 "layout",
                                                 "model",
                                                 "mtp",
                                                 "order",
                                                 "out_norm",
                                                 "pipeline",
                                                 "spec",
                                                 "vocab_pad"};
constexpr std::string_view kSglangSizes[] = {"dp", "ep", "pp", "tp"};
constexpr std::string_view kSglangOptions[] = {"layers",      "mtp",      "redundant",
                                               "round_robin", "up_first", "vocab_pad_to"};
constexpr std::string_view kVllmSizes[] = {"dp", "pp", "tp"};
constexpr std::string_view kVllmOptions[] = {"ep",          "layers",   "mtp",         "redundant",
                                             "round_robin", "up_first", "vocab_pad_to"};

constexpr Scheme kSchemes[] = {
    {"fsdp", kFsdpSizes, kFsdpOptions, true, DeriveFsdp},
    {"hf", {}, kHfOptions, true, DeriveHf},
    {"megatron", kMegatronSizes, kMegatronOptions, false, DeriveMegatron},
    {"sglang", kSglangSizes, kSglangOptions, true, DeriveSglang},
    {"vllm", kVllmSizes, kVllmOptions, true, DeriveVllm},
};

std::vector<std::string_view> OptionsOf(const Scheme& scheme) {
  std::vector<std::string_view> options(scheme.options.begin(), scheme.options.end());
  options.insert(options.end(), std::begin(kCommonOptions), std::end(kCommonOptions));
  return options;
}

std::string KnownKeys(const Scheme& scheme) {
  std::string text;
  for (std::string_view key : scheme.sizes)
    text.append(text.empty() ? "" : ", ").append(key).append("N");
  for (std::string_view key : OptionsOf(scheme))
    text.append(text.empty() ? "" : ", ").append(key).append("=");
  return text;
}

template <typename Map>
const std::string* FirstUnknown(const Map& given, std::span<const std::string_view> known) {
  for (const auto& [key, value] : given) {
    if (std::find(known.begin(), known.end(), key) == known.end()) return &key;
  }
  return nullptr;
}

Status CheckKeys(const Scheme& scheme, const ParallelSpec& spec) {
  const std::string* unknown = FirstUnknown(spec.sizes, scheme.sizes);
  if (unknown == nullptr) unknown = FirstUnknown(spec.options, OptionsOf(scheme));
  if (unknown == nullptr) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                "scheme " + spec.scheme + ": unknown option \"" + *unknown + "\"")
      .Remedy("it knows " + KnownKeys(scheme));
}

/// replicas=N: independent engines with equal ranks, one engine behind another.
Status Replicate(const ParallelSpec& spec, ModelLayout& layout) {
  WW_ASSIGN_OR_STATUS(const std::optional<int64_t> replicas, IntegerOption(spec, "replicas", 1));
  if (!replicas) return OkStatus();
  const size_t ranks = layout.ranks.size();
  const size_t most = LayoutLimits{}.ranks_max / std::max<size_t>(ranks, 1);
  if (static_cast<size_t>(*replicas) > most) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "replicas=" + std::to_string(*replicas) + " of " + std::to_string(ranks) +
                      " ranks give more than " + std::to_string(LayoutLimits{}.ranks_max) +
                      " ranks");
  }
  layout.ranks.reserve(ranks * static_cast<size_t>(*replicas));
  for (size_t i = ranks; i < ranks * static_cast<size_t>(*replicas); ++i) {
    layout.ranks.push_back(layout.ranks[i - ranks]);
  }
  return OkStatus();
}

Result<const Scheme*> FindScheme(std::string_view name) {
  std::string known;
  for (const Scheme& scheme : kSchemes) {
    if (scheme.name == name) return &scheme;
    known.append(known.empty() ? "" : ", ").append(scheme.name);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                     "no scheme is called \"" + std::string(name.substr(0, 64)) + "\"")
                  .Remedy("use one of " + known + ", or send explicit layouts"));
}

}  // namespace

Result<ModelLayout> LayoutFromScheme(std::string_view config_json, const ParallelSpec& spec) {
  WW_ASSIGN(const Scheme* scheme, FindScheme(spec.scheme));
  WW_FAIL_IF_ERROR(CheckKeys(*scheme, spec));
  WW_ASSIGN(const MtpWord mtp, MtpOption(spec));
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json, mtp));
  const bool lora = spec.options.contains("lora");
  if (lora || !scheme->quantized) config.scales.reset();
  if (config.scales && !config.scales->InEngines() && spec.scheme != "hf") {
    return Fail(Status(Code::kInvalidArgument, Reason::kUnknownModel,
                       "weights in " + std::string(config.scales->name) +
                           " are described for scheme hf alone, found " + spec.scheme)
                    .Remedy("engines repack them after loading: give the engine's own loader the "
                            "tensors of a checkpoint (hf)"));
  }
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  if (!lora && spec.options.contains("targets")) {
    return Fail(BadOption("targets", spec.options.at("targets"), "known without lora="));
  }
  WW_ASSIGN(ModelLayout layout,
            lora ? DeriveLora(model, *scheme, spec) : scheme->derive(model, spec));
  WW_FAIL_IF_ERROR(ApplyFilters(spec, layout));
  if (!lora) WW_FAIL_IF_ERROR(RefuseComputed(model, spec, layout));
  WW_FAIL_IF_ERROR(Replicate(spec, layout));
  return layout;
}

Result<SchemeWords> WordsOf(std::string_view name) {
  WW_ASSIGN(const Scheme* scheme, FindScheme(name));
  return SchemeWords{{scheme->sizes.begin(), scheme->sizes.end()}, OptionsOf(*scheme)};
}

}  // namespace weightwire::layout
