// u8 format, u8 kind, fields, u32 checksum (FNV-1a folded) over all before it. Integers are
// little-endian; a text is u32 length and bytes.
#include "server/wire/journal.h"

#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

namespace weightwire::wire {
namespace {

constexpr uint8_t kFormat = 1;
constexpr uint8_t kNamedCommit = 1;  // with the names of its engines: read, not written any more
constexpr uint8_t kReserve = 2;
constexpr uint8_t kNamedRollback = 3;  // the same, and behind it the epoch that is held
constexpr uint8_t kReserveOf = 4;      // a reservation, and behind it the history
constexpr uint8_t kDrain = 5;
constexpr uint8_t kCommit = 6;
constexpr uint8_t kCommitOfLineage = 7;  // the same, and behind it its lineage and the newest one
constexpr uint8_t kCommitOfRuns = 8;  // the same, and behind it which epochs are of which lineage
constexpr size_t kChecksumBytes = 4;

uint32_t ChecksumOf(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

class Writer {
 public:
  void Number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_.push_back(static_cast<char>(value >> (8 * i)));
  }
  void Text(std::string_view text) {
    Number(text.size(), 4);
    out_.append(text);
  }
  std::string Take() {
    Number(ChecksumOf(out_), kChecksumBytes);
    return std::move(out_);
  }

 private:
  std::string out_;
};

/// nullopt from where the bytes end on.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  std::optional<uint64_t> Number(size_t bytes) {
    if (rest_.size() < bytes) return std::nullopt;
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(rest_[i])) << (8 * i);
    }
    rest_.remove_prefix(bytes);
    return value;
  }
  std::optional<std::string> Text() {
    const auto size = Number(4);
    if (!size || rest_.size() < *size) return std::nullopt;
    std::string text(rest_.substr(0, *size));
    rest_.remove_prefix(*size);
    return text;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

tl::unexpected<Status> Damaged(const char* what) {
  return Fail(Code::kDataLoss, Reason::kJournalFailed, std::string("damaged record: ") + what);
}
/// Its checksum is right.
tl::unexpected<Status> OfNewerVersion(const char* what) {
  return tl::unexpected(Status(Code::kDataLoss, Reason::kJournalFailed,
                               std::string("a whole record of an unknown ") + what +
                                   ": a newer version of weightwired wrote it")
                            .Remedy("start that version again; or this one with another state_dir, "
                                    "where every rank begins anew"));
}

/// False: they are no runs of at most `newest` lineages, or bytes are left over.
bool ReadRuns(Reader& reader, uint64_t newest, std::vector<coordinator::LineageRun>& runs) {
  const auto count = reader.Number(4);
  if (!count || *count == 0 || *count > coordinator::kLineageRunsMax) return false;
  for (uint64_t i = 0; i < *count; ++i) {
    const auto from = reader.Number(8);
    const auto lineage = reader.Number(8);
    if (!from || !lineage || *lineage > newest) return false;
    if (!runs.empty() && *from <= runs.back().from.value) return false;
    runs.push_back({Epoch(*from), *lineage});
  }
  return reader.empty();
}

Result<coordinator::JournalRecord> CommitFrom(Reader reader, uint8_t kind) {
  const bool later = kind != kCommit;
  const auto epoch = reader.Number(8);
  const auto version = reader.Number(8);
  const auto held = reader.Number(8);
  const auto count = reader.Number(4);
  const auto digest = reader.Number(8);
  const auto lineage = later ? reader.Number(8) : coordinator::kFirstLineage;
  const auto newest = later ? reader.Number(8) : coordinator::kFirstLineage;
  const bool whole = epoch && version && held && count && digest && lineage && newest;
  if (!whole || (kind != kCommitOfRuns && !reader.empty())) return Damaged("wrong size");
  if ((*newest > coordinator::kFirstLineage) != later || *lineage > *newest) {
    return Damaged("lineages that cannot be");
  }
  coordinator::CommitRecord out{Epoch(*epoch), Version(*version), {}, Epoch(*held)};
  out.engines.count = static_cast<uint32_t>(*count);
  out.engines.digest = *digest;
  out.lineage = *lineage;
  out.newest = *newest;
  if (kind == kCommitOfRuns && !ReadRuns(reader, *newest, out.runs)) {
    return Damaged("lineages that cannot be");
  }
  return out;
}

Result<coordinator::JournalRecord> NamedCommitFrom(Reader reader, bool rollback) {
  coordinator::CommitRecord out;
  const auto epoch = reader.Number(8);
  const auto version = reader.Number(8);
  const auto count = reader.Number(4);
  if (!epoch || !version || !count) return Damaged("cut");
  for (uint64_t i = 0; i < *count; ++i) {
    auto engine = reader.Text();
    if (!engine) return Damaged("cut");
    out.engines.Add(*engine);
  }
  const auto held = rollback ? reader.Number(8) : std::optional<uint64_t>(0);
  if (!held || (*held == 0) == rollback) return Damaged("no epoch is held");
  if (!reader.empty()) return Damaged("bytes are left over");
  out.held = Epoch(*held);
  out.epoch = Epoch(*epoch);
  out.version = Version(*version);
  return out;
}

Result<coordinator::JournalRecord> ReserveFrom(Reader reader, bool named) {
  const auto limit = reader.Number(8);
  const auto history = named ? reader.Number(8) : std::optional<uint64_t>(0);
  if (!limit || !history || !reader.empty()) return Damaged("wrong size");
  if ((*history == 0) == named) return Damaged("no history is named");
  return coordinator::ReserveRecord{Epoch(*limit), JournalId(*history)};
}

Result<coordinator::JournalRecord> DrainFrom(Reader reader) {
  coordinator::DrainRecord out;
  const auto count = reader.Number(4);
  if (!count) return Damaged("cut");
  for (uint64_t i = 0; i < *count; ++i) {
    auto name = reader.Text();
    const auto incarnation = reader.Number(8);
    if (!name || !incarnation) return Damaged("cut");
    out.marks.push_back({std::move(*name), Incarnation(*incarnation)});
  }
  if (!reader.empty()) return Damaged("bytes are left over");
  return out;
}

void Write(Writer& writer, const coordinator::CommitRecord& commit) {
  // As long as there is one lineage, versions before them read the journal.
  const bool later = commit.newest > coordinator::kFirstLineage;
  const bool runs = later && !commit.runs.empty();
  writer.Number(runs ? kCommitOfRuns : later ? kCommitOfLineage : kCommit, 1);
  writer.Number(commit.epoch.value, 8);
  writer.Number(commit.version.value, 8);
  writer.Number(commit.held.value, 8);
  writer.Number(commit.engines.count, 4);
  writer.Number(commit.engines.digest, 8);
  if (!later) return;
  writer.Number(commit.lineage, 8);
  writer.Number(commit.newest, 8);
  if (!runs) return;
  writer.Number(commit.runs.size(), 4);
  for (const coordinator::LineageRun& run : commit.runs) {
    writer.Number(run.from.value, 8);
    writer.Number(run.lineage, 8);
  }
}

void Write(Writer& writer, const coordinator::ReserveRecord& reserve) {
  const bool named = reserve.history != JournalId{};
  writer.Number(named ? kReserveOf : kReserve, 1);
  writer.Number(reserve.limit.value, 8);
  if (named) writer.Number(reserve.history.value, 8);
}

void Write(Writer& writer, const coordinator::DrainRecord& drain) {
  writer.Number(kDrain, 1);
  writer.Number(drain.marks.size(), 4);
  for (const coordinator::DrainMark& mark : drain.marks) {
    writer.Text(mark.name);
    writer.Number(mark.incarnation.value, 8);
  }
}

}  // namespace

std::string EncodeRecord(const coordinator::JournalRecord& record) {
  Writer writer;
  writer.Number(kFormat, 1);
  std::visit([&](const auto& fields) { Write(writer, fields); }, record);
  return writer.Take();
}

Result<coordinator::JournalRecord> DecodeRecord(std::string_view bytes) {
  if (bytes.size() < kChecksumBytes) return Damaged("cut");
  const std::string_view body = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (Reader(bytes.substr(body.size())).Number(kChecksumBytes) != ChecksumOf(body)) {
    return Damaged("wrong checksum");
  }
  Reader reader(body);
  if (reader.Number(1) != kFormat) return OfNewerVersion("format");
  const auto kind = reader.Number(1);
  if (kind == kCommit || kind == kCommitOfLineage || kind == kCommitOfRuns) {
    return CommitFrom(reader, static_cast<uint8_t>(*kind));
  }
  if (kind == kNamedCommit || kind == kNamedRollback) {
    return NamedCommitFrom(reader, kind == kNamedRollback);
  }
  if (kind == kReserve || kind == kReserveOf) return ReserveFrom(reader, kind == kReserveOf);
  if (kind == kDrain) return DrainFrom(reader);
  return OfNewerVersion("kind");
}

namespace {

template <typename Record, typename... Records>
constexpr size_t IndexIn(const std::variant<Records...>*) {
  size_t index = 0;
  static_cast<void>(((std::is_same_v<Record, Records> || (++index, false)) || ...));
  return index;
}
template <typename Record>
constexpr size_t kIndexOf =
    IndexIn<Record>(static_cast<const coordinator::JournalRecord*>(nullptr));

}  // namespace

std::optional<size_t> KindOf(std::string_view head) {
  if (head.size() < kHeadBytes || head[0] != kFormat) return std::nullopt;
  switch (head[1]) {
    case kNamedCommit:
    case kNamedRollback:
    case kCommit:
    case kCommitOfLineage:
    case kCommitOfRuns:
      return kIndexOf<coordinator::CommitRecord>;
    case kReserve:
    case kReserveOf:
      return kIndexOf<coordinator::ReserveRecord>;
    case kDrain:
      return kIndexOf<coordinator::DrainRecord>;
    default:
      return std::nullopt;
  }
}

}  // namespace weightwire::wire
