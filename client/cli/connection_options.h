#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "client/cli/connection.h"

namespace weightwire::cli {

/// --address and --timeout of a command that asks a running coordinator.
struct ConnectionOptions {
  std::string address = "127.0.0.1:7411";
  double timeout_seconds = 10;

  void AddTo(CLI::App& command) {
    command.add_option("--address", address, "Coordinator, HOST:PORT")
        ->envname("WEIGHTWIRE_ADDRESS")
        ->capture_default_str();
    command.add_option("--timeout", timeout_seconds, "Seconds for each call")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
  }
  Connection Connect() const { return {address, timeout_seconds}; }
};

}  // namespace weightwire::cli
