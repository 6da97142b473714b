#pragma once

#include <functional>

#include "server/base/executor.h"
#include "server/transfer/transfer.h"

namespace weightwire::agent {

/// Copies `from` to `to` (equal lengths, no overlap) on `workers`, in chunks, two at a time, so
/// that packing and verifying of other ranks go on between them. `done` runs on `strand`: not OK
/// when a GPU failed (device/bytes.h). Both bindings are kept alive until then. Never blocks.
void CopyOnWorkers(transfer::Binding from, transfer::Binding to, Executor& workers,
                   Executor& strand, std::function<void(const Status&)> done);

}  // namespace weightwire::agent
