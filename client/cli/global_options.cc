#include "client/cli/global_options.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <type_traits>

#include "server/daemon/listen_address.h"
#include "server/tls/certificate.h"

namespace weightwire::cli {
namespace {

constexpr double kSecondsMin = 0.001;
constexpr double kSecondsMax = 86'400;

template <typename Number>
CLI::Validator InRange(Number low, Number high, const char* kind) {
  std::ostringstream range;
  range.precision(15);
  range << low << " to " << high;
  return CLI::Validator(
      [low, high, text = range.str()](std::string& word) {
        Number number{};
        const char* end = word.data() + word.size();
        const auto [stop, error] = std::from_chars(word.data(), end, number);
        const bool good = error == std::errc() && stop == end && number >= low && number <= high;
        if (!good) return "'" + word + "' is not in " + text;
        if constexpr (std::is_integral_v<Number>) word = std::to_string(number);
        return std::string();
      },
      std::string(kind) + " " + range.str());
}

/// "" when gRPC may dial it. Targets with a scheme are gRPC's to judge.
std::string WhyNotAddress(const std::string& address) {
  for (const char* scheme : {"dns:", "unix:", "ipv4:", "ipv6:"}) {
    if (address.starts_with(scheme)) return "";
  }
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  if (!port.empty() && port.find_first_not_of("0123456789") == std::string::npos) {
    const std::string why = Whole(1, 65'535)(std::string(port));
    if (!why.empty()) return "'" + address + "': the port " + why;
  }
  const auto parsed = daemon::ParseHostPort(address);
  return parsed ? "" : parsed.error().message() + "; " + parsed.error().remedy();
}

Status Usage(const std::string& what) {
  return {Code::kInvalidArgument, Reason::kInvalidRequest, what};
}

}  // namespace

const CLI::App& ChosenCommand(const CLI::App& app) {
  const CLI::App* chosen = &app;
  while (!chosen->get_subcommands().empty()) chosen = chosen->get_subcommands().front();
  return *chosen;
}

std::string FullName(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name()
                           : FullName(*parent).append(" ").append(command.get_name());
}

CLI::Validator Whole(uint64_t low, uint64_t high) { return InRange(low, high, "in"); }
CLI::Validator Real(double low, double high) { return InRange(low, high, "in"); }

GlobalOptions::GlobalOptions(CLI::App& app) : app_(app) {
  app.fallthrough();  // commands inherit it: an option that is not theirs may be one of these
  app.footer("`wwctl --help` lists the options that every command takes: --address, -o, TLS.");
  AddSetting("--address", "WEIGHTWIRE_ADDRESS", "Coordinator, HOST:PORT", address_, "Options");
  settings_.front().flag->check(
      CLI::Validator([](std::string& word) { return WhyNotAddress(word); }, ""));
  settings_.front().flag->capture_default_str();
  timeout_ = app.add_option("--timeout", timeout_seconds_, "Seconds for each call")
                 ->check(Real(kSecondsMin, kSecondsMax))
                 ->capture_default_str();
  output_option_ = app.add_option("-o,--output", output_word_,
                                  "How to print: text; wide: every column and row; json")
                       ->check(CLI::IsMember({"text", "wide", "json"}))
                       ->capture_default_str();
  json_flag_ = app.add_flag("--json", json_alias_, "The same as -o json");
  AddSetting("--tls-cert", "WEIGHTWIRE_TLS_CERT", "Own certificate (PEM)", files_.cert, "TLS");
  AddSetting("--tls-key", "WEIGHTWIRE_TLS_KEY", "Its private key (PEM)", files_.key, "TLS");
  AddSetting("--tls-ca", "WEIGHTWIRE_TLS_CA", "CA certificate (PEM)", files_.ca, "TLS");
  AddSetting("--tls-server-name", "WEIGHTWIRE_TLS_SERVER_NAME",
             "Name in the coordinator's certificate, where it is not that of --address",
             files_.server_name, "TLS");
  AddSetting("--token-file", "WEIGHTWIRE_TOKEN_FILE",
             "Job token, with --tls-ca, instead of certificate and key", files_.token, "TLS");
}

void GlobalOptions::AddSetting(const char* flag, const char* variable, const std::string& about,
                               std::string& value, const char* group) {
  CLI::Option* option = app_.add_option(flag, value, about + "; else $" + variable)->group(group);
  settings_.push_back({option, variable, &value});
}

Status GlobalOptions::Settle() {
  for (const Setting& setting : settings_) {
    const char* given = setting.flagged() ? nullptr : std::getenv(setting.variable);
    if (given != nullptr && *given != '\0') *setting.value = given;
  }
  const CLI::App& command = ChosenCommand(app_);
  const auto known = traits_.find(&command);
  if (known == traits_.end() || (known->second & kOnline) == 0) {
    for (const Setting& setting : settings_) {
      if (!setting.flagged()) continue;
      return Usage("`" + FullName(command) + "` asks no coordinator, and takes no " +
                   setting.flag->get_name());
    }
    return SettleOutput();
  }
  WW_RETURN_IF_ERROR(SettleAddress());
  WW_RETURN_IF_ERROR(SettleTls());
  return SettleOutput();
}

Status GlobalOptions::SettleAddress() {
  const Setting& setting = settings_.front();
  const char* given = std::getenv(setting.variable);
  address_given_ = setting.flagged() || (given != nullptr && *given != '\0');
  const std::string why = WhyNotAddress(address_);
  return why.empty() ? OkStatus() : Usage(std::string(setting.variable) + ": " + why);
}

Status GlobalOptions::SettleTls() {
  const Setting &cert = settings_[1], &key = settings_[2], &token = settings_[5];
  const bool own = cert.flagged() || key.flagged();
  // Who names one kind of credential by flags does not mean the other one of the environment.
  if (own && !token.flagged()) token.value->clear();
  if (!own && token.flagged()) {
    cert.value->clear();
    key.value->clear();
  }
  if (files_.cert.empty() != files_.key.empty()) {
    return Usage(
        "--tls-cert and --tls-key ($WEIGHTWIRE_TLS_CERT, $WEIGHTWIRE_TLS_KEY) belong together");
  }
  if (!files_.cert.empty() && !files_.token.empty()) {
    return Usage(
        "either --tls-cert with --tls-key, or --token-file ($WEIGHTWIRE_TLS_CERT, "
        "$WEIGHTWIRE_TOKEN_FILE)");
  }
  if (files_.ca.empty() && !(files_.cert.empty() && files_.token.empty())) {
    return Usage("TLS needs --tls-ca, or $WEIGHTWIRE_TLS_CA");
  }
  // gRPC would log what its own threads find, and the call would fail as if nobody listened.
  for (const Setting& setting : settings_) {
    if (&setting == &settings_.front() || setting.value == &files_.server_name) continue;
    if (setting.value->empty()) continue;
    const std::string why = access(setting.value->c_str(), R_OK) != 0
                                ? *setting.value + ": " + std::strerror(errno)
                                : WhyNotHeld(*setting.value);
    if (why.empty()) continue;
    return Usage((setting.flagged() ? setting.flag->get_name() : setting.variable) + ": " + why);
  }
  return OkStatus();
}

std::string GlobalOptions::WhyNotHeld(const std::string& path) const {
  Status status;
  if (&path == &files_.key) {  // one file may be both
    status = tls::CheckKeyOf(files_.cert, path);
  } else if (&path != &files_.token) {
    status = tls::CheckCertificate(path);
  }
  return status.message();
}

Status GlobalOptions::SettleOutput() {
  if (json_alias_ && output_option_->count() > 0 && output_word_ != "json") {
    return Usage("--json is -o json; -o " + output_word_ + " asks for something else");
  }
  output_ = json_alias_ || output_word_ == "json" ? Output::kJson
            : output_word_ == "wide"              ? Output::kWide
                                                  : Output::kText;
  const CLI::App& command = ChosenCommand(app_);
  const auto known = traits_.find(&command);
  const unsigned traits = known == traits_.end() ? 0 : known->second;
  unsigned asked = 0;
  if (output_ == Output::kJson) asked = kJson;
  if (output_ == Output::kWide) asked = kWide;
  if ((traits & asked) == asked) return OkStatus();
  return Usage("`" + FullName(command) + "` prints text only: it has no -o " +
               (asked == kJson ? "json" : "wide"));
}

}  // namespace weightwire::cli
