#pragma once

#include <optional>
#include <span>

#include "server/layout/families/config.h"
#include "server/layout/scheme.h"

namespace weightwire::layout {

/// The option's value as an integer from `least` on; nullopt when it is not given.
///   kInvalidArgument / kUnknownScheme  the value is no such integer
Result<std::optional<int64_t>> IntegerOption(const ParallelSpec& spec, const std::string& key,
                                             int64_t least);
/// Which of `choices` the option names; nullopt when it is not given.
///   kInvalidArgument / kUnknownScheme  none of them
Result<std::optional<size_t>> ChoiceOption(const ParallelSpec& spec, const std::string& key,
                                           std::span<const std::string_view> choices);
/// The parts of `text` between separators: at least one, which may be empty.
std::vector<std::string_view> SplitList(std::string_view text, char separator);
/// "7-7-6" as numbers from 0 on. Errors as above.
Result<std::vector<int64_t>> ParseDashedList(std::string_view key, std::string_view text);
/// "option key=value is not …" as kInvalidArgument / kUnknownScheme.
Status BadOption(std::string_view key, std::string_view value, std::string_view wanted);

/// `mtp=none|single|fused`. Errors as above.
Result<MtpWord> MtpOption(const ParallelSpec& spec);
/// Decoder and MTP layers; `mtp=none` leaves the latter out. Errors as above.
Result<int64_t> LayersWithMtp(const ModelConfig& config, const ParallelSpec& spec);
/// Whether the word `key` stands in the spec. Errors as above.
Result<bool> FlagOption(const ParallelSpec& spec, const std::string& key);

}  // namespace weightwire::layout
