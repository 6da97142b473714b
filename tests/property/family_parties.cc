// What each scheme is asked for. Options are drawn together with what they mean for the oracle, so
// that no text is parsed here.
#include <algorithm>

#include "tests/property/family_generator.h"

namespace weightwire {
namespace {

using family_oracle::Config;
using family_oracle::MegatronShape;

/// More ranks only repeat what fewer show, and cost time.
constexpr int64_t kRanksMax = 36;

std::string Dashed(const std::vector<int64_t>& counts) {
  std::string text;
  for (int64_t count : counts) text.append(text.empty() ? "" : "-").append(std::to_string(count));
  return text;
}

const std::vector<Pattern>& Patterns() {
  static const std::vector<Pattern> patterns = {
      {"*norm*", [](const std::string& name) { return name.find("norm") != name.npos; }},
      {"*.weight", [](const std::string& name) { return name.ends_with(".weight"); }},
      {"model.layers.0.*",
       [](const std::string& name) { return name.starts_with("model.layers.0."); }},
      {"*_proj.*", [](const std::string& name) { return name.find("_proj.") != name.npos; }},
      {"model.embed_tokens.weight",
       [](const std::string& name) { return name == "model.embed_tokens.weight"; }},
      {"model.layers.?.self_attn.*",
       [](const std::string& name) {
         return name.starts_with("model.layers.") && name.substr(14, 11) == ".self_attn.";
       }},
      {"*.experts.*", [](const std::string& name) { return name.find(".experts.") != name.npos; }},
  };
  return patterns;
}

void Write(Party& party, const char* word, const std::vector<Pattern>& patterns) {
  if (patterns.empty()) return;
  std::string text = std::string(word) + "=";
  for (size_t i = 0; i < patterns.size(); ++i)
    text.append(i == 0 ? "" : "|").append(patterns[i].glob);
  party.items.push_back(std::move(text));
}

}  // namespace

/// Mostly the same on both sides, or only on the target's, so that nothing is missing.
void FamilyGenerator::DrawFilters(Case& c) {
  if (!OneIn(5)) return;
  while (OneIn(2)) c.to.only.push_back(Pick(Patterns()));
  if (OneIn(2)) c.to.skip.push_back(Pick(Patterns()));
  if (OneIn(2)) {
    c.from.only = c.to.only;
    c.from.skip = c.to.skip;
  }
  if (OneIn(6)) c.from.skip.push_back(Pick(Patterns()));
  for (Party* party : {&c.from, &c.to}) {
    Write(*party, "only", party->only);
    Write(*party, "skip", party->skip);
  }
}

/// Adapters on both sides, or neither would have what the other wants.
void FamilyGenerator::DrawLora(Case& c) {
  c.from.lora = c.to.lora = In(1, 3);
  std::vector<std::string> targets;
  if (OneIn(2)) {
    for (const auto& [word, module] : family_oracle::LoraTargets()) {
      const bool latent = word.find('_') != word.npos;
      if (latent == c.config.Latent() || word == "o" || OneIn(40)) {
        if (OneIn(2)) targets.push_back(word);
      }
    }
  }
  std::string text;
  for (const std::string& word : targets) text.append(text.empty() ? "" : "|").append(word);
  for (Party* party : {&c.from, &c.to}) {
    party->targets = targets;
    party->items.push_back("lora=" + std::to_string(party->lora));
    if (!targets.empty()) party->items.push_back("targets=" + text);
  }
}

Party FamilyGenerator::DrawFsdp(const Config& c) {
  Party party;
  party.kind = Party::Kind::kFsdp;
  party.scheme = "fsdp";
  family_oracle::FsdpShape& s = party.fsdp;
  s.dp = In(1, 5);
  s.hsdp = OneIn(3) ? 2 : 1;
  s.zero3 = OneIn(3);
  if (!s.zero3 && OneIn(2)) s.tp = In(2, 3);
  if (!s.zero3 && OneIn(2)) s.dim = In(1, 2);
  Size(party, "dp", s.dp);
  Size(party, "hsdp", s.hsdp);
  Size(party, "tp", s.tp);
  if (s.dim > 0) party.items.push_back("dim=" + std::to_string(s.dim));
  if (s.zero3 || OneIn(2)) party.items.push_back(s.zero3 ? "kind=zero3" : "kind=fsdp2");
  party.mtp = !OneIn(c.mtp > 0 ? 2 : 20);
  if (!party.mtp) party.items.push_back("mtp=none");
  return party;
}

Party FamilyGenerator::DrawHuggingFace(const Config& c) {
  Party party;
  party.mtp = !OneIn(c.mtp > 0 ? 2 : 20);
  if (!party.mtp) party.items.push_back("mtp=none");
  return party;
}

Party FamilyGenerator::DrawMegatron(const Config& c, int64_t tp) {
  Party party;
  party.kind = Party::Kind::kMegatron;
  party.scheme = "megatron";
  MegatronShape& m = party.megatron;
  m.tp = tp;
  m.pp = In(1, std::min<int64_t>(4, c.layers));
  if (m.pp > 1 ? OneIn(2) : OneIn(60)) m.vpp = In(2, 3);
  m.dp = In(1, 4);
  m.cp = OneIn(4) ? In(2, 3) : 1;
  while (m.tp * m.pp * m.cp * m.dp > kRanksMax && (m.dp > 1 || m.cp > 1)) {
    m.dp > 1 ? --m.dp : --m.cp;
  }
  m.transformer_engine = OneIn(2);
  m.pp_before_dp = OneIn(3);
  party.mtp = m.mtp = !OneIn(c.mtp > 0 ? 4 : 20);
  Size(party, "tp", m.tp);
  Size(party, "pp", m.pp);
  Size(party, "vpp", m.vpp);
  Size(party, "cp", m.cp);
  Size(party, "dp", m.dp);
  if (m.transformer_engine || OneIn(2)) {
    party.items.push_back(m.transformer_engine ? "spec=te" : "spec=local");
  }
  if (m.pp_before_dp || OneIn(4)) {
    party.items.push_back(m.pp_before_dp ? "order=tp-cp-ep-pp-dp" : "order=tp-cp-ep-dp-pp");
  }
  if (!m.mtp) party.items.push_back("mtp=none");
  DrawExpertGrid(c, party);
  DrawPipeline(c, party);
  return party;
}

void FamilyGenerator::DrawExpertGrid(const Config& c, Party& party) {
  using Experts = MegatronShape::Experts;
  MegatronShape& m = party.megatron;
  m.experts = m.transformer_engine ? Experts::kTransformerEngine : Experts::kSequential;
  if (OneIn(2)) {
    const int64_t kind = In(0, c.Is({"gpt_oss"}) && !OneIn(6) ? 1 : 2);
    m.experts = kind == 0   ? Experts::kSequential
                : kind == 1 ? Experts::kTransformerEngine
                            : Experts::kGrouped;
    party.items.push_back(kind == 0   ? "experts=sequential"
                          : kind == 1 ? "experts=te"
                                      : "experts=grouped");
  }
  if (!c.Mixture() && !OneIn(40)) return;
  const int64_t stage = m.tp * m.cp * m.dp;
  m.etp = c.Mixture() ? m.tp : 1;  // when it is not said
  bool says_etp = OneIn(2);
  if (says_etp) m.etp = DivisorOf(stage);
  m.ep = OneIn(20) ? In(1, 4) : DivisorOf(std::max<int64_t>(1, stage / m.etp));
  if (m.pp > 1 && m.pp_before_dp && !OneIn(8)) {
    m.ep = DivisorOf(m.tp * m.cp);
    m.etp = m.tp * m.cp / m.ep;
    says_etp = true;
  }
  if (says_etp) party.items.push_back("etp" + std::to_string(m.etp));
  Size(party, "ep", m.ep);
}

void FamilyGenerator::DrawPipeline(const Config& c, Party& party) {
  MegatronShape& m = party.megatron;
  std::vector<std::string> items;
  do {
    items.clear();
    m.mtp_stage.reset();
    const int64_t kind = In(0, 5);
    if (kind == 0) {
      m.pipeline = family_oracle::EvenPipeline(c.layers, m.pp, m.vpp);
    } else if (kind == 1) {
      const bool embedding = OneIn(2), loss = !embedding || OneIn(2);
      if (embedding) items.push_back("account_embedding");
      if (loss) items.push_back("account_loss");
      m.pipeline = family_oracle::AccountedPipeline(c.layers, m.pp, m.vpp, embedding, loss);
    } else if (kind == 2 || kind == 3) {
      const int64_t first = OneIn(3) ? 0 : In(1, c.layers);
      const int64_t last = first > 0 && OneIn(3) ? 0 : In(1, c.layers);
      if (first > 0) items.push_back("first=" + std::to_string(first));
      if (last > 0) items.push_back("last=" + std::to_string(last));
      m.pipeline = family_oracle::FirstLastPipeline(c.layers, m.pp, m.vpp, first, last);
    } else {
      std::vector<int64_t> counts(static_cast<size_t>(OneIn(12) ? In(1, 9) : m.pp * m.vpp), 0);
      const int64_t listed = OneIn(12) ? In(0, 9) : c.layers;
      for (int64_t i = 0; i < listed; ++i) {
        ++counts[static_cast<size_t>(In(0, std::ssize(counts) - 1))];
      }
      const auto mtp_chunk = kind == 5 && m.mtp && c.mtp > 0 ? MtpChunk(counts, m.pp) : 0;
      if (mtp_chunk > 0) m.mtp_stage = mtp_chunk % m.pp;
      items.push_back(kind == 4 ? "layers=" + Dashed(counts)
                                : "pipeline=" + Notation(counts, m.mtp ? c.mtp : 0, mtp_chunk));
      m.pipeline = family_oracle::ListedPipeline(c.layers, m.pp, m.vpp, counts);
    }
  } while (!m.pipeline && !OneIn(20));
  party.items.insert(party.items.end(), items.begin(), items.end());
}

/// Any stage's last chunk that no layer comes behind; 0: the last one of all.
size_t FamilyGenerator::MtpChunk(const std::vector<int64_t>& counts, int64_t pp) {
  size_t least = counts.size() - std::min<size_t>(counts.size(), static_cast<size_t>(pp));
  for (size_t i = least; i < counts.size(); ++i) least = counts[i] > 0 ? i : least;
  return OneIn(2) ? 0
                  : static_cast<size_t>(In(static_cast<int64_t>(least), std::ssize(counts) - 1));
}

/// Megatron's layout text, with its repetitions: "Ett|(t|)*2t*3mL".
std::string FamilyGenerator::Notation(const std::vector<int64_t>& counts, int64_t mtp,
                                      size_t mtp_chunk) {
  std::vector<std::string> chunks;
  for (int64_t count : counts) {
    std::string text(static_cast<size_t>(count), 't');
    if (count > 0 && OneIn(3)) text = "t*" + std::to_string(count);
    if (count % 2 == 0 && count > 0 && OneIn(4)) text = "(tt)*" + std::to_string(count / 2);
    chunks.push_back(text);
  }
  chunks.front() = "E" + chunks.front();
  (mtp_chunk == 0 ? chunks.back() : chunks[mtp_chunk]) +=
      std::string(static_cast<size_t>(mtp), 'm');
  chunks.back() += "L";
  std::string text;
  for (size_t i = 0; i < chunks.size();) {
    size_t same = 1;
    while (i + same < chunks.size() && chunks[i + same] == chunks[i]) ++same;
    if (same > 1 && i + same < chunks.size() && OneIn(2)) {
      text += "(" + chunks[i] + "|)*" + std::to_string(same);
      i += same;
    } else {
      text += chunks[i] + (i + 1 < chunks.size() ? "|" : "");
      ++i;
    }
  }
  return text;
}

Party FamilyGenerator::DrawEngine(const Config& c, int64_t tp, bool sglang) {
  Party party;
  party.kind = Party::Kind::kEngine;
  party.scheme = sglang ? "sglang" : "vllm";
  party.mtp = false;
  family_oracle::EngineShape& e = party.engine;
  e.sglang = sglang;
  e.tp = tp;
  e.pp = OneIn(15) ? In(1, 4) : In(1, std::min<int64_t>(4, c.layers));
  e.dp = In(1, 3);
  while (e.tp * e.pp * e.dp > kRanksMax && e.dp > 1) --e.dp;
  Size(party, "tp", e.tp);
  Size(party, "pp", e.pp);
  Size(party, "dp", e.dp);
  DrawPlacement(c, party);
  if (!OneIn(3)) return party;
  // Not as the engine would do it by itself.
  const int64_t stages = OneIn(12) ? In(1, 4) : e.pp, floor = OneIn(8) ? 0 : 1;
  e.stage_layers.assign(static_cast<size_t>(stages), floor);
  for (int64_t rest = c.layers - stages * floor; rest > 0; --rest) {
    ++e.stage_layers[static_cast<size_t>(In(0, stages - 1))];
  }
  party.items.push_back("layers=" + Dashed(e.stage_layers));
  return party;
}

void FamilyGenerator::DrawPlacement(const Config& c, Party& party) {
  family_oracle::EngineShape& e = party.engine;
  if (c.Mixture() ? OneIn(2) : OneIn(40)) {
    if (e.sglang) {
      e.ep = OneIn(20) ? In(1, 4) : DivisorOf(e.tp);
      party.items.push_back("ep" + std::to_string(e.ep));
    } else {
      e.ep = 1;
      party.items.push_back("ep");
    }
  }
  if (e.ep > 0 || (e.sglang && c.Mixture()) ? OneIn(3) : OneIn(50)) {
    e.redundant = In(1, 3);
    party.items.push_back("redundant=" + std::to_string(e.redundant));
  }
  if (OneIn(c.Mixture() ? 3 : 20)) {
    e.round_robin = true;
    party.items.push_back("round_robin");
  }
  if (OneIn(c.Mixture() ? 3 : 20)) {
    e.up_first = true;
    party.items.push_back("up_first");
  }
}

void FamilyGenerator::DrawVocab(const Config& c, Party& party) {
  if (party.kind == Party::Kind::kEngine) {
    int64_t& to = party.engine.vocab_pad_to;
    if (64 % party.engine.tp == 0 && OneIn(2)) return;
    to = OneIn(10) ? In(1, 20) : party.engine.tp * In(1, 9);
    party.items.push_back("vocab_pad_to=" + std::to_string(to));
  }
  if (party.kind != Party::Kind::kMegatron) return;
  MegatronShape& m = party.megatron;
  const int64_t kind = In(0, 9);
  if (kind == 0) {
    const int64_t unit = 128 * m.tp;
    m.vocab_rows = (c.vocab + unit - 1) / unit * unit;
  } else if (kind == 1 ? OneIn(4) : kind < 4 && c.vocab % m.tp == 0) {
    m.vocab_rows = c.vocab;
    party.items.push_back("vocab_pad=none");
  } else {
    m.vocab_rows = OneIn(15) ? In(1, 60) : (c.vocab + m.tp - 1) / m.tp * m.tp + m.tp * In(0, 3);
    party.items.push_back("vocab_pad=" + std::to_string(m.vocab_rows));
  }
}

}  // namespace weightwire
