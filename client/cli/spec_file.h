#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::cli {

/// Whether `spec` names a YAML file (….yaml, ….yml) instead of being a parallel spec itself.
bool IsSpecFile(const std::string& spec);

/// The parallel spec that a YAML file writes as a map: `scheme`, and one key for each word.
///
///   scheme: megatron       # megatron:tp8,ep32,first=7,skip=*.mlp.gate.weight
///   tp: 8
///   ep: 32                 # a size; `ep: true` where the word is a flag (vllm)
///   first: 7
///   skip: ["*.mlp.gate.weight"]
///
/// Lists are joined as the word wants it: numbers by '-', texts by '|'. `false` is as if the key
/// were left out.
///   kInvalidArgument / kIoError        the file cannot be read
///   kInvalidArgument / kConfigInvalid  names file, line, what is wrong and what to write
Result<std::string> SpecFromFile(const std::string& path);

}  // namespace weightwire::cli
