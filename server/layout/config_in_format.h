#pragma once

#include <map>
#include <string>
#include <string_view>

#include "server/base/status.h"

namespace weightwire::layout {

/// The config.json of the same model with weights in the format of this name (weight_format.h): its
/// linear weights, but the head and the routers of experts, which releases leave out. `format` may
/// be the object quantization_config of another config.json, which says what is left out.
///   kInvalidArgument / kInvalidRequest     no such format: the known ones are named
///   kFailedPrecondition / kDtypeMismatch   the model is quantized already
/// Else as LayoutFromScheme.
Result<std::string> ConfigInFormat(std::string_view config_json, std::string_view format);

/// By the name of each weight in NVFP4, a text that those have in common that engines fuse. Errors
/// as of ConfigInFormat.
Result<std::map<std::string, std::string>> FusedWeights(std::string_view config_json);

}  // namespace weightwire::layout
