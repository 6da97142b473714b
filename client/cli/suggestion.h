#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace weightwire::cli {

/// After a parse that failed: the first word that `app` did not understand, and the command or
/// option that was probably meant. "" when it understood all words.
std::string UnknownWord(const CLI::App& app);

}  // namespace weightwire::cli
