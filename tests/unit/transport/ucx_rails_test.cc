// Made-up trees and made-up UCX: no machine with a GPU or an RDMA device was at hand.
#include "server/transport/ucx/ucx_rails.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/transport/ucx/ucx_gpu_direct.h"
#include "server/transport/ucx/ucx_topology.h"

namespace weightwire::transport {
namespace {

namespace fs = std::filesystem;

class UcxRailsOf : public testing::Test {
 protected:
  UcxRailsOf() {
    std::string name = fs::temp_directory_path() / "ww-root-XXXXXX";
    root = mkdtemp(name.data());
    fs::create_directories(root / "sys/bus/pci/devices");
    fs::create_directories(root / "sys/class/infiniband");
    Processors("0-7");
    Node(0, "0-3");
    Node(1, "4-7");
  }
  ~UcxRailsOf() override { fs::remove_all(root); }

  void Write(const fs::path& file, const std::string& text) {
    fs::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text << '\n';
  }
  void Processors(const std::string& list) {
    Write("proc/self/status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t" + list);
  }
  void Node(int node, const std::string& processors) {
    Write("sys/devices/system/node/node" + std::to_string(node) + "/cpulist", processors);
    Write("sys/devices/system/node/online", "0-1");
  }
  /// `where`: the way from the host bridge, below sys/devices.
  fs::path Device(const std::string& where, const std::string& node) {
    const fs::path device = root / "sys/devices" / where;
    Write("sys/devices/" + where + "/numa_node", node);
    fs::create_symlink(device, root / "sys/bus/pci/devices" / device.filename());
    return device;
  }
  void Gpu(const std::string& where, const std::string& node = "0", const std::string& uuid = "") {
    Write("proc/driver/nvidia/gpus/" + Device(where, node).filename().string() + "/information",
          "Model: \t made up" + (uuid.empty() ? "" : "\nGPU UUID: \t " + uuid) +
              "\nBus Type: \t PCIe");
  }
  void Nic(const std::string& name, const std::string& where, const std::string& node = "0") {
    const fs::path device = Device(where, node);
    fs::create_directories(device / "infiniband" / name);
    fs::create_symlink(device, device / "infiniband" / name / "device");
    fs::create_symlink(device / "infiniband" / name, root / "sys/class/infiniband" / name);
    resources.push_back("rc_mlx5/" + name + ":1");
  }
  UcxRails Choose() const {
    auto rails = ChooseUcxRails({.resources = resources, .topology = ReadUcxTopology(root)});
    EXPECT_TRUE(rails.has_value());
    return *rails;
  }
  std::string Chosen() const {
    std::string out;
    for (const std::string& device : Choose().devices) out += (out.empty() ? "" : ",") + device;
    return out;
  }
  Result<UcxRails> With(const std::string& setting) const {
    return ChooseUcxRails({.setting = setting,
                           .environment = "mlx5_9:1",
                           .resources = resources,
                           .topology = ReadUcxTopology(root)});
  }

  fs::path root;
  std::vector<std::string> resources = {"cma/memory", "posix/memory", "self/memory0", "tcp/eth0"};
};

constexpr char kGpu[] = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";

TEST_F(UcxRailsOf, WithoutRdmaTheChoiceIsUcxs) {
  Gpu(kGpu);
  EXPECT_EQ(Choose().by, "ucx");
  EXPECT_EQ(Choose().net_devices, "");
  EXPECT_EQ(Choose().per_read, 0u);
  EXPECT_NE(Choose().why.find("no RDMA device"), std::string::npos);
  root /= "absent";
  EXPECT_EQ(Choose().by, "ucx");
}

TEST_F(UcxRailsOf, TheNicBehindTheGpusSwitchIsTakenBeforeOthers) {
  Gpu(kGpu);
  Nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0", "1");  // another socket's
  Nic("mlx5_1", "pci0000:00/0000:00:05.0/0000:09:00.0");       // another port of the host bridge
  Nic("mlx5_2", "pci0000:00/0000:00:01.0/0000:01:01.0/0000:03:00.0");
  EXPECT_EQ(Chosen(), "mlx5_2:1");
  EXPECT_EQ(Choose().by, "gpu");
  EXPECT_EQ(Choose().per_read, 1u);
  EXPECT_EQ(Choose().why, "mlx5_2:1 behind a PCI switch of GPU 0000:02:00.0");
  // Peers that only tcp reaches are not cut off.
  EXPECT_EQ(Choose().net_devices, "mlx5_2:1,eth0");
}

TEST_F(UcxRailsOf, OfTwoBehindTheSameRootPortFewerBridgesCount) {
  Gpu(kGpu);
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:05:00.0/0000:06:00.0");
  Nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
}

TEST_F(UcxRailsOf, TheHostBridgeComesBeforeTheNodeAndTheNodeBeforeAnyOther) {
  Gpu("pci0000:00/0000:00:01.0/0000:02:00.0");
  Nic("mlx5_0", "pci0000:80/0000:81:00.0", "1");  // fewer bridges, the other node
  EXPECT_EQ(Chosen(), "mlx5_0:1");
  EXPECT_NE(Choose().why.find("not known to be on the NUMA node of, GPU"), std::string::npos)
      << Choose().why;
  Nic("mlx5_1", "pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0", "0");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
  Nic("mlx5_2", "pci0000:00/0000:00:07.0/0000:08:00.0/0000:09:00.0", "0");
  EXPECT_EQ(Chosen(), "mlx5_2:1");
}

TEST_F(UcxRailsOf, EveryGpuHasItsNearestAndEquallyNearOnesShareTheWork) {
  Gpu("pci0000:00/0000:00:01.0/0000:02:00.0");
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:03:00.0");
  Nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:04:00.0");
  Gpu("pci0000:80/0000:80:01.0/0000:82:00.0", "1");
  Nic("mlx5_2", "pci0000:80/0000:80:01.0/0000:83:00.0", "1");
  Nic("mlx5_3", "pci0000:80/0000:80:02.0/0000:84:00.0", "1");
  EXPECT_EQ(Chosen(), "mlx5_0:1,mlx5_1:1,mlx5_2:1");
  EXPECT_EQ(Choose().per_read, 2u);
}

TEST_F(UcxRailsOf, AGpuThatTheDriverDoesNotShowIsNotOurs) {
  Gpu("pci0000:00/0000:00:01.0/0000:02:00.0");
  Device("pci0000:80/0000:80:01.0/0000:82:00.0", "1");  // in sysfs alone: another container's
  Nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:83:00.0", "1");
  Nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:03:00.0", "0");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
}

TEST_F(UcxRailsOf, WhatUcxCannotUseIsNotNamed) {
  Gpu(kGpu);
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:01.0/0000:03:00.0");
  resources.pop_back();  // its port is down, or its device file is not in this container
  Nic("mlx5_1", "pci0000:00/0000:00:05.0/0000:09:00.0");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
}

TEST_F(UcxRailsOf, WithoutAGpuTheNodeOfThisProcessesMemoryDecides) {
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:03:00.0", "0");
  Nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:83:00.0", "1");
  Processors("5,7");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
  EXPECT_EQ(Choose().by, "numa");
  EXPECT_EQ(Choose().why, "no GPU; mlx5_1:1 on a NUMA node of this process");
  Processors("0-1");
  EXPECT_EQ(Chosen(), "mlx5_0:1");
  Processors("3-4");
  EXPECT_EQ(Chosen(), "mlx5_0:1,mlx5_1:1");
  EXPECT_EQ(Choose().per_read, 2u);
}

TEST_F(UcxRailsOf, AnUnknownNodeComesBetweenOursAndOthers) {
  Processors("0");
  Nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:83:00.0", "1");
  EXPECT_EQ(Chosen(), "mlx5_0:1");
  Nic("mlx5_1", "pci0000:40/0000:40:01.0/0000:43:00.0", "-1");
  EXPECT_EQ(Chosen(), "mlx5_1:1");
  EXPECT_NE(Choose().why.find("unknown NUMA node"), std::string::npos);
}

TEST_F(UcxRailsOf, MalformedEntriesAreLeftOutAndNamed) {
  Gpu(kGpu);
  Write("proc/driver/nvidia/gpus/0000:77:00.0/information", "no such PCI device");
  Nic("mlx5_0", "pci0000:00/0000:00:05.0/0000:09:00.0", "many");
  fs::create_directories(root / "sys/devices/virtual/infiniband/rxe0");
  fs::create_symlink(root / "sys/devices/virtual/infiniband/rxe0",
                     root / "sys/class/infiniband/rxe0");
  fs::create_symlink(root / "nowhere", root / "sys/class/infiniband/mlx5_7");
  resources.insert(resources.end(), {"rc_verbs/rxe0:1", "rc_mlx5/mlx5_7:1", "nonsense"});
  Node(1, "4-x");
  EXPECT_EQ(Chosen(), "mlx5_0:1");
  const std::string why = Choose().why;
  for (const char* named :
       {"GPU 0000:77:00.0 is no PCI device", "rxe0 is no PCI device", "mlx5_7 is no PCI device",
        "mlx5_0 has no NUMA node: \"many\"", "node1 has a malformed list"}) {
    EXPECT_NE(why.find(named), std::string::npos) << named << " in " << why;
  }
  EXPECT_EQ(ReadUcxTopology(root).gpus.size(), 1u);
}

TEST_F(UcxRailsOf, AMalformedListOfProcessorsIsNoNode) {
  for (const char* list : {"0-", "3-1", "a", "-1", "0,,1", "0-99999999999"}) {
    Processors(list);
    const UcxTopology topology = ReadUcxTopology(root);
    EXPECT_TRUE(topology.nodes.empty()) << list;
    ASSERT_EQ(topology.notes.size(), 1u) << list;
    EXPECT_NE(topology.notes[0].find("self/status names no processors"), std::string::npos);
  }
}

TEST_F(UcxRailsOf, TheSettingWinsOverTheEnvironmentAndThatOverTheTree) {
  Gpu(kGpu);
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:01.0/0000:03:00.0");
  Nic("mlx5_1", "pci0000:00/0000:00:05.0/0000:09:00.0");
  const auto named = With("mlx5_1:1,eth0");
  ASSERT_TRUE(named.has_value());
  EXPECT_EQ(named->net_devices, "mlx5_1:1,eth0");
  EXPECT_EQ(named->devices, (std::vector<std::string>{"mlx5_1:1", "eth0"}));
  EXPECT_EQ(named->per_read, 1u);
  EXPECT_EQ(named->by, "setting");
  EXPECT_EQ(With("^mlx5_0:1")->net_devices, "^mlx5_0:1");
  const auto environment = With("");
  EXPECT_EQ(environment->by, "environment");
  EXPECT_EQ(environment->net_devices, "");
  EXPECT_EQ(environment->why, "UCX_NET_DEVICES=mlx5_9:1");
}

TEST_F(UcxRailsOf, ASettingThatUcxDoesNotHaveIsRefusedWithWhatItHas) {
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:03:00.0");
  for (const char* setting : {"mlx5_7:1", "mlx5_0:1,mlx5_7:1", "mlx5_7:1,", "mlx5_0:1, mlx5_7:1"}) {
    const auto refused = With(setting);
    ASSERT_FALSE(refused.has_value()) << setting;
    EXPECT_EQ(refused.error().reason(), Reason::kConfigInvalid);
    EXPECT_NE(refused.error().message().find("mlx5_7:1\", UCX has eth0,mlx5_0:1 here"),
              std::string::npos)
        << refused.error().message();
  }
}

// Of several GPUs in the host, those count whose memory is moved.
TEST_F(UcxRailsOf, TheGpusOfTheSlabsDecideWhereTheyAreKnown) {
  Gpu("pci0000:00/0000:00:01.0/0000:01:00.0", "0", "GPU-aaaaaaaa-0000-0000-0000-000000000001");
  Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0");
  Gpu("pci0000:80/0000:80:01.0/0000:81:00.0", "1", "GPU-aaaaaaaa-0000-0000-0000-000000000002");
  Nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:82:00.0", "1");
  const UcxTopology topology = ReadUcxTopology(root);
  EXPECT_EQ(topology.uuids.at("0000:81:00.0"), "GPU-aaaaaaaa-0000-0000-0000-000000000002");
  const auto chosen = [&](const std::vector<std::string>& slab_gpus) {
    return ChooseUcxRails({.resources = resources, .topology = topology, .slab_gpus = slab_gpus})
        ->devices;
  };
  using Devices = std::vector<std::string>;
  EXPECT_EQ(chosen({}), (Devices{"mlx5_0:1", "mlx5_1:1"}));
  EXPECT_EQ(chosen({"GPU-aaaaaaaa-0000-0000-0000-000000000002"}), Devices{"mlx5_1:1"});
  EXPECT_EQ(chosen({"GPU-aaaaaaaa-0000-0000-0000-000000000001"}), Devices{"mlx5_0:1"});
  EXPECT_EQ(chosen({"GPU-aaaaaaaa-0000-0000-0000-000000000009"}),
            (Devices{"mlx5_0:1", "mlx5_1:1"}));
}

UcxGpuDirectFacts AllFacts() {
  return {.gpus = 1,
          .rdma_devices = 1,
          .ucx_knows_cuda = true,
          .peer_memory = "nvidia_peermem",
          .weights_on_gpu = true};
}

TEST(UcxGpuDirect, NeedsEveryPartAndNamesAllThatIsMissing) {
  EXPECT_TRUE(CheckUcxGpuDirect(AllFacts()).ok());
  std::vector<std::pair<UcxGpuDirectFacts, std::string>> cases(5, {AllFacts(), ""});
  cases[0].first.gpus = 0, cases[0].second = "there is no GPU here";
  cases[1].first.rdma_devices = 0, cases[1].second = "UCX has no RDMA device here";
  cases[2].first.ucx_knows_cuda = false, cases[2].second = "this libucp reaches no CUDA memory";
  cases[3].first.peer_memory = "", cases[3].second = "neither nvidia_peermem nor";
  cases[4].first.weights_on_gpu = false, cases[4].second = "no GPU memory for weights";
  for (const auto& [facts, words] : cases) {
    const Status status = CheckUcxGpuDirect(facts);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
    EXPECT_EQ(status.message().find(';'), std::string::npos) << status.message();
    EXPECT_EQ(status.remedy(), "set gpu_direct to auto or off to move weights through host memory");
  }
  const std::string all = CheckUcxGpuDirect({}).message();
  for (const auto& [facts, words] : cases) EXPECT_NE(all.find(words), std::string::npos) << all;
}

TEST_F(UcxRailsOf, WhatLetsANicReachGpuMemoryIsFound) {
  EXPECT_EQ(ReadUcxTopology(root).peer_memory, "");
  Write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14");
  EXPECT_EQ(ReadUcxTopology(root).peer_memory, "");
  Write("proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14");
  EXPECT_EQ(ReadUcxTopology(root).peer_memory, "dma-buf of NVIDIA's open driver");
  fs::create_directories(root / "sys/module/nvidia_peermem");
  EXPECT_EQ(ReadUcxTopology(root).peer_memory, "nvidia_peermem");
}

}  // namespace
}  // namespace weightwire::transport
