#include "server/coordinator/integrity_report.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

namespace weightwire::coordinator {
namespace {

using content::Content;
using content::Leaf;
using kernels::KeyedSum;

/// One engine that could be read.
struct Read {
  const EngineAnswer* answer = nullptr;
  Content content;
};
/// Where a tensor was seen: `by` is null for what was known before.
struct SeenContent {
  const Read* by = nullptr;
  KeyedSum sum;
};
/// Name, dtype, elements: engines may have one tensor in several shapes (layout/joined.h).
using TensorKey = std::tuple<std::string, layout::DType, int64_t>;

std::string RanksText(const std::string& engine, const std::vector<uint32_t>& ranks) {
  std::string text;
  for (uint32_t rank : ranks)
    text += (text.empty() ? "" : ", ") + engine + "/" + std::to_string(rank);
  return text;
}

void AddDisagreements(const Read& read, IntegrityReport& out) {
  const content::HashPlan& hash_plan = *read.answer->hash_plan;
  const std::string& engine = read.answer->engine.name;
  for (const content::Disagreement& found : read.content.disagreements) {
    ContentDifference difference{engine, {found.rank}, hash_plan.tensors[found.tensor].name, {}};
    if (!found.outvoted && found.other_rank != found.rank) {
      difference.ranks = {found.other_rank, found.rank};
    }
    const std::string other = engine + "/" + std::to_string(found.other_rank);
    difference.text = found.other_rank == found.rank
                          ? "two copies on one rank differ"
                          : "its replicas differ: " + engine + "/" + std::to_string(found.rank) +
                                " has other bytes than " + other +
                                (found.outvoted ? " and most others" : "");
    out.Add(std::move(difference));
  }
}

/// Ranks of `read` that hold what differs: exactly those where the other engine has the same
/// layout.
std::vector<uint32_t> RanksThatDiffer(const Read& read, const Read* other, uint32_t tensor) {
  const content::HashPlan& hash_plan = *read.answer->hash_plan;
  if (other == nullptr || other->answer->hash_plan->id != hash_plan.id) {
    return content::HoldersOf(hash_plan, tensor);
  }
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < hash_plan.ranks.size(); ++rank) {
    const auto& parts = hash_plan.ranks[rank].parts;
    const bool differs = std::ranges::any_of(parts, [&](uint32_t part) {
      return hash_plan.parts[part].tensor == tensor &&
             read.content.parts[part] != other->content.parts[part];
    });
    if (differs) ranks.push_back(rank);
  }
  return ranks;
}

/// What is right: what was known, or what most engines have.
SeenContent Reference(const std::vector<SeenContent>& sights) {
  const auto known = std::ranges::find(sights, nullptr, &SeenContent::by);
  if (known != sights.end()) return *known;
  SeenContent best;
  std::ptrdiff_t most = 0;
  for (const SeenContent& sight : sights) {
    const auto same = std::ranges::count(sights, sight.sum, &SeenContent::sum);
    if (same > most) best = sight;
    most = std::max(most, same);
  }
  return best;
}

void CompareTensor(const std::string& tensor, const std::vector<SeenContent>& sights,
                   IntegrityReport& out) {
  const SeenContent right = Reference(sights);
  const auto same = std::ranges::count(sights, right.sum, &SeenContent::sum);
  for (const SeenContent& sight : sights) {
    if (sight.sum == right.sum) continue;
    const content::HashPlan& hash_plan = *sight.by->answer->hash_plan;
    const auto place = std::ranges::find(hash_plan.tensors, tensor, &layout::TensorSpec::name);
    const std::string& engine = sight.by->answer->engine.name;
    ContentDifference difference{
        engine,
        RanksThatDiffer(*sight.by, right.by,
                        static_cast<uint32_t>(place - hash_plan.tensors.begin())),
        tensor,
        {}};
    difference.text =
        "differs from " +
        (right.by == nullptr ? std::string("what was found for this epoch before")
                             : right.by->answer->engine.name +
                                   (same > 1 ? " and " + std::to_string(same - 1) + " more" : "")) +
        "; held by " + RanksText(engine, difference.ranks);
    out.Add(std::move(difference));
  }
}

std::vector<Read> ReadAll(const std::vector<EngineAnswer>& answers, IntegrityReport& out) {
  std::vector<Read> reads;
  for (const EngineAnswer& answer : answers) {
    out.engines.push_back(answer.engine);
    if (answer.engine.why.reason() == Reason::kDigestMismatch) {  // it has found that itself
      out.Add({answer.engine.name, {}, answer.engine.why.tensor(), answer.engine.why.message()});
    }
    if (!answer.engine.why.ok()) continue;
    reads.push_back({&answer, content::Combine(*answer.hash_plan, answer.sums)});
    const Content& content = reads.back().content;
    EngineContent& engine = out.engines.back();
    engine.content_class = content::ClassOf(content.leaves);
    engine.root = content::RootOf(content.leaves);
    engine.tensors = content.leaves.size();
    std::vector<bool> held(answer.hash_plan->tensors.size(), false);
    for (const content::HashPlan::Part& part : answer.hash_plan->parts) held[part.tensor] = true;
    engine.tensors_partial = static_cast<uint64_t>(std::ranges::count(held, true)) - engine.tensors;
    for (const auto& rank : answer.hash_plan->ranks) {
      for (const plan::CopyOp& op : rank.ops) engine.bytes += plan::WireBytes(op);
    }
  }
  return reads;
}

}  // namespace

void IntegrityReport::Add(ContentDifference difference) {
  ++differences_total;
  if (differences.size() < kDifferencesMax) differences.push_back(std::move(difference));
}

IntegrityReport Compare(const std::vector<EngineAnswer>& answers,
                        const std::map<Epoch, KnownContent>& known,
                        std::map<Epoch, KnownContent>* found) {
  IntegrityReport out;
  const std::vector<Read> reads = ReadAll(answers, out);
  std::map<Epoch, std::map<TensorKey, std::vector<SeenContent>>> sights;
  const auto see = [&](Epoch epoch, const Leaf& leaf, const Read* by) {
    sights[epoch][{leaf.tensor.name, leaf.tensor.dtype, content::Elements(leaf.tensor)}].push_back(
        {by, leaf.sum});
  };
  for (const Read& read : reads) {
    AddDisagreements(read, out);
    const Epoch epoch = read.answer->engine.epoch;
    for (const Leaf& leaf : read.content.leaves) see(epoch, leaf, &read);
  }
  for (const auto& [epoch, classes] : known) {
    if (!sights.contains(epoch)) continue;
    for (const auto& [content_class, leaves] : classes) {
      for (const Leaf& leaf : *leaves) see(epoch, leaf, nullptr);
    }
  }
  for (const auto& [epoch, tensors] : sights) {
    for (const auto& [key, seen] : tensors) CompareTensor(std::get<0>(key), seen, out);
  }
  const bool all_read =
      std::ranges::all_of(out.engines, [](const EngineContent& e) { return e.why.ok(); });
  out.equal = all_read && out.differences_total == 0;
  if (out.differences_total == 0) {
    for (const Read& read : reads) {
      (*found)[read.answer->engine.epoch][content::ClassOf(read.content.leaves)] =
          std::make_shared<const std::vector<Leaf>>(read.content.leaves);
    }
  }
  return out;
}

}  // namespace weightwire::coordinator
