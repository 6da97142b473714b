#include "server/agent/snapshot.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
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
  device::Bytes to;
  device::Bytes from;
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
  std::function<void(const Status&)> done;
  std::mutex mutex;
  Status status;  ///< of the first piece that failed
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
      job.pieces.push_back({job.to[i].at() + offset, job.from[i].at() + offset, bytes});
      offset += bytes;
      filled += bytes;
    }
  }
  job.chunk_begin.push_back(job.pieces.size());
}

void RunLane(const std::shared_ptr<Job>& job) {
  const size_t chunk = job->next_chunk.fetch_add(1);
  if (chunk + 1 >= job->chunk_begin.size()) {
    if (job->lanes_left.fetch_sub(1) == 1) job->strand.Post([job] { job->done(job->status); });
    return;
  }
  for (size_t i = job->chunk_begin[chunk]; i < job->chunk_begin[chunk + 1]; ++i) {
    const Piece& piece = job->pieces[i];
    if (Status copied = device::CopyRun(piece.to, piece.from, piece.bytes); !copied.ok()) {
      std::lock_guard lock(job->mutex);
      if (job->status.ok()) job->status = std::move(copied);
    }
  }
  job->workers.Post([job] { RunLane(job); });
}

}  // namespace

void CopyOnWorkers(transfer::Binding from, transfer::Binding to, Executor& workers,
                   Executor& strand, std::function<void(const Status&)> done) {
  std::shared_ptr<Job> job(new Job{.from = std::move(from),
                                   .to = std::move(to),
                                   .pieces = {},
                                   .chunk_begin = {},
                                   .workers = workers,
                                   .strand = strand,
                                   .done = std::move(done),
                                   .mutex = {},
                                   .status = {}});
  CutIntoChunks(*job);
  for (uint32_t lane = 0; lane < kLanes; ++lane) workers.Post([job] { RunLane(job); });
}

}  // namespace weightwire::agent
