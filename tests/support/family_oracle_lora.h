#pragma once

#include "tests/support/family_oracle_model.h"

namespace weightwire::family_oracle {

/// The words of `targets=`, each with the module that it means.
const std::vector<std::pair<std::string, std::string>>& LoraTargets();

/// PEFT's A and B of rank `rank` for every linear layer of the decoder that a target names; all
/// that there are when `targets` is empty. A number in every element that `hf` has nowhere.
Tensors Adapters(const Config& config, const Tensors& hf, int64_t rank,
                 const std::vector<std::string>& targets);
/// Whether the model has linear layers for every target.
bool AdaptersFit(const Config& config, const std::vector<std::string>& targets);

/// What ranks that hold `base` of `hf` work with: of B the rows and of A the columns that they have
/// of the weight, in the order in which they have them.
std::vector<Tensors> AdapterRanks(const Tensors& hf, const Tensors& adapters,
                                  const std::vector<Tensors>& base);

}  // namespace weightwire::family_oracle
