#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>

#include "server/daemon/config.h"

namespace weightwire::daemon {
namespace {

tl::unexpected<Status> BadFile(const std::string& path, const std::string& what) {
  return Fail(Code::kInvalidArgument, Reason::kConfigInvalid, path + ": " + what);
}

/// A scalar, or a list of scalars joined by commas; nullopt for anything else.
std::optional<std::string> TextOf(const YAML::Node& node) {
  if (node.IsScalar()) return node.Scalar();
  if (node.IsNull()) return "";
  if (!node.IsSequence()) return std::nullopt;
  std::string out;
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) return std::nullopt;
    out += (out.empty() ? "" : ",") + item.Scalar();
  }
  return out;
}

Result<Values> ValuesOf(const std::string& path, const YAML::Node& root) {
  Values out;
  if (root.IsNull()) return out;
  if (!root.IsMap()) return BadFile(path, "must be a map of settings");
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) return BadFile(path, "a key is no text");
    const std::string& name = entry.first.Scalar();
    if (FindKey(name) == nullptr) {
      return BadFile(path, "unknown setting \"" + name + "\"; did you mean \"" +
                               NearestKey(name).name + "\"?");
    }
    auto text = TextOf(entry.second);
    if (!text) return BadFile(path, name + " must be a value or a list of values");
    if (!out.emplace(name, std::move(*text)).second) return BadFile(path, name + " is set twice");
  }
  return out;
}

}  // namespace

Result<Values> ValuesFromYaml(const std::string& path) {
  try {
    return ValuesOf(path, YAML::LoadFile(path));
  } catch (const YAML::BadFile&) {
    return BadFile(path, "cannot be read");
  } catch (const YAML::Exception& error) {
    return BadFile(path, error.what());
  }
}

Values ValuesFromEnvironment(
    const std::function<std::optional<std::string>(const std::string&)>& lookup) {
  Values out;
  for (const Key& key : Keys()) {
    std::string variable = "WEIGHTWIRE_" + key.name;
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (auto value = lookup(variable)) out.emplace(key.name, std::move(*value));
  }
  return out;
}

std::string ToYaml(const Config& config) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  for (const Key& key : Keys()) {
    out << YAML::Key << key.name << YAML::Value << key.get(config) << YAML::Comment(key.help);
  }
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace weightwire::daemon
