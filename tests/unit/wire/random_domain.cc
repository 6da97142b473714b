#include "tests/unit/wire/random_domain.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace weightwire::wire {
namespace {

layout::DType RandomDType(Dice& dice) { return static_cast<layout::DType>(1 + dice.Below(12)); }

layout::Shape RandomShape(Dice& dice) {
  layout::Shape shape(dice.Below(layout::kMaxDims + 1));
  for (int64_t& extent : shape) extent = static_cast<int64_t>(dice.Below(1'000'000));
  return shape;
}

std::vector<int64_t> RandomList(Dice& dice, size_t size) {
  std::vector<int64_t> out(size);
  for (int64_t& value : out) value = static_cast<int64_t>(dice.Next());
  return out;
}

PlanId RandomPlanId(Dice& dice) { return {dice.Next(), dice.Next()}; }

std::array<uint8_t, 16> RandomBytes16(Dice& dice) {
  std::array<uint8_t, 16> out;
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(dice.Next());
  return out;
}

std::map<std::string, std::string> RandomAddresses(Dice& dice) {
  std::map<std::string, std::string> out;
  for (size_t i = dice.Below(4); i > 0; --i) out[dice.Name(8)] = dice.Name(100);
  return out;
}

std::vector<epoch::Digest> RandomDigests(Dice& dice) {
  std::vector<epoch::Digest> out(dice.Below(6));
  for (auto& digest : out) {
    digest = {RandomPlanId(dice), static_cast<uint32_t>(dice.Next()), dice.Next()};
  }
  return out;
}

epoch::Contents RandomContents(Dice& dice) {
  epoch::Contents out;
  for (uint64_t epoch = 1 + dice.Below(40); out.size() < 5 && epoch > 0;
       epoch -= std::min(epoch, 1 + dice.Below(9))) {
    out.push_back({Epoch(epoch), Version(dice.Next())});
  }
  return out;
}

std::vector<epoch::Span> RandomSpans(Dice& dice) {
  std::vector<epoch::Span> out(dice.Below(4));
  for (epoch::Span& span : out) {
    span = {dice.Name(20),
            static_cast<int64_t>(dice.Next() >> 5),
            static_cast<int64_t>(dice.Next() >> 5),
            static_cast<int64_t>(dice.Next() >> 1),
            ParticipantId(static_cast<uint32_t>(dice.Next())),
            dice.Coin() ? dice.Name(8) : ""};
  }
  return out;
}

Epoch RandomEpoch(Dice& dice) { return Epoch(1 + dice.Below(1'000'000)); }

epoch::PeerAddress RandomPeer(Dice& dice) {
  return {AgentId(1 + static_cast<uint32_t>(dice.Below(99))), Incarnation(1 + dice.Below(99)),
          dice.Name(50), RandomAddresses(dice), RandomBytes16(dice)};
}

epoch::PrepareCommand RandomPrepare(Dice& dice) {
  epoch::PrepareCommand out;
  out.epoch = RandomEpoch(dice);
  out.kind = static_cast<epoch::Kind>(1 + dice.Below(3));
  if (out.kind == epoch::Kind::kRollback) out.held = RandomEpoch(dice);
  out.version = Version(dice.Next());
  out.content = RandomEpoch(dice);
  out.member = RandomMember(dice);
  out.role = dice.Coin() ? epoch::Role::kSource : epoch::Role::kTarget;
  for (size_t i = dice.Below(3); i > 0; --i) {
    out.assignments.push_back({RandomPlanId(dice), static_cast<uint32_t>(dice.Next()),
                               static_cast<uint32_t>(dice.Next())});
  }
  for (size_t i = dice.Below(4); i > 0; --i) {
    const auto rank = static_cast<uint32_t>(dice.Below(100));
    out.sources[rank] = RandomPeer(dice);
    out.source_participants[rank] = ParticipantId(1 + static_cast<uint32_t>(dice.Below(100)));
    out.admitted.emplace_back(RandomBytes16(dice), Incarnation(1 + dice.Below(100)));
    out.readers.push_back({ParticipantId(1 + static_cast<uint32_t>(dice.Below(100))),
                           static_cast<uint32_t>(dice.Next()),
                           out.admitted[dice.Below(out.admitted.size())].second});
  }
  out.relayed = dice.Coin();
  out.relay_readers = static_cast<uint32_t>(dice.Below(100));
  out.stall_limit = std::chrono::milliseconds(dice.Below(10'000));
  out.drops_readers = dice.Coin();
  out.trace_id = RandomBytes16(dice);
  out.lineage = dice.Next();
  return out;
}

/// Transform of a matrix's copy one of codes, or of scales, or one that passes codes on.
void QuantizeOp(Dice& dice, plan::CopyOp& op) {
  op.transform = static_cast<plan::Transform>(dice.Below(3));
  op.block = {1 + static_cast<int64_t>(dice.Below(9)), 1 + static_cast<int64_t>(dice.Below(9))};
  if (op.transform == plan::Transform::kElements) return;
  op.rule = static_cast<layout::ScaleRule>(dice.Below(4));
  op.source_dtype = static_cast<layout::DType>(1 + dice.Below(3));
  op.target_dtype = layout::DType::kF8E4M3;
  if (op.transform == plan::Transform::kCodes) return;
  op.target_dtype = op.rule == layout::ScaleRule::kQuotient  ? layout::DType::kF32
                    : op.rule == layout::ScaleRule::kOwnKind ? op.source_dtype
                                                             : layout::DType::kU8;
  for (size_t d = 0; d < 2; ++d) {
    op.source_extent.push_back(
        op.extent[d] * op.block[d] -
        static_cast<int64_t>(dice.Below(static_cast<uint64_t>(op.block[d]))));
  }
}

plan::CopyOp RandomOp(Dice& dice, size_t names) {
  plan::CopyOp op;
  op.canonical = static_cast<uint32_t>(dice.Below(names));
  op.source_tensor = static_cast<uint32_t>(dice.Next());
  op.target_tensor = static_cast<uint32_t>(dice.Next());
  op.source_dtype = RandomDType(dice);
  op.target_dtype = RandomDType(dice);
  op.source_offset = static_cast<int64_t>(dice.Below(1u << 30));
  op.target_offset = static_cast<int64_t>(dice.Below(1u << 30));
  for (size_t d = dice.Below(layout::kMaxDims + 1); d > 0; --d) {
    op.extent.push_back(1 + static_cast<int64_t>(dice.Below(60)));
    op.source_stride.push_back(1 + static_cast<int64_t>(dice.Below(1u << 20)));
    op.target_stride.push_back(1 + static_cast<int64_t>(dice.Below(1u << 20)));
  }
  if (op.extent.size() == 2 && dice.Below(2) == 0) QuantizeOp(dice, op);
  return op;
}

/// Counted apart from plan::WireBytes.
int64_t BytesOf(const plan::CopyOp& op) {
  static constexpr int kBytes[] = {0, 2, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1, 1};
  int64_t bytes = kBytes[static_cast<int>(op.target_dtype)];
  for (int64_t extent : op.extent) bytes *= extent;
  return bytes;
}

}  // namespace

uint64_t SeedFromEnvironment() {
  const char* seed = std::getenv("WEIGHTWIRE_SEED");
  return seed == nullptr ? 20'260'101 : std::strtoull(seed, nullptr, 0);
}

uint64_t Dice::Next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::string Dice::Name(size_t length_max) {
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEF0123456789._-";
  std::string out(1 + Below(length_max), 'x');
  for (char& c : out) c = kLetters[Below(kLetters.size())];
  return out;
}

Status RandomStatus(Dice& dice) {
  if (dice.Below(4) == 0) return OkStatus();
  return Status(static_cast<Code>(1 + dice.Below(16)), static_cast<Reason>(dice.Below(39)),
                dice.Name(200))
      .AtRank(dice.Coin() ? dice.Name(20) : "")
      .AtTensor(dice.Coin() ? dice.Name(80) : "")
      .AtEpoch(Epoch(dice.Below(9)))
      .Remedy(dice.Coin() ? dice.Name(100) : "");
}

epoch::Member RandomMember(Dice& dice) {
  return {ParticipantId(1 + static_cast<uint32_t>(dice.Below(1'000))),
          Incarnation(1 + (dice.Next() >> 1))};
}

control::AgentHello RandomHello(Dice& dice) {
  control::AgentHello out;
  out.job = dice.Name(30);
  out.name = dice.Name(30);
  out.incarnation = Incarnation(1 + (dice.Next() >> 1));
  out.host = dice.Name(60);
  out.addresses = RandomAddresses(dice);
  out.protocol_min = static_cast<uint16_t>(dice.Next());
  out.protocol_max = static_cast<uint16_t>(dice.Next());
  out.features = dice.Next();
  return out;
}

control::RegisterRequest RandomRegister(Dice& dice) {
  control::RegisterRequest out;
  out.agent = AgentId(1 + static_cast<uint32_t>(dice.Below(1'000)));
  out.job = dice.Name(30);
  out.role = dice.Coin() ? control::GroupRole::kTrainer : control::GroupRole::kEngine;
  out.group = dice.Name(30);
  out.rank = static_cast<uint32_t>(dice.Next());
  out.world_size = static_cast<uint32_t>(dice.Next());
  out.incarnation = Incarnation(1 + (dice.Next() >> 1));
  out.pid = static_cast<int64_t>(dice.Next());
  out.trace_id = RandomBytes16(dice);
  if (dice.Coin()) return out;
  out.claim.serving = {Epoch(dice.Next()), Version(dice.Next())};
  out.claim.holds = RandomContents(dice);
  out.claim.staged = Epoch(dice.Next());
  out.claim.content = Epoch(dice.Next());
  out.claim.told = dice.Coin();
  out.claim.released = Version(dice.Next() >> 1);
  return out;
}

control::PublishRequest RandomPublish(Dice& dice) {
  control::PublishRequest out;
  out.member = RandomMember(dice);
  out.version = Version(1 + (dice.Next() >> 1));
  out.manual_commit = dice.Coin();
  out.deadline = std::chrono::milliseconds(1 + dice.Below(1'000'000));
  out.trace_id = RandomBytes16(dice);
  out.number = dice.Next();
  out.lineage = dice.Next();
  return out;
}

control::WithdrawRequest RandomWithdraw(Dice& dice) {
  return {RandomMember(dice), Version(1 + (dice.Next() >> 1)), 1 + (dice.Next() >> 1)};
}

layout::RankLayout RandomRankLayout(Dice& dice) {
  layout::RankLayout out;
  for (size_t i = dice.Below(5); i > 0; --i) {
    layout::LocalTensor tensor{dice.Name(60), RandomDType(dice), RandomShape(dice), {}};
    for (size_t p = dice.Below(4); p > 0; --p) {
      const size_t ndim = dice.Below(layout::kMaxDims + 1);
      layout::Piece piece;
      piece.tensor = static_cast<uint32_t>(dice.Next());
      piece.box = {RandomList(dice, ndim), RandomList(dice, ndim)};
      piece.local_offset = static_cast<int64_t>(dice.Next());
      piece.local_stride = RandomList(dice, ndim);
      tensor.pieces.push_back(std::move(piece));
    }
    out.tensors.push_back(std::move(tensor));
  }
  return out;
}

layout::TraceRow RandomTraceRow(Dice& dice) {
  layout::TraceRow row;
  row.source = dice.Name(60);
  for (size_t i = dice.Below(4); i > 0; --i) row.ops.push_back({dice.Name(12), RandomShape(dice)});
  row.param = dice.Name(60);
  row.offset = static_cast<int64_t>(dice.Next());
  row.shape = RandomShape(dice);
  row.stride = RandomShape(dice);
  row.dtype = RandomDType(dice);
  return row;
}

std::vector<layout::ObservedTensor> RandomObserved(Dice& dice) {
  std::vector<layout::ObservedTensor> out;
  for (size_t i = dice.Below(5); i > 0; --i) {
    out.push_back({dice.Name(60), RandomDType(dice), RandomShape(dice)});
  }
  return out;
}

namespace {

control::LayoutSubmission RandomOfOneModel(Dice& dice) {
  control::LayoutSubmission out;
  if (dice.Coin()) {
    out.config_json = dice.Name(300);
    out.spec = dice.Name(40);
    if (dice.Coin()) {
      for (size_t i = 1 + dice.Below(5); i > 0; --i) out.trace.push_back(RandomTraceRow(dice));
      out.checkpoint = RandomObserved(dice);
    }
    out.observed = RandomObserved(dice);
    return out;
  }
  out.canonical.emplace();
  for (size_t i = dice.Below(5); i > 0; --i) {
    out.canonical->tensors.push_back({dice.Name(60), RandomDType(dice), RandomShape(dice)});
  }
  out.layout = RandomRankLayout(dice);
  return out;
}

}  // namespace

control::LayoutSubmission RandomSubmission(Dice& dice) {
  if (dice.Below(3) > 0) return RandomOfOneModel(dice);
  control::LayoutSubmission out;
  for (size_t i = 1 + dice.Below(4); i > 0; --i) {
    out.models.push_back({"model-" + std::to_string(dice.Below(100)),
                          static_cast<uint32_t>(dice.Below(9)),
                          static_cast<uint32_t>(dice.Below(9)), RandomOfOneModel(dice)});
  }
  return out;
}

epoch::Command RandomCommand(Dice& dice) {
  switch (dice.Below(10)) {
    case 0:
      return RandomPrepare(dice);
    case 1:
      return epoch::TransferCommand{RandomEpoch(dice), RandomMember(dice)};
    case 2:
      return epoch::ReleaseCommand{Epoch(dice.Below(3)), Version(dice.Next()), RandomMember(dice),
                                   RandomStatus(dice)};
    case 3:
      return epoch::CommitCommand{RandomEpoch(dice), Version(dice.Next()), RandomEpoch(dice),
                                  RandomMember(dice), dice.Coin()};
    case 4:
      return epoch::CommittedEverywhereCommand{RandomEpoch(dice), RandomMember(dice)};
    case 5:
      return epoch::AbortCommand{RandomEpoch(dice), RandomMember(dice), RandomStatus(dice)};
    case 6:
      return epoch::StaleCommand{RandomEpoch(dice), RandomMember(dice)};
    case 7:
      return epoch::HashCommand{dice.Next(), RandomEpoch(dice), RandomMember(dice),
                                RandomPlanId(dice), static_cast<uint32_t>(dice.Below(64))};
    case 8: {
      epoch::ExcludeCommand exclude{RandomEpoch(dice), RandomMember(dice), RandomPlanId(dice), {}};
      for (uint64_t i = dice.Below(4); i > 0; --i) {
        exclude.readers.emplace_back(static_cast<uint32_t>(1 + dice.Below(1000)));
      }
      return exclude;
    }
    default:
      return epoch::EvictCommand{RandomMember(dice), RandomStatus(dice)};
  }
}

epoch::Report RandomReport(Dice& dice) {
  const Epoch epoch = RandomEpoch(dice);
  const epoch::Member member = RandomMember(dice);
  switch (dice.Below(8)) {
    case 0:
      return epoch::PreparedReport{epoch, member, RandomContents(dice), RandomSpans(dice)};
    case 1:
      return epoch::SourceDoneReport{epoch, member, RandomDigests(dice), RandomSpans(dice)};
    case 2:
      return epoch::StagedReport{
          epoch,
          member,
          RandomDigests(dice),
          static_cast<int64_t>(dice.Next()),
          {{"shm", 7}, {"tcp", static_cast<int64_t>(dice.Next())}},
          static_cast<uint32_t>(dice.Next()),
          0.25,
          static_cast<int64_t>(dice.Next()),
          RandomContents(dice),
          RandomSpans(dice),
          {static_cast<int64_t>(dice.Next()), static_cast<int64_t>(dice.Next()),
           static_cast<int64_t>(dice.Next()), static_cast<int64_t>(dice.Next())}};
    case 3:
      return epoch::SwappedReport{epoch, member, 1.5, RandomSpans(dice)};
    case 4:
      return epoch::DrainedReport{epoch, member, RandomSpans(dice)};
    case 5:
      return epoch::FailedReport{epoch, member, RandomStatus(dice), dice.Coin()};
    case 6: {
      epoch::HashedReport out{epoch, member, dice.Next(), RandomStatus(dice), {}, 0.5};
      for (size_t i = dice.Below(9); i > 0; --i) out.sums.push_back({dice.Next(), dice.Next()});
      return out;
    }
    default:
      return epoch::LostReport{member, RandomStatus(dice)};
  }
}

plan::RankSlice RandomSlice(Dice& dice, size_t streams_max, size_t ops_max) {
  plan::RankSlice out;
  out.plan = RandomPlanId(dice);
  out.side = dice.Coin() ? plan::Side::kSource : plan::Side::kTarget;
  out.rank = static_cast<uint32_t>(dice.Below(64));
  for (size_t i = 1 + dice.Below(40); i > 0; --i) out.tensor_names.push_back(dice.Name(90));
  uint32_t id = 0;
  for (size_t s = dice.Below(streams_max + 1); s > 0; --s) {
    plan::Stream stream;
    stream.id = id;
    id += 1 + static_cast<uint32_t>(dice.Below(5));
    stream.source_rank = stream.target_rank = static_cast<uint32_t>(dice.Below(64));
    (out.side == plan::Side::kSource ? stream.source_rank : stream.target_rank) = out.rank;
    for (size_t o = 1 + dice.Below(ops_max); o > 0; --o) {
      stream.ops.push_back(RandomOp(dice, out.tensor_names.size()));
      stream.bytes += BytesOf(stream.ops.back());
    }
    out.streams.push_back(std::move(stream));
  }
  if (out.side == plan::Side::kSource || dice.Coin()) return out;
  out.gathered.dtype = static_cast<layout::DType>(1 + dice.Below(3));
  out.gathered.elements = 1 + static_cast<int64_t>(dice.Below(1u << 30));
  for (size_t o = 1 + dice.Below(ops_max); o > 0;) {
    plan::CopyOp op = RandomOp(dice, out.tensor_names.size());
    if (op.transform == plan::Transform::kElements) continue;
    out.gathered.made.push_back(std::move(op));
    --o;
  }
  return out;
}

coordinator::JournalRecord RandomRecord(Dice& dice) {
  if (dice.Coin()) {
    return coordinator::ReserveRecord{Epoch(dice.Next()), JournalId(dice.Coin() ? dice.Next() : 0)};
  }
  if (dice.Coin()) {
    coordinator::DrainRecord out;
    for (size_t i = dice.Below(5); i > 0; --i) {
      out.marks.push_back({dice.Name(40), Incarnation(dice.Next())});
    }
    return out;
  }
  coordinator::CommitRecord out{Epoch(dice.Next()), Version(dice.Next()), {}};
  for (size_t i = dice.Below(5); i > 0; --i) out.engines.Add(dice.Name(40));
  if (dice.Coin()) out.held = RandomEpoch(dice);
  if (dice.Coin()) out.newest = 2 + dice.Below(1'000'000);
  if (out.newest > 1) {
    out.lineage = dice.Below(out.newest + 1);
    Epoch from{};
    for (size_t i = dice.Below(coordinator::kLineageRunsMax + 1); i > 0; --i) {
      from = Epoch(from.value + 1 + dice.Below(1000));
      out.runs.push_back({from, dice.Below(out.newest + 1)});
    }
  }
  return out;
}

}  // namespace weightwire::wire
