#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/base/ids.h"
#include "server/transport/frame.h"
#include "server/transport/operation.h"

namespace weightwire::transport {

/// What each side holds for the other to read.
inline constexpr uint64_t kUcxSelfTestBytes = 1 << 20;
/// Depends on the holder, so that the memory of another process is not mistaken for its own.
void FillUcxSelfTest(std::span<std::byte> bytes, Incarnation holder);

/// Proves a fresh session in both directions before anybody uses it. Each side names an export of a
/// known pattern (kSelfTest), reads the other's twice, compares, and tells its verdict
/// (kSelfTestEnd). The second read is the measured one: the first pays for keys and lanes.
///
/// A side that is not content tells so and waits for the peer to end the session, or for the
/// deadline, which is the session's to keep. On the loop.
class UcxSelfTest {
 public:
  /// What it needs of its session.
  struct Session {
    std::function<void(const Frame&)> send;
    std::function<void(RegionKey key, MutableSpan into, Endpoint::GetDone done)> get;
    /// Called once, when both verdicts are good or theirs is bad. The self-test may not be
    /// destroyed in it.
    std::function<void(bool passed)> ended;
  };

  UcxSelfTest(Session session, Incarnation peer, RegionKey own);
  void Start();
  /// False: the frame has no place in a self-test.
  [[nodiscard]] bool OnFrame(const Frame& frame);

  /// A verdict was bad.
  bool failed() const { return !verdict_.ok() || !their_verdict_.ok(); }
  /// Why it failed, or what it still waits for.
  std::string Words() const;
  /// As a label: "wrong_bytes" or "failed".
  const char* cause() const { return wrong_bytes_ ? "wrong_bytes" : "failed"; }
  /// Once passed.
  double bytes_per_second() const { return bytes_per_second_; }

 private:
  void Read();
  void OnRead(const Status& status, Nanos started);
  void Tell(Status verdict);
  void MaybeEnd();

  const Session session_;
  const Incarnation peer_;
  const RegionKey own_;
  RegionKey theirs_;
  bool named_ = false;  ///< they have named their export
  int reads_ = 0;
  bool told_ = false;   ///< our verdict
  bool heard_ = false;  ///< theirs
  bool wrong_bytes_ = false;
  Status verdict_;        ///< ours
  Status their_verdict_;  ///< once heard
  std::vector<std::byte> buffer_;
  double bytes_per_second_ = 0;
};

}  // namespace weightwire::transport
