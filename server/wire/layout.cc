#include "server/wire/layout.h"

#include <string>
#include <utility>

#include "server/layout/models.h"
#include "server/wire/checks.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

std::string Sub(std::string_view field, std::string_view name) {
  return std::string(field).append(".").append(name);
}
std::string At(std::string_view field, std::string_view name, int index) {
  return Sub(field, name).append("[").append(std::to_string(index)).append("]");
}

template <typename Repeated>
Status CheckDims(std::string_view field, const Repeated& list) {
  return CheckCount(field, static_cast<size_t>(list.size()), layout::kMaxDims);
}

template <typename Repeated>
std::vector<int64_t> ListOf(const Repeated& list) {
  return {list.begin(), list.end()};
}

template <typename Repeated>
void SetList(const std::vector<int64_t>& list, Repeated* out) {
  out->Assign(list.begin(), list.end());
}

void SetSpec(const std::string& name, layout::DType dtype, const layout::Shape& shape,
             v1::TensorSpec* out) {
  out->set_name(name);
  out->set_dtype(ToProto(dtype));
  SetList(shape, out->mutable_shape());
}

void SetPiece(const layout::Piece& piece, v1::Piece* out) {
  out->set_tensor(piece.tensor);
  SetList(piece.box.begin, out->mutable_begin());
  SetList(piece.box.extent, out->mutable_extent());
  out->set_local_offset(piece.local_offset);
  SetList(piece.local_stride, out->mutable_local_stride());
}

Result<layout::Piece> PieceFromProto(std::string_view field, const v1::Piece& piece) {
  WW_FAIL_IF_ERROR(CheckDims(field, piece.begin()));
  if (piece.extent_size() != piece.begin_size() ||
      piece.local_stride_size() != piece.begin_size()) {
    return Fail(Bad(field, "begin, extent and local_stride must be equally long"));
  }
  layout::Piece out;
  out.tensor = piece.tensor();
  out.box.begin = ListOf(piece.begin());
  out.box.extent = ListOf(piece.extent());
  out.local_offset = piece.local_offset();
  out.local_stride = ListOf(piece.local_stride());
  return out;
}

Result<layout::LocalTensor> LocalFromProto(std::string_view field, const v1::LocalTensor& local) {
  WW_ASSIGN(layout::TensorSpec spec, FromProto(Sub(field, "spec"), local.spec()));
  layout::LocalTensor out;
  out.name = std::move(spec.name);
  out.dtype = spec.dtype;
  out.shape = std::move(spec.shape);
  out.pieces.reserve(local.pieces_size());
  for (int i = 0; i < local.pieces_size(); ++i) {
    auto piece = PieceFromProto(At(field, "pieces", i), local.pieces(i));
    if (!piece) return Fail(std::move(piece.error()).AtTensor(out.name));
    out.pieces.push_back(std::move(*piece));
  }
  return out;
}

Result<layout::TraceRow> RowFromProto(const std::string& field, const v1::TraceRow& row) {
  WW_FAIL_IF_ERROR(CheckText(field + ".source", row.source(), kNameBytesMax));
  WW_FAIL_IF_ERROR(CheckText(field + ".param", row.param(), kNameBytesMax));
  WW_FAIL_IF_ERROR(CheckDims(field + ".shape", row.shape()));
  WW_FAIL_IF_ERROR(CheckDims(field + ".stride", row.stride()));
  WW_FAIL_IF_ERROR(CheckCount(field + ".ops", row.ops_size(), kTraceOpsMax));
  layout::TraceRow out;
  WW_ASSIGN(out.dtype, FromProto(field + ".dtype", row.dtype()));
  for (const v1::TraceOp& op : row.ops()) {
    WW_FAIL_IF_ERROR(CheckText(field + ".ops.name", op.name(), kNameBytesMax));
    WW_FAIL_IF_ERROR(CheckCount(field + ".ops.arguments", op.arguments_size(), kTraceOpsMax));
    out.ops.push_back({op.name(), ListOf(op.arguments())});
  }
  out.source = row.source();
  out.param = row.param();
  out.offset = row.offset();
  out.shape = ListOf(row.shape());
  out.stride = ListOf(row.stride());
  return out;
}

v1::TraceRow RowToProto(const layout::TraceRow& row) {
  v1::TraceRow out;
  out.set_source(row.source);
  for (const layout::TraceOp& op : row.ops) {
    v1::TraceOp* step = out.add_ops();
    step->set_name(op.name);
    SetList(op.arguments, step->mutable_arguments());
  }
  out.set_param(row.param);
  out.set_offset(row.offset);
  SetList(row.shape, out.mutable_shape());
  SetList(row.stride, out.mutable_stride());
  out.set_dtype(ToProto(row.dtype));
  return out;
}

Result<std::vector<layout::ObservedTensor>> SpecsFromProto(
    const std::string& field, const std::string& list,
    const google::protobuf::RepeatedPtrField<v1::TensorSpec>& specs) {
  WW_FAIL_IF_ERROR(CheckCount(field + "." + list, specs.size(), kTensorsMax));
  std::vector<layout::ObservedTensor> out;
  out.reserve(static_cast<size_t>(specs.size()));
  for (int i = 0; i < specs.size(); ++i) {
    WW_ASSIGN(layout::TensorSpec spec, FromProto(At(field, list, i), specs.Get(i)));
    out.push_back({std::move(spec.name), spec.dtype, std::move(spec.shape)});
  }
  return out;
}

/// What a scheme and a trace have in common.
template <typename Message>
Result<control::LayoutSubmission> ConfigFromProto(const std::string& field,
                                                  const Message& message) {
  WW_FAIL_IF_ERROR(CheckText(field + ".config_json", message.config_json(), kConfigBytesMax));
  WW_FAIL_IF_ERROR(CheckText(field + ".topology.spec", message.topology().spec(), kSpecBytesMax));
  control::LayoutSubmission out;
  out.config_json = message.config_json();
  out.spec = message.topology().spec();
  WW_ASSIGN(out.observed, SpecsFromProto(field, "observed", message.observed()));
  return out;
}

template <typename Message>
void SetConfig(const control::LayoutSubmission& submission, Message* out) {
  out->set_config_json(submission.config_json);
  out->mutable_topology()->set_spec(submission.spec);
  for (const layout::ObservedTensor& tensor : submission.observed) {
    SetSpec(tensor.name, tensor.dtype, tensor.shape, out->add_observed());
  }
}

Result<control::LayoutSubmission> SchemeFromProto(const std::string& field,
                                                  const v1::LayoutSubmission::Scheme& scheme) {
  if (scheme.topology().spec().empty()) {
    return Fail(Bad(field + ".topology.spec", "must not be empty"));
  }
  return ConfigFromProto(field, scheme);
}

Result<control::LayoutSubmission> TracedFromProto(const std::string& field,
                                                  const v1::LayoutSubmission::Traced& traced) {
  if (traced.rows().empty()) return Fail(Bad(field + ".rows", "must not be empty"));
  WW_FAIL_IF_ERROR(CheckCount(field + ".rows", traced.rows_size(), kPiecesMax));
  WW_ASSIGN(control::LayoutSubmission out, ConfigFromProto(field, traced));
  WW_ASSIGN(out.checkpoint, SpecsFromProto(field, "checkpoint", traced.checkpoint()));
  out.trace.reserve(traced.rows_size());
  for (int i = 0; i < traced.rows_size(); ++i) {
    WW_ASSIGN(auto row, RowFromProto(At(field, "rows", i), traced.rows(i)));
    out.trace.push_back(std::move(row));
  }
  return out;
}

Result<control::LayoutSubmission> ModelsFromProto(const std::string& field,
                                                  const v1::LayoutSubmission::Models& models) {
  if (models.models().empty()) return Fail(Bad(field, "must not be empty"));
  WW_FAIL_IF_ERROR(CheckCount(field, models.models_size(), layout::kModelsMax));
  control::LayoutSubmission out;
  for (int i = 0; i < models.models_size(); ++i) {
    const v1::LayoutSubmission::Model& model = models.models(i);
    const std::string at = field + "[" + std::to_string(i) + "]";
    WW_FAIL_IF_ERROR(layout::CheckModelName(model.name()));
    if (model.layout().has_models()) {
      return Fail(Bad(at + ".layout", "must not have models itself"));
    }
    WW_ASSIGN(auto layout, FromProto(at + ".layout", model.layout()));
    out.models.push_back({model.name(), model.rank(), model.world_size(), std::move(layout)});
  }
  return out;
}

}  // namespace

v1::DType ToProto(layout::DType dtype) { return static_cast<v1::DType>(dtype); }

Result<layout::DType> FromProto(std::string_view field, v1::DType dtype) {
  if (auto known = layout::DTypeFromNumber(dtype)) return *known;
  return Fail(UnknownEnum(field, dtype));
}

v1::TensorSpec ToProto(const layout::TensorSpec& spec) {
  v1::TensorSpec out;
  SetSpec(spec.name, spec.dtype, spec.shape, &out);
  return out;
}

Result<layout::TensorSpec> FromProto(std::string_view field, const v1::TensorSpec& spec) {
  WW_FAIL_IF_ERROR(CheckText(Sub(field, "name"), spec.name(), kNameBytesMax));
  if (spec.name().empty()) return Fail(Bad(Sub(field, "name"), "must not be empty"));
  auto dtype = FromProto(Sub(field, "dtype"), spec.dtype());
  if (!dtype) return Fail(std::move(dtype.error()).AtTensor(spec.name()));
  if (Status dims = CheckDims(Sub(field, "shape"), spec.shape()); !dims.ok()) {
    return Fail(std::move(dims).AtTensor(spec.name()));
  }
  return layout::TensorSpec{spec.name(), *dtype, ListOf(spec.shape())};
}

v1::CanonicalSpace ToProto(const layout::CanonicalSpace& canonical) {
  v1::CanonicalSpace out;
  out.mutable_tensors()->Reserve(static_cast<int>(canonical.tensors.size()));
  for (const layout::TensorSpec& tensor : canonical.tensors) {
    SetSpec(tensor.name, tensor.dtype, tensor.shape, out.add_tensors());
  }
  return out;
}

Result<layout::CanonicalSpace> FromProto(std::string_view field,
                                         const v1::CanonicalSpace& canonical) {
  WW_FAIL_IF_ERROR(CheckCount(Sub(field, "tensors"), canonical.tensors_size(), kTensorsMax));
  layout::CanonicalSpace out;
  out.tensors.reserve(canonical.tensors_size());
  for (int i = 0; i < canonical.tensors_size(); ++i) {
    WW_ASSIGN(auto tensor, FromProto(At(field, "tensors", i), canonical.tensors(i)));
    out.tensors.push_back(std::move(tensor));
  }
  return out;
}

v1::RankLayout ToProto(const layout::RankLayout& rank) {
  v1::RankLayout out;
  out.mutable_tensors()->Reserve(static_cast<int>(rank.tensors.size()));
  for (const layout::LocalTensor& tensor : rank.tensors) {
    v1::LocalTensor* local = out.add_tensors();
    SetSpec(tensor.name, tensor.dtype, tensor.shape, local->mutable_spec());
    for (const layout::Piece& piece : tensor.pieces) SetPiece(piece, local->add_pieces());
  }
  return out;
}

Result<layout::RankLayout> FromProto(std::string_view field, const v1::RankLayout& rank) {
  WW_FAIL_IF_ERROR(CheckCount(Sub(field, "tensors"), rank.tensors_size(), kTensorsMax));
  size_t pieces = 0;
  layout::RankLayout out;
  out.tensors.reserve(rank.tensors_size());
  for (int i = 0; i < rank.tensors_size(); ++i) {
    pieces += rank.tensors(i).pieces_size();
    WW_FAIL_IF_ERROR(CheckCount(Sub(field, "tensors.pieces"), pieces, kPiecesMax));
    WW_ASSIGN(auto tensor, LocalFromProto(At(field, "tensors", i), rank.tensors(i)));
    out.tensors.push_back(std::move(tensor));
  }
  return out;
}

v1::LayoutSubmission ToProto(const control::LayoutSubmission& submission) {
  v1::LayoutSubmission out;
  if (!submission.models.empty()) {
    for (const control::LayoutOfModel& of : submission.models) {
      v1::LayoutSubmission::Model* model = out.mutable_models()->add_models();
      model->set_name(of.model);
      model->set_rank(of.rank);
      model->set_world_size(of.world_size);
      *model->mutable_layout() = ToProto(of.layout);
    }
    return out;
  }
  if (submission.layout || submission.canonical) {
    v1::LayoutSubmission::Explicit* boxes = out.mutable_boxes();
    if (submission.canonical) *boxes->mutable_canonical() = ToProto(*submission.canonical);
    if (submission.layout) *boxes->mutable_layout() = ToProto(*submission.layout);
    return out;
  }
  if (!submission.trace.empty()) {
    SetConfig(submission, out.mutable_traced());
    for (const layout::TraceRow& row : submission.trace) {
      *out.mutable_traced()->add_rows() = RowToProto(row);
    }
    for (const layout::ObservedTensor& tensor : submission.checkpoint) {
      SetSpec(tensor.name, tensor.dtype, tensor.shape, out.mutable_traced()->add_checkpoint());
    }
    return out;
  }
  SetConfig(submission, out.mutable_scheme());
  return out;
}

Result<control::LayoutSubmission> FromProto(std::string_view field,
                                            const v1::LayoutSubmission& submission) {
  switch (submission.kind_case()) {
    case v1::LayoutSubmission::kScheme:
      return SchemeFromProto(Sub(field, "scheme"), submission.scheme());
    case v1::LayoutSubmission::kBoxes: {
      control::LayoutSubmission out;
      WW_ASSIGN(out.canonical,
                FromProto(Sub(field, "boxes.canonical"), submission.boxes().canonical()));
      WW_ASSIGN(out.layout, FromProto(Sub(field, "boxes.layout"), submission.boxes().layout()));
      return out;
    }
    case v1::LayoutSubmission::kTraced:
      return TracedFromProto(Sub(field, "traced"), submission.traced());
    case v1::LayoutSubmission::kModels:
      return ModelsFromProto(Sub(field, "models"), submission.models());
    case v1::LayoutSubmission::KIND_NOT_SET:
      break;
  }
  return Fail(Bad(field, "needs a scheme, a trace, boxes or models"));
}

}  // namespace weightwire::wire
