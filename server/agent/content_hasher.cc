#include "server/agent/content_hasher.h"

#include <optional>
#include <string_view>
#include <utility>

#include "server/content/identity.h"
#include "server/plan/segments.h"
#include "server/transfer/segment_copy.h"

// The slice is cut into segments, as a transfer would; a turn sums a few megabytes of them and
// posts the next turn behind whatever else waits for a worker.
namespace weightwire::agent {
namespace {

constexpr int64_t kSegmentBytes = int64_t{1} << 20;
constexpr int64_t kTurnBytes = int64_t{4} << 20;

struct Turns {
  std::shared_ptr<ContentHasher> job;
  Executor& workers;
  Executor& strand;
  std::function<void()> done;
  size_t stream = 0;
  std::optional<plan::StreamSchedule> schedule;  ///< of `stream`
  size_t segment = 0;
  size_t first_op = 0;            ///< of `stream`, among the ops of all streams
  std::vector<std::byte> packed;  ///< what a GPU's segment is brought to, to be summed here
};

Status SumSegment(Turns& turns, const plan::Segment& segment) {
  const ContentHasher& job = *turns.job;
  const plan::CopyOp& op = job.slice->streams[turns.stream].ops[segment.op_index];
  const transfer::SegmentCopy copy = transfer::CopyOf(op, segment);
  const auto first = static_cast<int64_t>(copy.target_offset) / kernels::ElementBytes(copy.to);
  kernels::KeyedSum& sum = turns.job->sums[turns.first_op + segment.op_index];
  const kernels::SumSeed seed = content::SeedOf(job.slice->tensor_names[op.canonical]);
  const device::Bytes bytes = job.bytes[op.source_tensor].at() + copy.source_offset;
  if (bytes.device == nullptr) {
    kernels::AddKeyed(sum, seed, bytes.at, copy.box, copy.from, copy.to, first);
    return OkStatus();
  }
  turns.packed.resize(static_cast<size_t>(segment.bytes));
  WW_RETURN_IF_ERROR(
      device::Copy({turns.packed.data()}, bytes, WithPackedTarget(copy.box), copy.from, copy.to));
  kernels::AddKeyed(sum, seed, turns.packed.data(), WithPackedSource(copy.box), copy.to, copy.to,
                    first);
  return OkStatus();
}

/// False when nothing is left.
bool SumSome(Turns& turns) {
  const auto& streams = turns.job->slice->streams;
  for (int64_t bytes = 0; bytes < kTurnBytes && turns.stream < streams.size();) {
    if (turns.job->stop.load(std::memory_order_relaxed)) return false;
    if (!turns.schedule) {
      turns.schedule = plan::ScheduleOf(streams[turns.stream], kSegmentBytes, 2 * kSegmentBytes);
      turns.segment = 0;
    }
    if (turns.segment == turns.schedule->segments.size()) {
      turns.first_op += streams[turns.stream++].ops.size();
      turns.schedule.reset();
      continue;
    }
    const plan::Segment& segment = turns.schedule->segments[turns.segment++];
    turns.job->why = SumSegment(turns, segment);
    if (!turns.job->why.ok()) return false;
    bytes += segment.bytes;
  }
  return turns.stream < streams.size();
}

void TakeTurn(const std::shared_ptr<Turns>& turns) {
  if (SumSome(*turns)) {
    turns->workers.Post([turns] { TakeTurn(turns); });
    return;
  }
  turns->strand.Post([turns] { std::exchange(turns->done, {})(); });
}

}  // namespace

void SumOnWorkers(std::shared_ptr<ContentHasher> job, Executor& workers, Executor& strand,
                  std::function<void()> done) {
  size_t ops = 0;
  for (const plan::Stream& stream : job->slice->streams) ops += stream.ops.size();
  job->sums.assign(ops, {});
  std::shared_ptr<Turns> turns(
      new Turns{std::move(job), workers, strand, std::move(done), 0, std::nullopt, 0, 0, {}});
  workers.Post([turns] {
    turns->job->why = turns->job->check();
    if (!turns->job->why.ok()) turns->stream = turns->job->slice->streams.size();
    TakeTurn(turns);
  });
}

}  // namespace weightwire::agent
