#pragma once

#include <vector>

#include "server/layout/families/family.h"

namespace weightwire::layout {

/// A parameter or buffer as torch holds it before anything is sharded.
struct TorchTensor {
  uint32_t tensor = 0;  ///< canonical
  Shape shape;          ///< torch's; the last canonical dimensions may be joined in it
  int tp_dim = -1;      ///< of `shape`, which tensor parallelism cuts; −1: it leaves it whole
  bool buffer = false;  ///< never sharded
  int64_t layer = -1;   ///< −1: outside the decoder's layers
};

/// All tensors of the first `layers` layers and outside layers, in canonical order. Tensor
/// parallelism cuts them as the usual plans for Hugging Face modules do: column-parallel modules
/// (q, k, v, gate, up and latent up projections, also of experts, with their biases; embedding and
/// lm_head; sinks) by rows, row-parallel ones (o, down) by columns; all else stays whole. The
/// scales of fp8 weights are cut as the weights are.
std::vector<TorchTensor> TorchTensors(const Model& model, int64_t layers);

}  // namespace weightwire::layout
