#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "server/base/note.h"

namespace weightwire::rpc {

/// Fields of their own for what this thread logs while the object lives, where the log is JSON. Not
/// nested.
class LogFields {
 public:
  /// Those with an empty value are left out.
  LogFields(std::initializer_list<std::pair<std::string_view, std::string_view>> fields);
  ~LogFields();
  LogFields(const LogFields&) = delete;
  LogFields& operator=(const LogFields&) = delete;

  /// `,"trace_id":"…"` of this thread, to be inserted in a JSON object.
  static const std::string& Json();
  /// ` trace=…` of this thread, for the end of a line of text; the other fields are in its message.
  static const std::string& Text();
};

/// `text` as a JSON string, in quotes, at the end of `out`.
void AppendJsonText(std::string_view text, std::string& out);

/// Logs "epoch 7 (version 3): …" with the fields trace_id, epoch, version and rank, at info or warn
/// level.
void LogNote(const Note& note);

}  // namespace weightwire::rpc
