#include "server/transport/ucx/ucx_self_test.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace weightwire::transport {
namespace {

constexpr int kReads = 2;

uint64_t Word(Incarnation holder, uint64_t index) {
  return (index + 1) * 0x9e3779b97f4a7c15 ^ holder.value;
}

bool HoldsSelfTest(std::span<const std::byte> bytes, Incarnation holder) {
  for (uint64_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
    if (word != Word(holder, i)) return false;
  }
  return true;
}

}  // namespace

void FillUcxSelfTest(std::span<std::byte> bytes, Incarnation holder) {
  for (uint64_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    const uint64_t word = Word(holder, i);
    std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
  }
}

UcxSelfTest::UcxSelfTest(Session session, Incarnation peer, RegionKey own)
    : session_(std::move(session)), peer_(peer), own_(own), buffer_(kUcxSelfTestBytes) {}

void UcxSelfTest::Start() { session_.send({.type = FrameType::kSelfTest, .key = own_}); }

bool UcxSelfTest::OnFrame(const Frame& frame) {
  if (frame.type == FrameType::kSelfTest) {
    if (std::exchange(named_, true)) return false;
    theirs_ = frame.key;
    Read();
    return true;
  }
  if (frame.type != FrameType::kSelfTestEnd || !named_ || std::exchange(heard_, true)) return false;
  if (frame.code != Code::kOk) their_verdict_ = StatusOf(frame);
  MaybeEnd();
  return true;
}

void UcxSelfTest::Read() {
  std::memset(buffer_.data(), 0, buffer_.size());
  session_.get(theirs_, buffer_, [this, started = SystemClock().Now()](const Status& status) {
    OnRead(status, started);
  });
}

void UcxSelfTest::OnRead(const Status& status, Nanos started) {
  if (!status.ok()) return Tell(status);
  if (!HoldsSelfTest(buffer_, peer_)) {
    wrong_bytes_ = true;
    return Tell(TransportFailed("other bytes arrived than the peer holds"));
  }
  if (++reads_ < kReads) return Read();
  const std::chrono::duration<double> took = SystemClock().Now() - started;
  bytes_per_second_ = static_cast<double>(kUcxSelfTestBytes) / std::max(took.count(), 1e-9);
  Tell(OkStatus());
}

void UcxSelfTest::Tell(Status verdict) {
  verdict_ = std::move(verdict);
  told_ = true;
  session_.send(
      {.type = FrameType::kSelfTestEnd, .code = verdict_.code(), .reason = verdict_.reason()});
  MaybeEnd();
}

void UcxSelfTest::MaybeEnd() {
  if (!their_verdict_.ok()) return session_.ended(false);
  if (!told_ || !heard_ || !verdict_.ok()) return;
  buffer_ = {};
  session_.ended(true);
}

std::string UcxSelfTest::Words() const {
  if (!verdict_.ok()) return verdict_.message();
  if (!their_verdict_.ok()) return "the peer could not read from here";
  if (!named_) return "the peer did not begin its part";
  return told_ ? "the peer did not say whether it can read from here"
               : "a read of 1 MiB from the peer did not end";
}

}  // namespace weightwire::transport
