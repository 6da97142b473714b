#include "server/transport/ucx/ucx_rails.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

namespace weightwire::transport {
namespace {

/// How far, then by how many bridges where that makes a difference.
using Distance = std::pair<int, size_t>;
constexpr const char* kFromGpu[] = {"behind a PCI switch of", "behind the host bridge of",
                                    "on the NUMA node of",
                                    "nearest, though not known to be on the NUMA node of,"};
constexpr const char* kFromMemory[] = {"on a NUMA node of this process", "of unknown NUMA node",
                                       "nearest, though on no NUMA node of this process"};
using Nearest = std::pair<Distance, std::vector<std::string>>;

std::string Joined(const std::vector<std::string>& words, const char* between = ",") {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : between) + word;
  return out;
}

Distance FromGpu(const UcxPlace& gpu, const UcxPlace& nic) {
  if (gpu.bridge != nic.bridge) return {gpu.node >= 0 && gpu.node == nic.node ? 2 : 3, 0};
  const auto apart =
      std::mismatch(gpu.steps.begin(), gpu.steps.end(), nic.steps.begin(), nic.steps.end());
  const auto shared = static_cast<size_t>(apart.first - gpu.steps.begin());
  if (shared == 0) return {1, 0};
  return {0, gpu.steps.size() + nic.steps.size() - 2 * shared};
}

Distance FromMemory(const std::set<int>& nodes, const UcxPlace& nic) {
  if (nic.node < 0 || nodes.empty()) return {1, 0};
  return {nodes.contains(nic.node) ? 0 : 2, 0};
}

template <typename DistanceOf>
Nearest NearestOf(const std::map<std::string, UcxPlace>& ports, DistanceOf distance_of) {
  std::map<Distance, std::vector<std::string>> by_distance;
  for (const auto& [port, place] : ports) by_distance[distance_of(place)].push_back(port);
  return *by_distance.begin();
}

Result<UcxRails> Named(const UcxRailsInput& input) {
  UcxRails rails{.net_devices = input.setting, .by = "setting", .why = "named by ucx_devices"};
  // UCX's own patterns are UCX's to judge.
  if (input.setting == "all" || input.setting.find_first_of("^[") != std::string::npos) {
    return rails;
  }
  const std::vector<std::string> known = UcxNetDevices(input.resources);
  std::string_view rest = input.setting;
  while (!rest.empty()) {
    const std::string name(rest.substr(0, rest.find(',')));
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                         "ucx_devices names \"" + name + "\", UCX has " +
                             (known.empty() ? "no network device" : Joined(known)) + " here")
                      .Remedy("name those of `ucx_info -d` whose port is up, or leave ucx_devices "
                              "empty; a libucp without verbs knows no RDMA device"));
    }
    rails.devices.push_back(name);
    if (IsUcxRdma(name)) ++rails.per_read;
  }
  return rails;
}

/// Those whose memory is moved, or all where it is not known which those are.
std::map<std::string, UcxPlace> GpusOf(const UcxRailsInput& input) {
  std::map<std::string, UcxPlace> ours;
  for (const auto& [address, place] : input.topology.gpus) {
    const auto uuid = input.topology.uuids.find(address);
    if (uuid != input.topology.uuids.end() &&
        std::find(input.slab_gpus.begin(), input.slab_gpus.end(), uuid->second) !=
            input.slab_gpus.end()) {
      ours.emplace(address, place);
    }
  }
  return ours.empty() ? input.topology.gpus : ours;
}

}  // namespace

bool IsUcxRdma(std::string_view device) { return device.find(':') != std::string_view::npos; }

std::vector<std::string> UcxNetDevices(const std::vector<std::string>& resources) {
  std::set<std::string> devices;
  for (const std::string& resource : resources) {
    const size_t slash = resource.find('/');
    if (slash == std::string::npos) continue;
    std::string device = resource.substr(slash + 1);
    if (resource.starts_with("tcp/") || IsUcxRdma(device)) devices.insert(std::move(device));
  }
  return {devices.begin(), devices.end()};
}

Result<UcxRails> ChooseUcxRails(const UcxRailsInput& input) {
  if (!input.setting.empty()) return Named(input);
  if (!input.environment.empty()) {
    return UcxRails{.by = "environment", .why = "UCX_NET_DEVICES=" + input.environment};
  }
  const UcxTopology& topology = input.topology;
  std::vector<std::string> others;
  std::map<std::string, UcxPlace> ports;
  for (const std::string& device : UcxNetDevices(input.resources)) {
    if (!IsUcxRdma(device)) {
      others.push_back(device);
    } else if (auto nic = topology.nics.find(device.substr(0, device.find(':')));
               nic != topology.nics.end()) {
      ports.emplace(device, nic->second);
    }
  }
  const std::string notes = topology.notes.empty() ? "" : " (" + Joined(topology.notes, "; ") + ")";
  if (ports.empty()) {
    return UcxRails{.by = "ucx",
                    .why = "UCX's own choice: no RDMA device whose place is known" + notes};
  }
  UcxRails rails;
  std::set<std::string> chosen;
  std::vector<std::string> why;
  for (const auto& [address, gpu] : GpusOf(input)) {
    const auto [distance, nearest] =
        NearestOf(ports, [&gpu = gpu](const UcxPlace& nic) { return FromGpu(gpu, nic); });
    chosen.insert(nearest.begin(), nearest.end());
    rails.per_read = std::max(rails.per_read, static_cast<uint32_t>(nearest.size()));
    why.push_back(Joined(nearest) + ' ' + kFromGpu[distance.first] + " GPU " + address);
  }
  rails.by = "gpu";
  if (topology.gpus.empty()) {
    const auto [distance, nearest] =
        NearestOf(ports, [&](const UcxPlace& nic) { return FromMemory(topology.nodes, nic); });
    chosen.insert(nearest.begin(), nearest.end());
    rails.per_read = static_cast<uint32_t>(nearest.size());
    why.push_back(std::string("no GPU; ") + Joined(nearest) + ' ' + kFromMemory[distance.first]);
    rails.by = "numa";
  }
  rails.devices.assign(chosen.begin(), chosen.end());
  others.insert(others.begin(), chosen.begin(), chosen.end());
  rails.net_devices = Joined(others);
  rails.why = Joined(why, "; ") + notes;
  return rails;
}

}  // namespace weightwire::transport
