#include "server/agent/snapshot.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

// The bytes are cut into chunks; each of a few lanes takes the next chunk, copies it and posts
// itself again, so that a worker is never held longer than one chunk. The last lane to find nothing
// left reports.
namespace weightwire::agent {
namespace {

constexpr uint64_t kChunkBytes = 8 << 20;
constexpr uint32_t kLanes = 2;

/// A run of bytes of one tensor.
struct Piece {
  std::byte* to;
  const std::byte* from;
  uint64_t bytes;
};

struct Job {
  transfer::Binding from, to;
  std::vector<Piece> pieces;
  std::vector<size_t> chunk_begin;  ///< first piece of each chunk, and the end
  std::atomic<size_t> next_chunk{0};
  std::atomic<uint32_t> lanes_left{kLanes};
  Executor& workers;
  Executor& strand;
  std::function<void()> done;
};

void CutIntoChunks(Job& job) {
  uint64_t filled = kChunkBytes;
  for (size_t i = 0; i < job.from.size(); ++i) {
    for (uint64_t offset = 0; offset < job.from[i].bytes;) {
      if (filled == kChunkBytes) {
        job.chunk_begin.push_back(job.pieces.size());
        filled = 0;
      }
      const uint64_t bytes = std::min(job.from[i].bytes - offset, kChunkBytes - filled);
      job.pieces.push_back({job.to[i].data() + offset, job.from[i].data() + offset, bytes});
      offset += bytes;
      filled += bytes;
    }
  }
  job.chunk_begin.push_back(job.pieces.size());
}

void RunLane(const std::shared_ptr<Job>& job) {
  const size_t chunk = job->next_chunk.fetch_add(1);
  if (chunk + 1 >= job->chunk_begin.size()) {
    if (job->lanes_left.fetch_sub(1) == 1) job->strand.Post(std::move(job->done));
    return;
  }
  for (size_t i = job->chunk_begin[chunk]; i < job->chunk_begin[chunk + 1]; ++i) {
    std::memcpy(job->pieces[i].to, job->pieces[i].from, job->pieces[i].bytes);
  }
  job->workers.Post([job] { RunLane(job); });
}

}  // namespace

void CopyOnWorkers(transfer::Binding from, transfer::Binding to, Executor& workers,
                   Executor& strand, std::function<void()> done) {
  std::shared_ptr<Job> job(new Job{.from = std::move(from),
                                   .to = std::move(to),
                                   .pieces = {},
                                   .chunk_begin = {},
                                   .workers = workers,
                                   .strand = strand,
                                   .done = std::move(done)});
  CutIntoChunks(*job);
  for (uint32_t lane = 0; lane < kLanes; ++lane) workers.Post([job] { RunLane(job); });
}

}  // namespace weightwire::agent
