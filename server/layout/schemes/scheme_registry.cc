#include "server/layout/schemes/scheme_registry.h"

#include <algorithm>

namespace weightwire::layout {
namespace {

constexpr std::string_view kHfOptions[] = {"mtp"};
constexpr std::string_view kMegatronSizes[] = {"cp", "dp", "ep", "etp", "pp", "tp", "vpp"};
constexpr std::string_view kMegatronOptions[] = {
    "account_embedding", "account_loss", "experts",  "first", "last", "layers", "mtp", "order",
    "pipeline",          "spec",         "vocab_pad"};
constexpr std::string_view kSglangSizes[] = {"dp", "ep", "pp", "tp"};
constexpr std::string_view kSglangOptions[] = {"layers", "redundant", "round_robin", "up_first",
                                               "vocab_pad_to"};
constexpr std::string_view kVllmSizes[] = {"dp", "pp", "tp"};
constexpr std::string_view kVllmOptions[] = {"ep",          "layers",   "redundant",
                                             "round_robin", "up_first", "vocab_pad_to"};

constexpr Scheme kSchemes[] = {
    {"hf", {}, kHfOptions, DeriveHf},
    {"megatron", kMegatronSizes, kMegatronOptions, DeriveMegatron},
    {"sglang", kSglangSizes, kSglangOptions, DeriveSglang},
    {"vllm", kVllmSizes, kVllmOptions, DeriveVllm},
};

std::string KnownKeys(const Scheme& scheme) {
  std::string text;
  for (std::string_view key : scheme.sizes)
    text.append(text.empty() ? "" : ", ").append(key).append("N");
  for (std::string_view key : scheme.options)
    text.append(text.empty() ? "" : ", ").append(key).append("=");
  return text.empty() ? "nothing" : text;
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
  if (unknown == nullptr) unknown = FirstUnknown(spec.options, scheme.options);
  if (unknown == nullptr) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                "scheme " + spec.scheme + " does not know \"" + *unknown + "\" as it is written")
      .Remedy("it knows " + KnownKeys(scheme));
}

Result<const Scheme*> FindScheme(const std::string& name) {
  std::string known;
  for (const Scheme& scheme : kSchemes) {
    if (scheme.name == name) return &scheme;
    known.append(known.empty() ? "" : ", ").append(scheme.name);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                     "no scheme is called \"" + name.substr(0, 64) + "\"")
                  .Remedy("use one of " + known + ", or send explicit layouts"));
}

}  // namespace

Result<ModelLayout> LayoutFromScheme(std::string_view config_json, const ParallelSpec& spec) {
  WW_ASSIGN(const Scheme* scheme, FindScheme(spec.scheme));
  WW_FAIL_IF_ERROR(CheckKeys(*scheme, spec));
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  return scheme->derive(model, spec);
}

}  // namespace weightwire::layout
