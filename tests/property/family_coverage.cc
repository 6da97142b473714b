#include "tests/property/family_coverage.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace weightwire {
namespace {

constexpr const char* kSides[] = {"from fsdp",   "from hf",   "from megatron",
                                  "from sglang", "from vllm", "to hf",
                                  "to megatron", "to sglang", "to vllm"};

constexpr const char* kWords[] = {
    "hf mtp=none",
    "fsdp dp",
    "fsdp hsdp",
    "fsdp tp",
    "fsdp dim",
    "fsdp kind=fsdp2",
    "fsdp kind=zero3",
    "fsdp mtp=none",
    "fsdp lora",
    "fsdp targets",
    "hf lora",
    "hf targets",
    "megatron lora",
    "megatron targets",
    "vllm lora",
    "vllm targets",
    "sglang lora",
    "sglang targets",
    "fsdp only",
    "fsdp skip",
    "hf only",
    "hf skip",
    "megatron only",
    "megatron skip",
    "vllm only",
    "vllm skip",
    "sglang only",
    "sglang skip",
    "megatron tp",
    "megatron pp",
    "megatron vpp",
    "megatron cp",
    "megatron dp",
    "megatron ep",
    "megatron etp",
    "megatron order=tp-cp-ep-dp-pp",
    "megatron order=tp-cp-ep-pp-dp",
    "megatron spec=local",
    "megatron spec=te",
    "megatron experts=sequential",
    "megatron experts=grouped",
    "megatron experts=te",
    "megatron mtp=none",
    "megatron first",
    "megatron last",
    "megatron layers",
    "megatron pipeline",
    "megatron account_embedding",
    "megatron account_loss",
    "megatron vocab_pad",
    "megatron vocab_pad=none",
    "vllm tp",
    "vllm pp",
    "vllm dp",
    "vllm ep",
    "vllm redundant",
    "vllm round_robin",
    "vllm up_first",
    "vllm layers",
    "vllm vocab_pad_to",
    "sglang tp",
    "sglang pp",
    "sglang dp",
    "sglang ep",
    "sglang redundant",
    "sglang round_robin",
    "sglang up_first",
    "sglang layers",
    "sglang vocab_pad_to",
    "config q_lora_rank",
    "config no q_lora_rank",
    "config MTP layers 1",
    "config MTP layers 2",
    "config tied",
    "config fewer kv heads than tp",
};

/// "tp2" → "tp", "first=3" → "first", "spec=te" as it is, "" for a size of 1.
std::string WordOf(const std::string& item) {
  const size_t digit = item.find_first_of("0123456789");
  const size_t equals = item.find('=');
  if (equals == std::string::npos) {
    return item.substr(std::min(digit, item.size())) == "1" ? "" : item.substr(0, digit);
  }
  const bool free_text = item.starts_with("pipeline=") || item.starts_with("only=") ||
                         item.starts_with("skip=") || item.starts_with("targets=");
  return digit == equals + 1 || free_text ? item.substr(0, equals) : item;
}

}  // namespace

void FamilyCoverage::Add(const Case& drawn) {
  const family_oracle::Config& c = drawn.config;
  std::map<std::string, int>& family = families_[c.family];
  ++family["from " + drawn.from.scheme];
  ++family["to " + drawn.to.scheme];
  for (const Party* party : {&drawn.from, &drawn.to}) {
    const bool megatron = party->kind == Party::Kind::kMegatron;
    const int64_t tp = megatron ? party->megatron.tp : party->engine.tp;
    if (!c.Latent() && tp > c.kv_heads) ++words_["config fewer kv heads than tp"];
    for (const std::string& item : party->items) {
      const std::string word = WordOf(item);
      if (!word.empty()) ++words_[party->scheme + " " + word];
    }
  }
  if (c.Latent()) ++words_[c.q_lora > 0 ? "config q_lora_rank" : "config no q_lora_rank"];
  if (c.mtp > 0) ++words_["config MTP layers " + std::to_string(c.mtp)];
  if (c.tied) ++words_["config tied"];
}

std::vector<std::string> FamilyCoverage::Missing() const {
  std::vector<std::string> missing;
  for (const std::string& family : family_oracle::KnownFamilies()) {
    const auto it = families_.find(family);
    for (const char* side : kSides) {
      family_oracle::Config config;
      config.family = family;
      if (!config.Describes(std::string(side).substr(std::string(side).find(' ') + 1))) continue;
      if (it == families_.end() || !it->second.contains(side)) {
        missing.push_back(family + " " + side);
      }
    }
  }
  for (const char* word : kWords) {
    if (!words_.contains(word)) missing.push_back(word);
  }
  return missing;
}

std::string FamilyCoverage::Table() const {
  std::ostringstream out;
  out << std::left << std::setw(12) << "transfers";
  for (const char* side : kSides) out << std::right << std::setw(14) << side;
  for (const auto& [family, counts] : families_) {
    out << '\n' << std::left << std::setw(12) << family;
    for (const char* side : kSides) {
      const auto it = counts.find(side);
      out << std::right << std::setw(14) << (it == counts.end() ? 0 : it->second);
    }
  }
  std::string line;
  for (const auto& [word, count] : words_) {
    if (line.size() + word.size() > 100 || line.empty()) {
      out << line;
      line = "\n  ";
    }
    line += word + ": " + std::to_string(count) + "; ";
  }
  out << line << '\n';
  return out.str();
}

}  // namespace weightwire
