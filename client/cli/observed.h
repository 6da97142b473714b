#pragma once

#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/layout/scheme.h"

namespace weightwire::cli {

/// What a process holds, from a file: a safetensors file (of which only the header is read), or
/// JSON {name: [dtype, shape]} or {name: {"dtype": …, "shape": …}}, in the file's order. dtypes are
/// safetensors' ("BF16") or torch's ("bfloat16", "torch.bfloat16") words.
///   kInvalidArgument / kIoError         cannot be read
///   kInvalidArgument / kInvalidRequest  none of these, or a dtype or shape is not understood
Result<std::vector<layout::ObservedTensor>> ReadObserved(const std::string& path);

}  // namespace weightwire::cli
