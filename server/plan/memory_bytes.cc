#include "server/plan/memory_bytes.h"

#include <string>
#include <vector>

namespace weightwire::plan {
namespace {

uint64_t MemoryBytes(const std::vector<CopyOp>& ops) {
  uint64_t bytes = 0;
  for (const CopyOp& op : ops) {
    for (const auto* numbers :
         {&op.extent, &op.source_stride, &op.target_stride, &op.block, &op.source_extent}) {
      bytes += numbers->capacity() * sizeof(int64_t);
    }
  }
  return bytes + ops.capacity() * sizeof(CopyOp);
}

uint64_t MemoryBytes(const std::vector<Stream>& streams) {
  uint64_t bytes = streams.capacity() * sizeof(Stream);
  for (const Stream& stream : streams) bytes += MemoryBytes(stream.ops);
  return bytes;
}

uint64_t MemoryBytes(const std::vector<std::string>& names) {
  uint64_t bytes = names.capacity() * sizeof(std::string);
  for (const std::string& name : names) bytes += name.capacity();
  return bytes;
}

}  // namespace

uint64_t MemoryBytes(const TransferPlan& plan) {
  uint64_t bytes = sizeof(plan) + MemoryBytes(plan.streams) + MemoryBytes(plan.tensor_names);
  for (const auto& [rank, gathered] : plan.gathered) bytes += MemoryBytes(gathered.made);
  return bytes;
}

uint64_t MemoryBytes(const RankSlice& slice) {
  return sizeof(slice) + MemoryBytes(slice.streams) + MemoryBytes(slice.tensor_names) +
         MemoryBytes(slice.gathered.made);
}

}  // namespace weightwire::plan
