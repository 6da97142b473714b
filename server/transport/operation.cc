#include "server/transport/operation.h"

#include "server/transport/spans.h"

namespace weightwire::transport {

GetOperation MakeGet(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                     std::shared_ptr<void> hold, Endpoint::GetDone done, Endpoint::Take take) {
  const uint64_t bytes = TotalBytes(into);
  return {key,
          offset,
          bytes,
          std::move(into),
          DeadlineAfter(timeout),
          std::move(hold),
          std::move(done),
          std::move(take)};
}

Status CheckGetBytes(uint64_t bytes, uint64_t chunk_bytes_max) {
  if (bytes > 0 && bytes <= chunk_bytes_max) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "a Get reads at least one byte and at most a chunk");
}

}  // namespace weightwire::transport
