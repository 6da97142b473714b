// fuzz_seeds SOURCE_DIR OUT: writes OUT/{wire,frames,layout,delta}/…, the fuzzers' first inputs:
// messages as weightwire itself makes them, the configs and recorded loaders of tests/data.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "server/delta/coder.h"
#include "server/plan/plan_bytes.h"
#include "server/transfer/notify.h"
#include "server/transport/tcp/tcp_preamble.h"
#include "server/transport/ucx/ucx_messages.h"
#include "server/wire/control.h"
#include "server/wire/fd_protocol.h"
#include "server/wire/journal.h"
#include "server/wire/layout.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"
#include "tests/fuzz/kinds.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::fuzz {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kEach = 12;  ///< of every kind of message

class Seeds {
 public:
  explicit Seeds(fs::path into) : into_(std::move(into)) { fs::create_directories(into_); }
  template <typename Kind>
  void Add(Kind kind, std::string_view bytes) {
    std::ofstream file(into_ / std::to_string(count_++), std::ios::binary);
    file.put(static_cast<char>(kind));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    WW_CHECK(file.good());
  }
  template <typename Kind, typename Bytes>
  void AddBytes(Kind kind, const Bytes& bytes) {
    Add(kind, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }

 private:
  fs::path into_;
  int count_ = 0;
};

std::string Text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  WW_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string SliceParts(const plan::RankSlice& slice) {
  wire::SliceWriter writer(std::make_shared<const plan::RankSlice>(slice), 4096, false);
  std::string out;
  v1::SlicePart part;
  while (writer.Next(&part)) {
    const std::string body = part.SerializeAsString();
    out += static_cast<char>(body.size() & 0xff);
    out += static_cast<char>(body.size() >> 8);
    out += body;
  }
  return out;
}

void Wire(Seeds& seeds) {
  for (uint64_t seed = 1; seed <= kEach; ++seed) {
    wire::Dice dice(seed);
    seeds.Add(WireKind::kCommand, wire::ToProto(wire::RandomCommand(dice)).SerializeAsString());
    seeds.Add(WireKind::kReport,
              wire::ToProto(AgentId(3), wire::RandomReport(dice)).SerializeAsString());
    v1::Reports reports;
    *reports.add_reports() = wire::ToProto(AgentId(1), wire::RandomReport(dice));
    *reports.add_reports() = wire::ToProto(AgentId(1), wire::RandomReport(dice));
    seeds.Add(WireKind::kReports, reports.SerializeAsString());
    seeds.Add(WireKind::kRegister, wire::ToProto(wire::RandomRegister(dice)).SerializeAsString());
    seeds.Add(WireKind::kHello, wire::ToProto(wire::RandomHello(dice)).SerializeAsString());
    seeds.Add(WireKind::kPublish, wire::ToProto(wire::RandomPublish(dice)).SerializeAsString());
    const control::LayoutSubmission submission = wire::RandomSubmission(dice);
    seeds.Add(WireKind::kSubmit, wire::LayoutRequestOf(submission).SerializeAsString());
    seeds.Add(WireKind::kLayout, wire::ToProto(submission).SerializeAsString());
    const control::LayoutReply reply{
        std::make_shared<const layout::RankLayout>(wire::RandomRankLayout(dice)),
        {seed, ~seed},
        {"a note"}};
    seeds.Add(WireKind::kSubmitReply, wire::ToProto(reply).SerializeAsString());
    const Status status = wire::RandomStatus(dice);
    seeds.Add(WireKind::kOutcome, wire::OutcomeOf(status).SerializeAsString());
    seeds.Add(WireKind::kDetails, wire::EncodeDetails(status));
    seeds.Add(WireKind::kSlice, SliceParts(wire::RandomSlice(dice, 3, 4)));
    seeds.Add(WireKind::kJournal, wire::EncodeRecord(wire::RandomRecord(dice)));
    const auto op = dice.Coin() ? wire::FdOp::kPut : wire::FdOp::kGet;
    seeds.AddBytes(WireKind::kFd, wire::Encode(wire::FdRequest{op, dice.Next()}));
    seeds.AddBytes(WireKind::kFd, wire::Encode(wire::FdReply{Reason::kNone, dice.Next()}));
  }
  const control::AgentWelcome welcome{AgentId(3), 1, std::chrono::seconds(1),
                                      std::chrono::seconds(5), JournalId(11)};
  seeds.Add(WireKind::kWelcome, wire::ToProto(welcome).SerializeAsString());
}

void Frames(Seeds& seeds) {
  using namespace transport;
  for (auto type = static_cast<uint16_t>(FrameType::kGet);
       type <= static_cast<uint16_t>(FrameType::kSelfTestEnd); ++type) {
    const Frame frame{static_cast<FrameType>(type), Code::kOk, Reason::kNone, 7, {3, 1}, 0, 96};
    std::array<std::byte, kFrameBytes> bytes{};
    EncodeFrame(frame, bytes);
    seeds.AddBytes(FrameKind::kFrame, bytes);
    const std::vector<std::byte> payload(frame.type == FrameType::kGet ? 0 : 48);
    seeds.AddBytes(FrameKind::kUcxMessage, EncodeUcxMessage(frame, payload));
  }
  CallerHello caller_hello;
  caller_hello.caller = Incarnation{5};
  caller_hello.callee = Incarnation{6};
  caller_hello.shown.fill(7);
  seeds.AddBytes(FrameKind::kHello, EncodeCallerHello(caller_hello));
  seeds.AddBytes(FrameKind::kChallenge, EncodeCalleeProof({{1, 2}, {3, 4}}));
  seeds.AddBytes(FrameKind::kProof, EncodeCallerProof({5, 6}));
  seeds.AddBytes(FrameKind::kHelloReply, EncodeCalleeReply({1, 0, Code::kOk, Reason::kNone}));
  seeds.AddBytes(FrameKind::kPreamble, EncodeOpen({caller_hello, 4}));
  seeds.AddBytes(FrameKind::kPreamble, EncodeJoin({{1, 2, 3}, 2, {4}}));
  seeds.AddBytes(FrameKind::kWelcome,
                 EncodeWelcome({{1, 0, Code::kOk, Reason::kNone}, {1, 2, 3}, 4}));
  std::string ranges(8, '\0');
  ranges[0] = 100;
  const std::vector<UcxRange> two = {{1, 4096, 60}, {2, 8192, 40}};
  for (std::byte byte : EncodeUcxRanges(two)) ranges += static_cast<char>(byte);
  seeds.Add(FrameKind::kUcxRanges, ranges);
  for (auto type = static_cast<uint8_t>(transfer::NotifyType::kOpen);
       type <= static_cast<uint8_t>(transfer::NotifyType::kFail); ++type) {
    transfer::Notify notify;
    notify.type = static_cast<transfer::NotifyType>(type);
    notify.key = {Epoch{9}, 11, 2, ParticipantId{1}, ParticipantId{5}};
    seeds.AddBytes(FrameKind::kNotify, transfer::EncodeNotify(notify).span());
  }
}

/// A recorded loader without all but the first rows of each rank: a seed is for being changed.
std::string Shortened(const std::string& trace) {
  nlohmann::json json = nlohmann::json::parse(trace);
  for (auto& rank : json["ranks"]) {
    auto& copies = rank["copies"];
    if (copies.size() > 12) copies.erase(copies.begin() + 12, copies.end());
  }
  return json.dump();
}

void Layouts(Seeds& seeds, const fs::path& data) {
  const std::vector<std::string> specs = {"megatron:tp2,pp2,first=1",
                                          "megatron:tp2,ep2,etp1,spec=te,experts=grouped",
                                          "vllm:tp4,vocab_pad_to=64",
                                          "vllm:tp2,ep2",
                                          "sglang:tp2",
                                          "fsdp:dp4,kind=fsdp1",
                                          "hf",
                                          "hf:only=model.layers.0.*,skip=*.bias",
                                          "vllm:tp2,lora=8,targets=q|v"};
  for (const std::string& spec : specs) seeds.Add(LayoutKind::kSpec, spec);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(data / "transformers")) files.push_back(entry);
  std::ranges::sort(files);
  size_t next = 0;
  for (const fs::path& file : files) {
    if (file.extension() != ".json") continue;
    const auto json = nlohmann::json::parse(Text(file));
    if (!json.contains("config")) continue;
    seeds.Add(LayoutKind::kScheme, specs[next++ % specs.size()] + "\n" + json["config"].dump());
  }
  WW_CHECK(next > 20);
  for (const auto& entry : fs::directory_iterator(data / "vllm-traces")) {
    seeds.Add(LayoutKind::kTrace, Shortened(Text(entry)));
  }
  wire::Dice dice(1);
  for (uint64_t i = 0; i < kEach; ++i) {
    const plan::RankSlice slice = wire::RandomSlice(dice, 3, 3);
    plan::TransferPlan plan;
    plan.id = slice.plan;
    plan.streams = slice.streams;
    plan.tensor_names = slice.tensor_names;
    for (uint32_t at = 0; at < plan.streams.size(); ++at) plan.streams[at].id = at;
    seeds.Add(LayoutKind::kPlan, plan::ToBytes(plan));
  }
}

/// Of every order; the block's size follows the order.
void Deltas(Seeds& seeds) {
  constexpr size_t kBytes = 1024;
  delta::Coder coder(kBytes);
  for (int i = 0; i < kernels::kDeltaOrders; ++i) {
    for (const size_t apart : {1, 9, 70, 400}) {
      std::vector<std::byte> base(kBytes, std::byte{0x3f}), now = base;
      for (size_t at = 0; at < kBytes; at += apart) now[at] = static_cast<std::byte>(at * 37);
      const auto code = coder.Encode(static_cast<kernels::DeltaOrder>(i), base, now, kBytes);
      if (code.bytes.empty()) continue;
      std::string bytes = {static_cast<char>(kBytes & 0xff), static_cast<char>(kBytes >> 8)};
      bytes.append(reinterpret_cast<const char*>(code.bytes.data()), code.bytes.size());
      seeds.Add(i, bytes);
      // The versions instead of the code: see delta_fuzz.cc.
      bytes.resize(2);
      bytes.append("\xff\x0f", 2);
      for (const std::byte byte : now) bytes += static_cast<char>(byte);
      seeds.Add(i + kernels::kDeltaOrders, bytes);
    }
  }
}

}  // namespace
}  // namespace weightwire::fuzz

int main(int argc, char** argv) {
  using namespace weightwire::fuzz;
  if (argc != 3) {
    std::fputs("usage: fuzz_seeds SOURCE_DIR OUT\n", stderr);
    return 64;
  }
  const fs::path source = argv[1], out = argv[2];
  Seeds wire(out / "wire"), frames(out / "frames"), layout(out / "layout"), delta(out / "delta");
  Wire(wire);
  Frames(frames);
  Layouts(layout, source / "tests/data");
  Deltas(delta);
  return 0;
}
