// Everything that arrives as bytes over gRPC, from the journal or over the fd socket. The first
// byte of an input chooses the message (kinds.h). Beyond "no
// crash": what is accepted survives the way back to bytes and forth again, unchanged.
#include <google/protobuf/stubs/logging.h>
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/wire/control.h"
#include "server/wire/fd_protocol.h"
#include "server/wire/journal.h"
#include "server/wire/layout.h"
#include "server/wire/reports.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"
#include "tests/fuzz/kinds.h"

namespace weightwire::wire {
namespace {

/// Small bounds: the cost of a proof is not what is fuzzed.
constexpr layout::LayoutLimits kLimits = {.canonical_tensors_max = 1'000,
                                          .local_tensors_per_rank_max = 1'000,
                                          .pieces_per_rank_max = 10'000,
                                          .overlap_steps_max = 10'000};

/// `accept` gives what a message means; whatever it accepts must come back equal.
template <typename Message, typename Accept, typename Back>
void Same(std::string_view bytes, Accept accept, Back back) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const auto domain = accept(message);
  if (!domain) return;
  Message again;
  WW_CHECK(again.ParseFromString(back(*domain).SerializeAsString()));
  const auto repeated = accept(again);
  WW_CHECK(repeated.has_value());
  WW_CHECK(*repeated == *domain);
}

/// For what knows no equality: equal bytes instead.
template <typename Message, typename Accept, typename Back>
void SameBytes(std::string_view bytes, Accept accept, Back back) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const auto domain = accept(message);
  if (!domain) return;
  const Message once = back(*domain);
  const auto repeated = accept(once);
  WW_CHECK(repeated.has_value());
  WW_CHECK(back(*repeated).SerializeAsString() == once.SerializeAsString());
}

template <typename Message>
void Plain(std::string_view bytes) {
  Same<Message>(
      bytes, [](const Message& m) { return FromProto(m); },
      [](const auto& domain) { return ToProto(domain); });
}

void Layout(std::string_view bytes) {
  SameBytes<v1::LayoutSubmission>(
      bytes, [](const auto& m) { return FromProto("layout", m); },
      [](const auto& domain) { return ToProto(domain); });
  v1::LayoutSubmission message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const auto submission = FromProto("layout", message);
  if (!submission || !submission->canonical || !submission->layout) return;
  static_cast<void>(
      layout::ValidateRank(*submission->canonical, *submission->layout, kLimits).ok());
}

/// Parts one after another, each behind its size (u16, little-endian).
void Slice(std::string_view bytes) {
  SliceReader reader;
  while (bytes.size() >= 2) {
    const size_t size = static_cast<uint8_t>(bytes[0]) + 256u * static_cast<uint8_t>(bytes[1]);
    v1::SlicePart part;
    const std::string_view body = bytes.substr(2, size);
    if (!part.ParseFromArray(body.data(), static_cast<int>(body.size()))) return;
    if (!reader.Add(part).ok()) {
      WW_CHECK(!reader.Finish().has_value());
      return;
    }
    bytes.remove_prefix(2 + body.size());
  }
  auto slice = reader.Finish();
  if (!slice) return;
  SliceWriter writer(std::make_shared<const plan::RankSlice>(*slice), 4096, true);
  SliceReader again;
  v1::SlicePart part;
  while (writer.Next(&part)) WW_CHECK(again.Add(part).ok());
  WW_CHECK(again.Finish() == slice);
}

/// FNV-1a, folded: the checksum that ends a record (server/wire/journal.cc says so).
std::string Sealed(std::string_view body) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : body) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  const auto sum = static_cast<uint32_t>(hash ^ (hash >> 32));
  std::string record(body);
  for (int i = 0; i < 4; ++i) record.push_back(static_cast<char>(sum >> (8 * i)));
  return record;
}

/// As it is, and again with the checksum that a writer would have set: it is never guessed.
void Journal(std::string_view bytes) {
  const std::string mended =
      Sealed(bytes.substr(0, bytes.size() - std::min<size_t>(4, bytes.size())));
  for (const std::string_view record : {bytes, std::string_view(mended)}) {
    const auto read = DecodeRecord(record);
    if (!read) continue;
    const std::string again = EncodeRecord(*read);
    WW_CHECK(DecodeRecord(again) == *read);
    // Kinds that are only read any more come back as another kind.
    if (KindOf(record) && again[1] == record[1]) WW_CHECK(again == record);
  }
}

void Fd(std::string_view bytes) {
  if (bytes.size() != kFdFrameBytes) return;
  const std::span<const std::byte, kFdFrameBytes> frame(
      reinterpret_cast<const std::byte*>(bytes.data()), kFdFrameBytes);
  if (const auto request = DecodeFdRequest(frame)) {
    WW_CHECK(DecodeFdRequest(Encode(*request)) == request);
  }
  if (const auto reply = DecodeFdReply(frame)) WW_CHECK(DecodeFdReply(Encode(*reply)) == reply);
}

/// Each message twice: after it the reader may be inside of a report.
void ReadReports(std::string_view bytes) {
  v1::Reports message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  ReportsReader reader;
  ReportsWriter writer;
  std::vector<AgentReport> read;
  for (int i = 0; i < 2; ++i) {
    for (auto& report : reader.Add(message)) {
      if (!report) continue;
      writer.Add(ToProto(report->agent, report->report), 0);
      read.push_back(std::move(*report));
    }
  }
  ReportsReader again;
  auto expected = read.begin();
  while (!writer.empty()) {
    writer.Next(&message);
    for (const auto& report : again.Add(message)) WW_CHECK(*report == *expected++);
  }
  WW_CHECK(expected == read.end());
}

void One(fuzz::WireKind kind, std::string_view bytes) {
  using fuzz::WireKind;
  switch (kind) {
    case WireKind::kCommand:
      return Plain<v1::SessionDown>(bytes);
    case WireKind::kReport:
      return Same<v1::ReportRequest>(
          bytes, [](const auto& m) { return FromProto(m); },
          [](const AgentReport& report) { return ToProto(report.agent, report.report); });
    case WireKind::kRegister:
      return Plain<v1::RegisterRequest>(bytes);
    case WireKind::kHello:
      return Plain<v1::AgentHello>(bytes);
    case WireKind::kWelcome:
      return Plain<v1::AgentWelcome>(bytes);
    case WireKind::kPublish:
      return Plain<v1::PublishVersionRequest>(bytes);
    case WireKind::kSubmit:
      return SameBytes<v1::SubmitLayoutRequest>(
          bytes, [](const auto& m) { return FromProto(m); },
          [](const auto& domain) { return LayoutRequestOf(domain); });
    case WireKind::kSubmitReply:
      return SameBytes<v1::SubmitLayoutResponse>(
          bytes, [](const auto& m) { return FromProto(m); },
          [](const auto& domain) { return ToProto(domain); });
    case WireKind::kLayout:
      return Layout(bytes);
    case WireKind::kOutcome:
      return Same<v1::Outcome>(
          bytes, [](const auto& m) { return FromProto("outcome", m); },
          [](const Status& status) { return OutcomeOf(status); });
    case WireKind::kSlice:
      return Slice(bytes);
    case WireKind::kDetails:
      WW_CHECK(!FromCall(3, "message", bytes).ok());
      return;
    case WireKind::kJournal:
      return Journal(bytes);
    case WireKind::kFd:
      return Fd(bytes);
    case WireKind::kReports:
      return ReadReports(bytes);
    case WireKind::kEnd:
      return;
  }
}

}  // namespace
}  // namespace weightwire::wire

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // a line for each text that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weightwire::fuzz::WireKind;
  if (size == 0 || data[0] >= static_cast<uint8_t>(WireKind::kEnd)) return -1;
  weightwire::wire::One(static_cast<WireKind>(data[0]),
                        {reinterpret_cast<const char*>(data) + 1, size - 1});
  return 0;
}
