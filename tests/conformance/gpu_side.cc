#include "tests/conformance/gpu_side.h"

#include <map>
#include <utility>

#include "server/transport/spans.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::conformance {
namespace {

using transport::MutableSpan;

class ExportingFromGpu final : public transport::Transport {
 public:
  explicit ExportingFromGpu(std::unique_ptr<transport::Transport> inner)
      : inner_(std::move(inner)) {}
  const std::string& name() const override { return inner_->name(); }
  transport::Capabilities capabilities() const override {
    transport::Capabilities inner = inner_->capabilities();
    inner.tells_leaving = false;
    return inner;
  }
  Status Viable() const override { return inner_->Viable(); }
  Status Start(transport::Handler* handler, Incarnation self) override {
    return inner_->Start(handler, self);
  }
  std::string address() const override { return inner_->address(); }
  transport::RegionKey Export(transport::GatherList pieces) override {
    std::map<uint64_t, std::shared_ptr<memory::MemoryRegion>> copies;  // by id of the host's
    for (memory::RegionSpan& piece : pieces) {
      auto& copy = copies[piece.region->id()];
      if (copy == nullptr) copy = Copied(piece.region);
      piece.region = copy;
    }
    return inner_->Export(std::move(pieces));
  }
  void Revoke(transport::RegionKey key, std::function<void()> done) override {
    inner_->Revoke(key, std::move(done));
  }
  void Connect(const std::string& address, const transport::Hello& hello, Nanos timeout,
               ConnectDone done) override {
    inner_->Connect(address, hello, timeout, std::move(done));
  }

 private:
  static std::shared_ptr<memory::MemoryRegion> Copied(
      const std::shared_ptr<memory::MemoryRegion>& host) {
    const auto bytes = GpuRegion(host->size());
    WW_CHECK(device::CopyRun(bytes->bytes(), host->data(), host->size()).ok());
    // Another region of the same bytes, which keeps the host's.
    return memory::MemoryRegion::OnDevice(
        std::const_pointer_cast<device::Allocation>(bytes->allocation().shared_from_this()),
        bytes->offset(), host->size(), {}, [host, bytes] {});
  }

  const std::unique_ptr<transport::Transport> inner_;
};

}  // namespace

std::shared_ptr<memory::MemoryRegion> GpuRegion(uint64_t bytes) {
  return memory::MemoryRegion::OnDevice(testing::WideFakeDevice(0)->Allocate(bytes).value(), 0,
                                        bytes, {}, {});
}

Status WriteLate(device::Bytes target, device::ConstBytes source, uint64_t bytes) {
  static const auto write = FAKE_CALL(fake_cuda_write_late);
  std::vector<std::byte> here(bytes);
  WW_RETURN_IF_ERROR(device::CopyRun({here.data()}, source, bytes));
  write(target.at, here.data(), bytes);
  return OkStatus();
}

std::unique_ptr<transport::Transport> ExportsFromGpu(std::unique_ptr<transport::Transport> inner) {
  return std::make_unique<ExportingFromGpu>(std::move(inner));
}

GpuTargets::GpuTargets(std::vector<MutableSpan> host) : host_(std::move(host)) {
  if (const uint64_t bytes = transport::TotalBytes(host_); bytes > 0) region_ = GpuRegion(bytes);
  uint64_t offset = 0;
  for (const MutableSpan& span : host_) {
    if (region_ == nullptr) {
      spans_.emplace_back();
      continue;
    }
    spans_.emplace_back(*region_, offset, span.size());
    WW_CHECK(device::CopyRun(spans_.back().at(), span.at(), span.size()).ok());
    offset += span.size();
  }
}

void GpuTargets::Fetch() const {
  WW_CHECK(testing::WideFakeDevice(0)->FlushWrites().ok());
  for (size_t i = 0; i < host_.size(); ++i) {
    WW_CHECK(device::CopyRun(host_[i].at(), spans_[i].at(), host_[i].size()).ok());
  }
}

}  // namespace weightwire::conformance
