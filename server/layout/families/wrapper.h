#pragma once

#include "server/layout/families/family.h"

namespace weightwire::layout {

/// `family` itself, or the family of the text model that a wrapper's text_config names.
///   kInvalidArgument / kInvalidRequest  a wrapper without text_config
///   kInvalidArgument / kUnknownModel    a text model that the wrapper is not described with
Result<const Family*> TextFamily(const Family& family, const Json& json);

/// What the text model's family reads of a wrapper's config.json: text_config, and what counts for
/// all modules and stands beside it (dtype, quantization_config, tie_word_embeddings; whether the
/// two places agree is config.cc's to check). kInvalidArgument / kInvalidRequest without the former
Result<Json> WrappedTextConfig(const Json& json);

/// `vision_config`, an object. kInvalidArgument / kInvalidRequest
Result<Json> VisionJson(const Json& json);
/// One position for each patch of an image of `image` pixels along a side, and `more`; then as
/// CheckVision. kInvalidArgument / kInvalidRequest when the patch does not fit the image.
Status SetPositions(int64_t image, int64_t more, VisionConfig& vision);
/// `merged` from the side of the square of patches that is joined, or from two sides in a list.
/// kInvalidArgument / kInvalidRequest
Status SetMerged(const Json& json, const char* key, int64_t fallback, VisionConfig& vision);
/// Refuses a tower whose sizes cannot be cut into heads, or that has too many blocks or patches in
/// one to count with.
Status CheckVision(const VisionConfig& vision);

}  // namespace weightwire::layout
