#pragma once

#include <cstdint>

/// The first byte of an input: what the rest is. Append only, so that kept inputs stay what they
/// are.
namespace weightwire::fuzz {

enum class WireKind : uint8_t {
  kCommand,
  kReport,
  kRegister,
  kHello,
  kWelcome,
  kPublish,
  kSubmit,
  kSubmitReply,
  kLayout,
  kOutcome,
  kSlice,
  kDetails,
  kJournal,
  kFd,
  kReports,
  kEnd
};

enum class FrameKind : uint8_t {
  kFrame,
  kHello,
  kHelloReply,
  kPreamble,
  kWelcome,
  kUcxMessage,
  kUcxRanges,
  kNotify,
  kChallenge,
  kProof,
  kEnd
};

enum class LayoutKind : uint8_t {
  kSpec,    ///< a parallel spec
  kScheme,  ///< a parallel spec, a line feed, a config.json
  kTrace,   ///< a recorded loader
  kPlan,    ///< a plan file of wwctl
  kEnd
};

}  // namespace weightwire::fuzz
