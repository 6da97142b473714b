#include <algorithm>

#include "server/layout/head_names.h"
#include "server/layout/json_reader.h"
#include "server/layout/torch_dtype.h"
#include "server/layout/trace.h"
#include "server/layout/trace_head.h"

namespace weightwire::layout {
namespace {

Status Bad(const std::string& message) {
  return {Code::kInvalidArgument, Reason::kInvalidRequest, message};
}

Result<std::vector<int64_t>> Integers(const Json& array, const std::string& what) {
  if (!array.is_array()) return Fail(Bad(what + " is not a list"));
  std::vector<int64_t> values;
  for (const Json& element : array) {
    const std::optional<int64_t> value = AsInteger(element);
    if (!value) return Fail(Bad(what + " contains something that is no integer"));
    values.push_back(*value);
  }
  return values;
}

Result<const Json*> RequiredArray(const Json& object, const char* key) {
  const auto it = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || it == object.end() || !it->is_array()) {
    return Fail(Bad(std::string("the list ") + key + " is missing"));
  }
  return &*it;
}

/// ["narrow", 0, 0, 512]
Result<TraceOp> ReadOp(const Json& json) {
  if (!json.is_array() || json.empty() || !json[0].is_string()) {
    return Fail(Bad("an operation is not a list that begins with a name"));
  }
  TraceOp op{json[0].get<std::string>(), {}};
  WW_ASSIGN(op.arguments, Integers(Json(json.begin() + 1, json.end()), "an operation"));
  return op;
}

Result<TraceRow> ReadRow(const Json& json) {
  if (!json.is_object()) return Fail(Bad("a copy is not an object"));
  TraceRow row;
  WW_ASSIGN(row.source, RequiredString(json, "src"));
  WW_ASSIGN(row.param, RequiredString(json, "param"));
  WW_ASSIGN(row.offset, RequiredInteger(json, "offset"));
  WW_ASSIGN(const Json* shape, RequiredArray(json, "shape"));
  WW_ASSIGN(row.shape, Integers(*shape, "shape"));
  WW_ASSIGN(const Json* stride, RequiredArray(json, "stride"));
  WW_ASSIGN(row.stride, Integers(*stride, "stride"));
  WW_ASSIGN(const std::string dtype, RequiredString(json, "dtype"));
  const std::optional<DType> known = DTypeFromTorchName(dtype);
  if (!known) return Fail(Bad("the dtype \"" + dtype.substr(0, 64) + "\" is unknown"));
  row.dtype = *known;
  WW_ASSIGN(const Json* ops, RequiredArray(json, "ops"));
  for (const Json& op_json : *ops) {
    WW_ASSIGN(TraceOp op, ReadOp(op_json));
    row.ops.push_back(std::move(op));
  }
  return row;
}

Status ReadRank(const Json& json, EngineTrace& trace) {
  WW_ASSIGN_OR_STATUS(const Json* copies, RequiredArray(json, "copies"));
  WW_ASSIGN_OR_STATUS(const int64_t rank, RequiredInteger(json, "rank"));
  if (rank < 0 || rank >= static_cast<int64_t>(trace.ranks.size())) {
    return Bad("rank " + std::to_string(rank) + " is none of the trace's");
  }
  auto& rows = trace.ranks[static_cast<size_t>(rank)];
  if (!rows.empty()) return Bad("rank " + std::to_string(rank) + " is recorded twice");
  for (const Json& copy : *copies) {
    WW_ASSIGN_OR_STATUS(TraceRow row, ReadRow(copy));
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return Bad("rank " + std::to_string(rank) + " has no copies");
  return OkStatus();
}

/// Whether config.json ties the head to the embedding; nullopt where it does not say. What it says
/// twice must be one.
Result<std::optional<bool>> TiesHead(std::string_view config_json) {
  WW_ASSIGN(const Json json, ParseObject(config_json, "config.json"));
  std::optional<bool> tied;
  const auto text = json.find("text_config");
  const bool nested = text != json.end() && text->is_object();
  for (const Json* level : {&json, nested ? &*text : &json}) {
    WW_ASSIGN(const auto said, OptionalBool(*level, "tie_word_embeddings"));
    if (said && tied.value_or(*said) != *said) {
      return Fail(Bad("config.json's tie_word_embeddings is true at one level and false at another")
                      .AtTensor("lm_head.weight"));
    }
    if (said) tied = said;
  }
  return tied;
}

}  // namespace

Result<CanonicalSpace> CanonicalFromCheckpoint(std::string_view config_json,
                                               const std::vector<ObservedTensor>& checkpoint) {
  WW_ASSIGN(const std::optional<bool> tied, TiesHead(config_json));
  CanonicalSpace canonical;
  for (const ObservedTensor& tensor : checkpoint) {
    if (tied.value_or(false) && IsHeadName(tensor.name)) continue;
    canonical.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  std::ranges::sort(canonical.tensors, {}, &TensorSpec::name);
  WW_FAIL_IF_ERROR(Validate(ModelLayout{canonical, {}}));
  return canonical;
}

Status CheckHeadIsKnown(std::string_view config_json, const CanonicalSpace& canonical,
                        const std::vector<TraceRow>& rows) {
  WW_ASSIGN_OR_STATUS(const std::optional<bool> tied, TiesHead(config_json));
  const auto reads = [&rows](bool (*is)(std::string_view)) {
    return std::ranges::any_of(rows, is, &TraceRow::source);
  };
  const auto head = std::ranges::find_if(canonical.tensors, IsHeadName, &TensorSpec::name);
  if (tied || head == canonical.tensors.end() || !reads(IsEmbeddingName) || reads(IsHeadName)) {
    return OkStatus();
  }
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "the loader takes the embedding and leaves the checkpoint's head alone, and "
                "config.json does not say whether one is the other")
      .AtTensor(head->name)
      .Remedy("set tie_word_embeddings in config.json as the running model has it");
}

Result<EngineTrace> ParseTrace(std::string_view json_text) {
  WW_ASSIGN(const Json json, ParseObject(json_text, "the trace"));
  EngineTrace trace;
  const auto config = json.find("config");
  trace.config_json =
      config == json.end() ? "{}" : config->dump(-1, ' ', false, Json::error_handler_t::replace);
  WW_ASSIGN(const Json* ranks, RequiredArray(json, "ranks"));
  trace.ranks.resize(ranks->size());
  for (const Json& rank : *ranks) WW_FAIL_IF_ERROR(ReadRank(rank, trace));
  return trace;
}

}  // namespace weightwire::layout
