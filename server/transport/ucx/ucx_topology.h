#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace weightwire::transport {

/// Where a PCI device hangs: below the host bridge `bridge` it is reached by `steps`, the last of
/// which is itself.
struct UcxPlace {
  std::string bridge;              ///< ".../pci0000:00"
  std::vector<std::string> steps;  ///< "0000:00:01.0", "0000:01:00.0"
  int node = -1;                   ///< NUMA; -1: unknown
  friend bool operator==(const UcxPlace&, const UcxPlace&) = default;
};

/// What Linux tells of this host. An entry that makes no sense is left out and named in `notes`.
struct UcxTopology {
  std::map<std::string, UcxPlace> gpus;  ///< that this process may use, by address "0000:3b:00.0"
  std::map<std::string, std::string> uuids;  ///< of `gpus`, by address, where the driver tells
  std::map<std::string, UcxPlace> nics;      ///< RDMA devices by name "mlx5_0"
  std::set<int> nodes;      ///< whose processors this process may use: its memory lies there
  std::string peer_memory;  ///< what lets a NIC reach GPU memory; empty: nothing was found
  std::vector<std::string> notes;
};

/// Reads `root`/sys and `root`/proc; "/" but in tests. Untested on hardware: proved on made-up
/// trees only.
UcxTopology ReadUcxTopology(const std::filesystem::path& root);

}  // namespace weightwire::transport
