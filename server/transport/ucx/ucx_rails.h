#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/status.h"
#include "server/transport/ucx/ucx_topology.h"

namespace weightwire::transport {

/// The network devices of this process and why. Untested on hardware: proved on made-up trees only.
struct UcxRails {
  std::string net_devices = {};           ///< as UCX_NET_DEVICES; empty: as UCX is
  std::vector<std::string> devices = {};  ///< those that `by` chose; empty: all that UCX has
  uint32_t per_read = 0;  ///< as UCX_MAX_RMA_RAILS: devices that share one read; 0: as UCX is
  std::string by = {};    ///< "setting", "environment", "gpu", "numa" or "ucx"
  std::string why = {};
};

struct UcxRailsInput {
  std::string setting = {};      ///< ucx_devices
  std::string environment = {};  ///< UCX_NET_DEVICES
  /// What UCX can use here, "transport/device" each: all that `setting` may name, or what the
  /// environment leaves.
  std::vector<std::string> resources = {};
  UcxTopology topology = {};
  std::vector<std::string> slab_gpus = {};  ///< UUIDs of the GPUs whose memory is moved
};

/// The setting decides, else the environment. Else, of the RDMA devices, those that are nearest to
/// any GPU by PCI, of `slab_gpus` where their places are known: behind its switch (the fewest
/// bridges between them), then behind its host bridge, then on its NUMA node, then any; without a
/// GPU those on the NUMA node where this process's memory lies, then those of unknown node, then
/// any. Equally near ones share the work. Devices of tcp are left as they are, so that no peer is
/// cut off. UCX's own choice where there is no RDMA device, or nothing tells where it sits.
///
/// Pure. kInvalidArgument / kConfigInvalid: the setting names a device that UCX does not have.
Result<UcxRails> ChooseUcxRails(const UcxRailsInput& input);

/// The network devices among resources, sorted: "eth0", "mlx5_0:1".
std::vector<std::string> UcxNetDevices(const std::vector<std::string>& resources);
/// UCX names RDMA devices with their port.
bool IsUcxRdma(std::string_view device);

}  // namespace weightwire::transport
