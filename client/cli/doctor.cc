#include "client/cli/doctor.h"

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/cli/connection.h"
#include "server/base/clock.h"

namespace weightwire::cli {
namespace {

std::optional<std::string> Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Result<NamedConfig> Load(const std::string& path) {
  WW_ASSIGN(daemon::Values values, daemon::ValuesFromYaml(path));
  WW_ASSIGN(daemon::Config config,
            daemon::MakeConfig({{"file", std::move(values)},
                                {"environment", daemon::ValuesFromEnvironment(Environment)}}));
  return NamedConfig{path, std::move(config)};
}

void Append(Findings& out, Findings more) {
  out.insert(out.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

Finding Unreachable(const std::string& where, const Status& why) {
  return {"coordinator", where, why.message(),
          why.remedy().empty() ? "start it, or correct the address" : why.remedy()};
}

/// Asks each address once, however many configurations name it.
class Coordinators {
 public:
  explicit Coordinators(double seconds) : seconds_(seconds) {}

  /// The first that answers; what is wrong with its job is found the first time.
  const v1::StatusResponse* Ask(const std::string& where, const std::vector<std::string>& addresses,
                                const tls::TlsFiles& files, Findings& out) {
    Status why;
    for (const std::string& address : addresses) {
      const auto [known, fresh] = answers_.try_emplace(address);
      if (fresh) known->second = Connection(address, seconds_, files).GetStatus();
      if (!*known->second) {
        why = known->second->error();
        continue;
      }
      if (fresh) Append(out, CheckService(**known->second, SystemClock().WallSeconds()));
      return &**known->second;
    }
    out.push_back(Unreachable(where, why));
    return nullptr;
  }

 private:
  const double seconds_;
  std::map<std::string, std::optional<Result<v1::StatusResponse>>> answers_;
};

}  // namespace

Findings Diagnose(const DoctorRequest& request) {
  Findings out;
  std::vector<NamedConfig> configs;
  for (const std::string& path : request.config_paths) {
    auto loaded = Load(path);
    if (loaded) {
      configs.push_back(std::move(*loaded));
      continue;
    }
    const std::string& remedy = loaded.error().remedy();
    out.push_back({"config", path, loaded.error().message(),
                   remedy.empty() ? "weightwired --help lists every setting" : remedy});
  }
  Append(out, CheckConfigs(configs));
  const HostFacts host = ReadHostFacts();
  Coordinators coordinators(request.timeout_seconds);
  const v1::StatusResponse* asked = nullptr;
  if (request.address_set || request.config_paths.empty()) {
    asked = coordinators.Ask(request.address, {request.address}, request.files, out);
  }
  for (const NamedConfig& named : configs) {
    Append(out, CheckHost(named, host));
    Append(out, CheckPlaces(named));
    const v1::StatusResponse* joined = named.config.role == daemon::Role::kAgent
                                           ? coordinators.Ask(named.path, named.config.coordinator,
                                                              daemon::TlsFilesOf(named.config), out)
                                           : asked;
    if (joined != nullptr) Append(out, CheckAgainst(named, *joined));
  }
  return out;
}

std::string FindingsText(const Findings& findings) {
  if (findings.empty()) return "nothing found\n";
  std::string text;
  for (const Finding& finding : findings) {
    text.append(finding.check).append(": ").append(finding.where).append(": ");
    text.append(finding.what).append("\n  mend: ").append(finding.remedy).append("\n");
  }
  return text + std::to_string(findings.size()) + " found\n";
}

std::string FindingsJson(const Findings& findings) {
  nlohmann::json list = nlohmann::json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"check", finding.check},
                    {"where", finding.where},
                    {"what", finding.what},
                    {"remedy", finding.remedy}});
  }
  // Names and reasons may come from peers: what is no UTF-8 is replaced, not thrown at.
  return nlohmann::json{{"findings", list}}.dump(-1, ' ', false,
                                                 nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace weightwire::cli
