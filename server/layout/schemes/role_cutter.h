#pragma once

#include <array>
#include <initializer_list>
#include <string>

#include "server/layout/families/family.h"
#include "server/layout/schemes/rank_builder.h"

namespace weightwire::layout {

/// Cuts a model's tensors, named by role, for tensor-parallel rank `t` of `tp`: what Megatron and
/// vLLM do alike. A role that the model lacks gives no local tensor. A size that does not divide
/// refuses the rank and names the tensor.
class RoleCutter {
 public:
  RoleCutter(const Model& model, int64_t tp, int64_t t)
      : model_(model), tp_(tp), t_(t), builder_(model.canonical()) {}

  void Whole(std::string name, Role role, int64_t layer = 0);
  /// Chunk t of the rows, of the columns.
  void Rows(std::string name, Role role, int64_t layer);
  void Columns(std::string name, Role role, int64_t layer);
  /// Chunk t of the rows of the vocabulary padded to `padded_rows`.
  void VocabRows(std::string name, Role role, int64_t padded_rows);
  /// Chunk t of the rows of each role, one after another: gate, then up; up alone where the model
  /// has no gate.
  void ChunkOfEach(std::string name, std::array<Role, 2> roles, int64_t layer);
  /// Both roles whole, one after another.
  void Stack(std::string name, std::array<Role, 2> roles, int64_t layer);

  /// `size` / `parts`; 0, and the rank is refused, when it does not divide.
  int64_t Divide(const View& view, int64_t size, int64_t parts);

  const Model& model() const { return model_; }
  int64_t tp() const { return tp_; }
  int64_t t() const { return t_; }
  RankBuilder& builder() { return builder_; }

 private:
  const Model& model_;
  const int64_t tp_;
  const int64_t t_;
  RankBuilder builder_;
};

/// The first canonical tensor with one of the roles, in the first layer that has it; empty when the
/// model has none.
std::string FirstTensor(const Model& model, std::initializer_list<Role> roles);

/// What both need of the sizes: heads and the MLPs' inner sizes divide by tp, and so do kv heads or
/// tp by them. kInvalidArgument / kShapeMismatch, naming a tensor that cannot be cut.
Status CheckTensorParallel(const Model& model, int64_t tp);

}  // namespace weightwire::layout
