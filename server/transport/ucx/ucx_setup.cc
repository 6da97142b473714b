// UCX says which devices it can use, the kernel where they sit. So a first worker is asked; where
// that leads to a choice a second one, with the choice, takes its place.
#include "server/transport/ucx/ucx_setup.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "server/transport/ucx/ucx_gpu_direct.h"
#include "server/transport/ucx/ucx_library.h"
#include "server/transport/ucx/ucx_rails.h"

namespace weightwire::transport {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

UcxGpuDirectFacts FactsOf(const UcxWorker& worker, const UcxTopology& topology,
                          const std::vector<std::string>& devices, const UcxOptions& options) {
  UcxGpuDirectFacts facts;
  facts.gpus = topology.gpus.size();
  facts.ucx_knows_cuda = worker.KnowsCuda();
  facts.rdma_devices = static_cast<size_t>(std::count_if(
      devices.begin(), devices.end(), [](const std::string& name) { return IsUcxRdma(name); }));
  facts.peer_memory = topology.peer_memory;
  facts.weights_on_gpu = !options.slab_gpus.empty();
  return facts;
}

void ShowDevices(metrics::Sink& sink, const UcxRails& rails,
                 const std::vector<std::string>& devices) {
  for (const std::string& device : devices) {
    const bool chosen =
        rails.devices.empty() ||
        std::find(rails.devices.begin(), rails.devices.end(), device) != rails.devices.end();
    sink.Set("ucx_devices", 1, {{"device", device}, {"chosen_by", chosen ? rails.by : "ucx"}});
  }
}

}  // namespace

Result<UcxSetup> SetUpUcx(const UcxOptions& options) {
  UcxRailsInput input{.setting = options.devices,
                      .environment = Environment("UCX_NET_DEVICES"),
                      .topology = ReadUcxTopology(options.root),
                      .slab_gpus = options.slab_gpus};
  UcxSetup setup;
  WW_ASSIGN(setup.worker, MakeUcxWorker({.tls = options.tls,
                                         .net_devices = options.devices.empty() ? "" : "all"}));
  input.resources = setup.worker->Resources();
  WW_ASSIGN(const UcxRails rails, ChooseUcxRails(input));
  if (!rails.net_devices.empty()) {
    setup.worker.reset();  // first: one context at a time
    WW_ASSIGN(setup.worker, MakeUcxWorker({.tls = options.tls,
                                           .net_devices = rails.net_devices,
                                           .rma_rails = rails.per_read}));
  }
  const std::vector<std::string> devices = UcxNetDevices(setup.worker->Resources());
  ShowDevices(*options.metrics, rails, devices);
  setup.choices = "network devices";
  for (const std::string& device : devices) setup.choices += ' ' + device;
  setup.choices += ": " + rails.why;
  if (options.gpu_direct == GpuDirect::kOff) return setup;
  const Status direct = CheckUcxGpuDirect(FactsOf(*setup.worker, input.topology, devices, options));
  if (!direct.ok() && options.gpu_direct == GpuDirect::kRequired) return Fail(direct);
  setup.gpu_direct = direct.ok();
  setup.choices += direct.ok() ? "; GPU-direct (untested on hardware)" : "; " + direct.message();
  return setup;
}

}  // namespace weightwire::transport
