#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/layout/types.h"

/// What the commands share that need no running service.
namespace weightwire::cli {

///   kInvalidArgument / kIoError  cannot be read; `remedy` says what belongs there
Result<std::string> ReadFile(const std::string& path, const std::string& remedy);
///   kInvalidArgument / kIoError  cannot be written
Status WriteFile(const std::string& path, const std::string& bytes);

/// The text of a model's config.json; layout::NotesOfConfig's sentences about it go to stderr.
Result<std::string> ReadConfig(const std::string& path);
/// What the ranks of `spec` ("vllm:tp4", or a file: spec_file.h) hold of the model. Errors:
/// SpecFromFile's and layout::LayoutFromScheme's.
Result<layout::ModelLayout> LayoutOf(const std::string& config, const std::string& spec);

/// "0-3, 6, 9-12"
std::string RanksText(const std::vector<uint32_t>& ranks);
/// Whether a shell pattern (*, ?, [a-z]) matches; an empty pattern matches everything.
bool Matches(const std::string& pattern, const std::string& text);

}  // namespace weightwire::cli
