// A device's canonical path in sysfs is its way from the host bridge:
//   /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0
// GPUs come from NVIDIA's driver, because a container sees there only its own, and those of the
// whole host in sysfs.
#include "server/transport/ucx/ucx_topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

namespace weightwire::transport {
namespace {

namespace fs = std::filesystem;

/// More processors than any host has: a list that goes beyond is malformed.
constexpr int kNumberMax = 1 << 20;

std::string FirstLine(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::optional<int> NumberOf(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number > kNumberMax) return {};
  return number;
}

/// Names in the directory, sorted; none where there is no such directory.
std::vector<std::string> NamesIn(const fs::path& directory) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// "0-3,8"; nullopt when it is malformed.
std::optional<std::set<int>> ListOf(std::string_view text) {
  std::set<int> out;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t dash = item.find('-');
    const auto first = NumberOf(item.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : NumberOf(item.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first) return {};
    for (int i = *first; i <= *last; ++i) out.insert(i);
  }
  return out;
}

class Reader {
 public:
  explicit Reader(const fs::path& root) : sys_(root / "sys"), proc_(root / "proc") {
    std::error_code error;
    devices_ = fs::canonical(sys_ / "devices", error);
  }

  UcxTopology Read() {
    for (const std::string& gpu : NamesIn(proc_ / "driver/nvidia/gpus")) {
      if (auto place = PlaceOf("GPU " + gpu, sys_ / "bus/pci/devices" / gpu)) {
        out_.gpus.emplace(gpu, std::move(*place));
        ReadUuid(gpu);
      }
    }
    for (const std::string& nic : NamesIn(sys_ / "class/infiniband")) {
      if (auto place = PlaceOf(nic, sys_ / "class/infiniband" / nic / "device")) {
        out_.nics.emplace(nic, std::move(*place));
      }
    }
    ReadNodes();
    out_.peer_memory = PeerMemory();
    return std::move(out_);
  }

 private:
  std::optional<UcxPlace> PlaceOf(const std::string& what, const fs::path& link) {
    std::error_code error;
    const fs::path real = fs::canonical(link, error);
    const fs::path below = real.lexically_relative(devices_);
    UcxPlace place;
    fs::path walked;
    for (const fs::path& part : below) {
      walked /= part;
      // The last one counts: virtual buses and storage controllers have host bridges of their own.
      if (part.string().starts_with("pci")) {
        place.bridge = walked.string();
        place.steps.clear();
      } else {
        place.steps.push_back(part.string());
      }
    }
    if (place.bridge.empty() || place.steps.empty()) {
      out_.notes.push_back(what + " is no PCI device in " + sys_.string());
      return {};
    }
    const std::string node = FirstLine(real / "numa_node");
    if (const auto number = NumberOf(node)) {
      place.node = *number;
    } else {
      out_.notes.push_back(what + " has no NUMA node: \"" + node + '"');
    }
    return place;
  }

  /// "GPU UUID: \t GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", among other lines.
  void ReadUuid(const std::string& gpu) {
    constexpr std::string_view kField = "GPU UUID:";
    std::ifstream information(proc_ / "driver/nvidia/gpus" / gpu / "information");
    for (std::string line; std::getline(information, line);) {
      if (!line.starts_with(kField)) continue;
      const size_t begin = line.find("GPU-", kField.size());
      if (begin == std::string::npos) break;
      out_.uuids[gpu] = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
      return;
    }
  }

  void ReadNodes() {
    constexpr std::string_view kAllowed = "Cpus_allowed_list:";
    std::ifstream status(proc_ / "self/status");
    std::optional<std::set<int>> allowed;
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with(kAllowed)) continue;
      const size_t begin = line.find_first_not_of(" \t", kAllowed.size());
      allowed = ListOf(begin == std::string::npos ? "" : std::string_view(line).substr(begin));
    }
    if (!allowed.has_value()) {
      out_.notes.push_back((proc_ / "self/status").string() + " names no processors");
      return;
    }
    const fs::path directory = sys_ / "devices/system/node";
    for (const std::string& name : NamesIn(directory)) {
      const auto node = name.starts_with("node") ? NumberOf(name.substr(4)) : std::nullopt;
      if (!node.has_value()) continue;  // "online", "possible"
      const auto processors = ListOf(FirstLine(directory / name / "cpulist"));
      if (!processors.has_value()) {
        out_.notes.push_back(name + " has a malformed list of processors");
        continue;
      }
      const bool ours = std::any_of(processors->begin(), processors->end(),
                                    [&](int processor) { return allowed->contains(processor); });
      if (ours) out_.nodes.insert(*node);
    }
  }

  std::string PeerMemory() const {
    for (const char* module : {"nvidia_peermem", "nv_peer_mem"}) {
      if (fs::exists(sys_ / "module" / module)) return module;
    }
    const bool open =
        FirstLine(proc_ / "driver/nvidia/version").find("Open Kernel Module") != std::string::npos;
    return open ? "dma-buf of NVIDIA's open driver" : "";
  }

  const fs::path sys_;
  const fs::path proc_;
  fs::path devices_;
  UcxTopology out_;
};

}  // namespace

UcxTopology ReadUcxTopology(const fs::path& root) { return Reader(root).Read(); }

}  // namespace weightwire::transport
