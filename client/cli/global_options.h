#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/cli/connection.h"

namespace weightwire::cli {

/// How an answer is printed.
enum class Output { kText, kWide, kJson };

/// The options that every command has, before or after its name: where the coordinator is, how to
/// speak to it, how to print. A flag beats the environment, which beats the default.
///
/// The environment is read here and not by CLI11: that reads it for every command, also for those
/// that were not asked for, and would overwrite the flag of the one that was.
class GlobalOptions {
 public:
  /// Before any command is added to `app`, which this object does not outlive.
  explicit GlobalOptions(CLI::App& app);

  /// What a command understands; without, its use is refused.
  enum Trait : unsigned { kOnline = 1, kJson = 2, kWide = 4 };
  void Allow(const CLI::App& command, unsigned traits) { traits_[&command] |= traits; }

  /// After the parse: reads the environment where there is no flag. kInvalidArgument: wrong usage.
  Status Settle();

  Connection Connect() const { return {address_, timeout_seconds_, files_}; }
  const std::string& address() const { return address_; }
  bool address_given() const { return address_given_; }
  const tls::TlsFiles& files() const { return files_; }
  double timeout_seconds() const { return timeout_seconds_; }
  bool timeout_given() const { return timeout_->count() > 0; }
  Output output() const { return output_; }
  bool json() const { return output_ == Output::kJson; }

 private:
  /// An option that an environment variable gives, too.
  struct Setting {
    CLI::Option* flag;
    const char* variable;
    std::string* value;
    bool flagged() const { return flag->count() > 0; }
  };
  void AddSetting(const char* flag, const char* variable, const std::string& about,
                  std::string& value, const char* group);
  Status SettleAddress();
  Status SettleTls();
  /// Why a file, named by one of `files_`, does not hold what that one is for; empty: it does.
  std::string WhyNotHeld(const std::string& path) const;
  Status SettleOutput();

  CLI::App& app_;
  std::vector<Setting> settings_;  ///< the address first, then cert, key, ca, name, token
  CLI::Option* timeout_;
  CLI::Option* output_option_;
  CLI::Option* json_flag_;
  std::map<const CLI::App*, unsigned> traits_;
  std::string address_ = "127.0.0.1:7411";
  bool address_given_ = false;
  double timeout_seconds_ = 10;
  tls::TlsFiles files_;
  std::string output_word_ = "text";
  bool json_alias_ = false;
  Output output_ = Output::kText;
};

/// The command that was asked for: the deepest one that was parsed; `app` when there is none.
const CLI::App& ChosenCommand(const CLI::App& app);
/// "wwctl layout show"
std::string FullName(const CLI::App& command);

/// A whole number in decimal. CLI11 on its own takes -1 for 18446744073709551615 and 010 for 8.
CLI::Validator Whole(uint64_t low, uint64_t high);
/// A number; not NaN.
CLI::Validator Real(double low, double high);

}  // namespace weightwire::cli
