#include "server/transport/ucx/ucx_gpu_direct.h"

namespace weightwire::transport {

Status CheckUcxGpuDirect(const UcxGpuDirectFacts& facts) {
  std::string missing;
  const auto need = [&missing](bool there, const char* words) {
    if (!there) missing += (missing.empty() ? "" : "; ") + std::string(words);
  };
  need(facts.gpus > 0, "there is no GPU here");
  need(facts.ucx_knows_cuda, "this libucp reaches no CUDA memory");
  need(facts.rdma_devices > 0, "UCX has no RDMA device here");
  need(!facts.peer_memory.empty(),
       "nothing lets a NIC reach GPU memory (neither nvidia_peermem nor NVIDIA's open driver)");
  need(facts.weights_on_gpu, "this agent has no GPU memory for weights (gpu, gpu_slab_bytes)");
  if (missing.empty()) return OkStatus();
  return Status(Code::kFailedPrecondition, Reason::kTransportFailed, "no GPU-direct: " + missing)
      .Remedy("set gpu_direct to auto or off to move weights through host memory");
}

}  // namespace weightwire::transport
