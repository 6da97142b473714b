#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernels.h"
#include "server/base/status.h"

/// Reads weights out of files. Files are not mapped: where one shrinks under its reader, a mapping
/// ends the process with SIGBUS, or shows zeros up to the end of its last page; a read comes short.
namespace weightwire::checkpoint {

/// Copies the block that begins at byte `offset` of `fd` to `target`, its bits past the caches
/// where the block is not contiguous. kDataLoss: the file ends before the block does; kUnavailable:
/// the disk. Both say `name`. Blocks; any thread.
Status ReadBlock(int fd, const std::string& name, int64_t offset, void* target,
                 const kernels::StridedBox& box, int64_t element_bytes);

}  // namespace weightwire::checkpoint
