#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "server/base/status.h"

namespace weightwire::cli {

/// `wwctl token`: makes a job token with the coordinator's key, without asking anybody.
class TokenCommand {
 public:
  using Command = std::function<Result<std::string>()>;
  /// `chosen` is given what to run when `app` parses the command. Both outlive this object.
  TokenCommand(CLI::App& app, Command& chosen);

 private:
  Result<std::string> Run() const;

  std::string key_path_;
  std::string job_;
  std::string role_;
  std::string ranks_;
  std::string ns_ = "default";
  std::string domain_;
  double hours_ = 24;
};

}  // namespace weightwire::cli
