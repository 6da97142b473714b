#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/keyed_sum.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/epoch/messages.h"
#include "server/transfer/transfer.h"

namespace weightwire::agent {

/// Sums of one buffer's bytes, taken on the workers beside everything else: one short turn at a
/// time, so that a worker is never held for longer and never more than one is busy with it.
///
/// The bytes are only read. `stop` is how the strand says that they are about to be written: it
/// must be set on the strand before the first write, and looked at there again, after `done`,
/// before the sums are believed. Then none was written between the first and the last that was
/// read.
struct ContentHasher {
  epoch::HashCommand command;  ///< that it answers
  Nanos started{};
  transfer::Binding bytes;
  std::shared_ptr<const plan::RankSlice> slice;
  std::function<Status()> check;  ///< that the slice suits the bytes; runs on a worker, first
  int buffer = 0;
  std::atomic<bool> stop{false};
  std::vector<kernels::KeyedSum> sums;  ///< of each op, when done and not stopped
  Status why;                           ///< when done: what `check` said, or that a GPU failed
  bool summed = false;
  bool told = false;
  bool copies_awaited = false;  ///< the application has not said yet what became of its copies
  Status copies;                ///< what it said
};

/// `done` runs on the strand, once, also when it was stopped; the sums are worthless then.
void SumOnWorkers(std::shared_ptr<ContentHasher> job, Executor& workers, Executor& strand,
                  std::function<void()> done);

}  // namespace weightwire::agent
