#include "server/layout/schemes/role_cutter.h"

#include <algorithm>

namespace weightwire::layout {

void RoleCutter::Whole(std::string name, Role role, int64_t layer) {
  const auto view = model_.Find(role, layer);
  if (!view) return;
  const RowRun runs[] = {{*view, 0, view->rows()}};
  builder_.Rows(std::move(name), runs, 0, view->rows());
}

void RoleCutter::Rows(std::string name, Role role, int64_t layer) {
  const auto view = model_.Find(role, layer);
  if (!view) return;
  const int64_t rows = Divide(*view, view->rows(), tp_);
  const RowRun runs[] = {{*view, t_ * rows, rows}};
  builder_.Rows(std::move(name), runs, 0, rows);
}

void RoleCutter::Columns(std::string name, Role role, int64_t layer) {
  const auto view = model_.Find(role, layer);
  if (!view) return;
  const int64_t width = Divide(*view, view->columns(), tp_);
  builder_.Columns(std::move(name), *view, t_ * width, width);
}

void RoleCutter::VocabRows(std::string name, Role role, int64_t padded_rows) {
  const auto view = model_.Find(role);
  if (!view) return;
  const RowRun runs[] = {{*view, 0, view->rows()}};
  const int64_t rows = padded_rows / tp_;
  builder_.Rows(std::move(name), runs, t_ * rows, rows);
}

void RoleCutter::ChunkOfEach(std::string name, std::array<Role, 2> roles, int64_t layer) {
  const auto first = model_.Find(roles[0], layer);
  const auto second = model_.Find(roles[1], layer);
  if (!second) return;
  if (!first) return Rows(std::move(name), roles[1], layer);
  const int64_t rows = Divide(*first, first->rows(), tp_);
  const RowRun runs[] = {{*first, t_ * rows, rows}, {*second, t_ * rows, rows}};
  builder_.Rows(std::move(name), runs, 0, 2 * rows);
}

void RoleCutter::Stack(std::string name, std::array<Role, 2> roles, int64_t layer) {
  const auto first = model_.Find(roles[0], layer);
  const auto second = model_.Find(roles[1], layer);
  if (!first || !second) return;
  const RowRun runs[] = {{*first, 0, first->rows()}, {*second, 0, second->rows()}};
  builder_.Rows(std::move(name), runs, 0, first->rows() + second->rows());
}

int64_t RoleCutter::Divide(const View& view, int64_t size, int64_t parts) {
  if (size % parts == 0) return size / parts;
  builder_.Refuse(CheckDivides("the size that is cut", size, "the parallel size", parts,
                               model_.canonical().tensors[view.tensor].name));
  return 0;
}

std::string FirstTensor(const Model& model, std::initializer_list<Role> roles) {
  for (Role role : roles) {
    for (int64_t layer = 0; layer < std::ssize(model.config().kinds); ++layer) {
      if (const auto view = model.Find(role, layer)) {
        return model.canonical().tensors[view->tensor].name;
      }
    }
  }
  return "";
}

Status CheckTensorParallel(const Model& model, int64_t tp) {
  const ModelConfig& config = model.config();
  const std::string q = FirstTensor(model, {Role::kQWeight, Role::kQUp});
  WW_RETURN_IF_ERROR(CheckDivides("num_attention_heads", config.heads, "tp", tp, q));
  if (const std::string dense = FirstTensor(model, {Role::kGateWeight, Role::kUpWeight});
      !dense.empty()) {
    WW_RETURN_IF_ERROR(CheckDivides("intermediate_size", config.intermediate, "tp", tp, dense));
  }
  if (config.shared_intermediate > 0) {
    WW_RETURN_IF_ERROR(CheckDivides("the shared experts' inner size", config.shared_intermediate,
                                    "tp", tp,
                                    FirstTensor(model, {Role::kSharedGate, Role::kSharedUp})));
  }
  if (config.IsLatent()) return OkStatus();
  for (int64_t layer = 0; layer < std::ssize(config.kinds); ++layer) {
    const auto k = model.Find(Role::kKWeight, layer);
    const int64_t kv_heads = config.KvHeads(layer);
    if (!k || kv_heads % tp == 0 || tp % kv_heads == 0) continue;
    return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                  "num_key_value_heads: expected a divisor or a multiple of tp " +
                      std::to_string(tp) + ", found " + std::to_string(kv_heads))
        .AtTensor(model.canonical().tensors[k->tensor].name)
        .Remedy("choose a tp that divides num_key_value_heads or is a multiple of it");
  }
  return OkStatus();
}

}  // namespace weightwire::layout
