#include "server/layout/schemes/scale_tensors.h"

#include "server/layout/blocks.h"
#include "server/layout/schemes/rank_builder.h"

namespace weightwire::layout {
namespace {

/// Rows or columns of one piece: [begin, begin + count) of the weight's `size`, from `local` on in
/// the local tensor.
struct Run {
  std::string_view what;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t size = 0;
  int64_t local = 0;
  int64_t block = 0;
};

Range BlocksOf(const Run& run) {
  return {run.begin / run.block,
          BlockCount(run.begin + run.count, run.block) - run.begin / run.block};
}

class ScaleCutter {
 public:
  ScaleCutter(const Model& model, const LocalTensor& weights)
      : model_(model), blocks_(*model.config().scales), weights_(weights) {}

  Result<LocalTensor> Cut() const {
    LocalTensor scales{weights_.name, DType::kF32, weights_.shape, {}};
    scales.name.append(kScaleSuffix);
    scales.shape.end()[-2] = BlockCount(scales.shape.end()[-2], blocks_.rows);
    scales.shape.end()[-1] = BlockCount(scales.shape.end()[-1], blocks_.columns);
    for (const Piece& piece : weights_.pieces) {
      WW_ASSIGN(Piece of_scales, ScalesOf(piece, scales.shape.end()[-2], scales.shape.end()[-1]));
      scales.pieces.push_back(std::move(of_scales));
    }
    return scales;
  }

 private:
  /// `rows` and `columns` are those of the scales of one matrix.
  Result<Piece> ScalesOf(const Piece& piece, int64_t rows, int64_t columns) const {
    const TensorSpec& weight = model_.canonical().tensors[piece.tensor];
    const int64_t width = weights_.shape.end()[-1];
    const int64_t matrix = weights_.shape.end()[-2] * width;
    WW_CHECK(piece.local_stride == (std::vector<int64_t>{width, 1}));
    const Run of_rows = {"rows",
                         piece.box.begin[0],
                         piece.box.extent[0],
                         weight.shape[0],
                         piece.local_offset % matrix / width,
                         blocks_.rows};
    const Run of_columns = {"columns",       piece.box.begin[1],         piece.box.extent[1],
                            weight.shape[1], piece.local_offset % width, blocks_.columns};
    WW_FAIL_IF_ERROR(Check(weight, of_rows));
    WW_FAIL_IF_ERROR(Check(weight, of_columns));
    const Range r = BlocksOf(of_rows);
    const Range c = BlocksOf(of_columns);
    return Piece{*model_.ScalesOf(piece.tensor),
                 {{r.begin, c.begin}, {r.count, c.count}},
                 (piece.local_offset / matrix * rows + of_rows.local / blocks_.rows) * columns +
                     of_columns.local / blocks_.columns,
                 {columns, 1}};
  }

  Status Check(const TensorSpec& weight, const Run& run) const {
    if (!IsWholeBlocks(run.begin, run.begin + run.count, run.size, run.block)) {
      return CutsBlock(weight.name, run.what, run.begin, run.begin + run.count, run.block);
    }
    if (run.local % run.block == 0) return OkStatus();
    return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                  std::string(run.what) + " " + std::to_string(run.begin) + " to " +
                      std::to_string(run.begin + run.count) + " would begin at " +
                      std::to_string(run.local) + " in " + weights_.name + ", inside a block of " +
                      std::to_string(run.block) + " that has one fp8 scale")
        .AtTensor(weight.name)
        .Remedy(
            "what is fused before it must be whole blocks: choose other parallel sizes, or "
            "leave the fused modules unquantized");
  }

  const Model& model_;
  const WeightFormat& blocks_;
  const LocalTensor& weights_;
};

/// Whether the pieces are of fp8 weights; all of them or none must be.
Result<bool> IsQuantized(const Model& model, const LocalTensor& tensor) {
  if (tensor.pieces.empty()) return false;
  const uint32_t first = tensor.pieces.front().tensor;
  const bool quantized = model.ScalesOf(first).has_value();
  for (const Piece& piece : tensor.pieces) {
    if (model.ScalesOf(piece.tensor).has_value() == quantized) continue;
    const auto& tensors = model.canonical().tensors;
    return Fail(Status(Code::kInvalidArgument, Reason::kDtypeMismatch,
                       tensor.name + " fuses it (" +
                           std::string(DTypeName(tensors[piece.tensor].dtype)) + ") with " +
                           tensors[first].name + " (" +
                           std::string(DTypeName(tensors[first].dtype)) + ")")
                    .AtTensor(tensors[piece.tensor].name)
                    .Remedy("name both or none in modules_to_not_convert"));
  }
  return quantized;
}

}  // namespace

Status CutsBlock(const std::string& weight, std::string_view what, int64_t begin, int64_t end,
                 int64_t block) {
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::string(what) + " " + std::to_string(begin) + " to " + std::to_string(end) +
                    " cut through a block of " + std::to_string(block) + " that has one fp8 scale")
      .AtTensor(weight)
      .Remedy("choose parallel sizes that leave multiples of " + std::to_string(block) +
              "; experts stay whole under expert parallelism");
}

Status AddScaleTensors(const Model& model, RankLayout& rank) {
  if (!model.config().scales) return OkStatus();
  std::vector<LocalTensor> tensors;
  for (LocalTensor& tensor : rank.tensors) {
    WW_ASSIGN_OR_STATUS(const bool quantized, IsQuantized(model, tensor));
    tensors.push_back(std::move(tensor));
    if (!quantized) continue;
    WW_ASSIGN_OR_STATUS(LocalTensor scales, ScaleCutter(model, tensors.back()).Cut());
    tensors.push_back(std::move(scales));
  }
  rank.tensors = std::move(tensors);
  return OkStatus();
}

}  // namespace weightwire::layout
