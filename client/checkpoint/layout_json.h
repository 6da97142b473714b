#pragma once

#include <nlohmann/json.hpp>

#include "server/layout/types.h"

/// A layout as JSON, for `wwctl layout show --json` and for the process that loads a checkpoint.
namespace weightwire::checkpoint {

using Json = nlohmann::ordered_json;

/// {rank, name, dtype, shape}
Json SpecJson(uint32_t rank, const layout::LocalTensor& tensor);

/// The same, and pieces: [{tensor, begin, extent, local_offset, local_stride}], by canonical names.
Json TensorJson(const layout::ModelLayout& layout, uint32_t rank,
                const layout::LocalTensor& tensor);

}  // namespace weightwire::checkpoint
