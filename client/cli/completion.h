#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace weightwire::cli {

/// A script for `shell` ("bash" or "zsh") that completes the commands and options of `app`, and
/// leaves the values of options to the shell (files).
std::string CompletionScript(const CLI::App& app, const std::string& shell);

}  // namespace weightwire::cli
