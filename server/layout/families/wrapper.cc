#include "server/layout/families/wrapper.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kMergedMax = int64_t{1} << 20;

Status BadConfig(std::string message) {
  return {Code::kInvalidArgument, Reason::kInvalidRequest, std::move(message)};
}

Result<const Json*> Member(const Json& json, const char* key) {
  const auto it = json.find(key);
  if (it != json.end() && it->is_object()) return &*it;
  return Fail(BadConfig(std::string("the field ") + key + " is missing or no object"));
}

}  // namespace

Result<const Family*> TextFamily(const Family& family, const Json& json) {
  if (family.wrapper == nullptr) return &family;
  WW_ASSIGN(const Json* text, Member(json, "text_config"));
  WW_ASSIGN(const std::optional<std::string> given, OptionalString(*text, "model_type"));
  std::string known;
  for (const TextType& type : family.wrapper->texts) {
    if (!given || *given == type.model_type) return &FamilyOf(type.family);
    known.append(known.empty() ? "" : ", ").append(type.model_type);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kUnknownModel,
                     "text_config's model_type: expected one that is described within " +
                         std::string(family.model_type) + ", found \"" + given->substr(0, 64) +
                         "\"")
                  .Remedy("use one of " + known + ", or send explicit layouts"));
}

Result<Json> WrappedTextConfig(const Json& json) {
  WW_ASSIGN(const Json* inner, Member(json, "text_config"));
  Json flat = *inner;
  for (const char* key : {"dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"}) {
    if (const auto outer = json.find(key); outer != json.end() && !flat.contains(key)) {
      flat[key] = *outer;
    }
  }
  return flat;
}

Result<Json> VisionJson(const Json& json) {
  WW_ASSIGN(const Json* vision, Member(json, "vision_config"));
  return *vision;
}

Status SetPositions(int64_t image, int64_t more, VisionConfig& vision) {
  const int64_t side = image / vision.patch;
  if (side < 1 || side > 1'024) {
    return BadConfig("vision_config has an image_size of less than one patch_size or over 1,024");
  }
  vision.positions = side * side + more;
  return CheckVision(vision);
}

Status SetMerged(const Json& json, const char* key, int64_t fallback, VisionConfig& vision) {
  const auto given = json.find(key);
  const bool list = given != json.end() && given->is_array() && given->size() == 2;
  int64_t first = 0, second = 0;
  if (list) {
    first = AsInteger(given->at(0)).value_or(0);
    second = AsInteger(given->at(1)).value_or(0);
  } else {
    WW_ASSIGN_OR_STATUS(first, ReadSizeOr(json, key, fallback));
    second = first;
  }
  if (first < 1 || second < 1 || first > 1'024 || second > 1'024) {
    return BadConfig(std::string("the field ") + key +
                     " is no size of patches to join, up to 1,024");
  }
  vision.merged = first * second;
  return OkStatus();
}

Status CheckVision(const VisionConfig& vision) {
  const auto limit = static_cast<int64_t>(LayoutLimits{}.canonical_tensors_max);
  if (vision.hidden % vision.heads != 0) {
    return BadConfig("vision_config has a hidden size that is no multiple of its heads");
  }
  if (vision.depth > limit || vision.mergers > limit || vision.merged > kMergedMax) {
    return BadConfig("vision_config has more blocks than fit " + std::to_string(limit) +
                     " tensors, or joins more than 2^20 patches");
  }
  return OkStatus();
}

}  // namespace weightwire::layout
