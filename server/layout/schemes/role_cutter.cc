#include "server/layout/schemes/role_cutter.h"

namespace weightwire::layout {

void RoleCutter::Whole(std::string name, Role role, int64_t layer) {
  if (const auto tensor = model_.Find(role, layer)) builder_.Whole(std::move(name), *tensor);
}

void RoleCutter::Columns(std::string name, Role role, int64_t layer) {
  const auto tensor = model_.Find(role, layer);
  if (!tensor) return;
  const int64_t width = model_.canonical.tensors[*tensor].shape[1] / tp_;
  builder_.Columns(std::move(name), *tensor, t_ * width, width);
}

void RoleCutter::VocabRows(std::string name, Role role, int64_t padded_rows) {
  const auto tensor = model_.Find(role);
  if (!tensor) return;
  const RowRun runs[] = {{*tensor, 0, model_.config.vocab}};
  const int64_t rows = padded_rows / tp_;
  builder_.Rows(std::move(name), runs, t_ * rows, rows);
}

void RoleCutter::ChunkOfEach(std::string name, std::array<Role, 2> roles, int64_t layer) {
  const auto first = model_.Find(roles[0], layer);
  const auto second = model_.Find(roles[1], layer);
  if (!first || !second) return;
  const int64_t rows = model_.canonical.tensors[*first].shape[0] / tp_;
  const RowRun runs[] = {{*first, t_ * rows, rows}, {*second, t_ * rows, rows}};
  builder_.Rows(std::move(name), runs, 0, 2 * rows);
}

Status CheckTensorParallel(const ModelConfig& config, int64_t tp) {
  WW_RETURN_IF_ERROR(CheckDivides("num_attention_heads", config.heads, tp));
  WW_RETURN_IF_ERROR(CheckDivides("intermediate_size", config.intermediate, tp));
  if (config.kv_heads < tp) return CheckDivides("tp", tp, config.kv_heads);
  return CheckDivides("num_key_value_heads", config.kv_heads, tp);
}

}  // namespace weightwire::layout
