#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/types.h"

namespace weightwire::layout {

/// Parsed parallel spec, e.g. "megatron:tp2,pp2,dp2,first=1" or "vllm:tp4".
///
/// `scheme` is the word before the colon; `sizes` the numbers glued to a word ("tp" → 2);
/// `options` what is written key=value. Words without number are options with value "true".
struct ParallelSpec {
  std::string scheme;
  std::map<std::string, int64_t> sizes;
  std::map<std::string, std::string> options;
  /// Canonical text, keys sorted; parses back to the same spec.
  std::string ToString() const;
  int64_t SizeOr(std::string_view key, int64_t fallback) const;
};
///   kInvalidArgument / kUnknownScheme  not of the form above, a size < 1 or > 65,536, a key twice
Result<ParallelSpec> ParseParallelSpec(std::string_view text);

/// A model's config.json, as far as layouts need it.
///
/// `family` names the declarative file in layout/families that matched `model_type`.
struct ModelConfig;  // layout/families/family.h

/// Derives what each rank *should* hold, from config.json and a parallel spec. Pure and offline.
///
/// Schemes known now; each file in layout/schemes states its rank order and options:
///   `fsdp`      FSDP2, FSDP1 and ZeRO-3 trainers by canonical names: dp shards, hsdp replicas, tp;
///               `kind=fsdp2|fsdp1|fsdp1-orig|zero3`, `dim=N`, `align=N`
///   `hf`        one rank, canonical names and whole tensors
///   `megatron`  tp, pp, dp, cp; `spec=local|te` (default local); `vocab_pad=N|none`: rows of the
///               padded vocabulary in all (default: the next multiple of 128 · tp); `first=N`,
///               `last=N` layers of those stages, or `layers=7-7-6` for every stage
///   `vllm`      tp; dp replicas; `vocab_pad_to=N`, default 64
///
/// Every scheme also knows
///   `only=GLOB|GLOB`, `skip=GLOB|GLOB`   canonical names ('*', '?') that alone, or not, have
///               pieces; local tensors stay, nothing of what is left out moves (schemes/filter.h)
///   `lora=RANK`, `targets=q|k|v|…`   LoRA adapters in place of the weights, with a canonical space
///               of their own, PEFT's names; `replicas=N`: N engines, one behind another
///
///   kInvalidArgument / kTensorMissing  a glob or a LoRA target fits no tensor of the model
///   kInvalidArgument / kUnknownModel   model_type has no family (names the known ones), or one
///                                      whose flat parameters have an order that is not known
///   kInvalidArgument / kUnknownScheme  scheme or one of its keys is unknown (names the known
///                                      ones), or an option's value is not understood
///   kInvalidArgument / kInvalidRequest config.json is not JSON, lacks a field or has a bad value
///   kInvalidArgument / kShapeMismatch  a size does not divide as the scheme needs
///   kInvalidArgument / kShapeOverflow  a tensor's element or byte count does not fit int64
///   kResourceExhausted / kLimitExceeded  more layers, ranks or pieces than LayoutLimits allow, or
///                                      more than 50 million pieces over all ranks
Result<ModelLayout> LayoutFromScheme(std::string_view config_json, const ParallelSpec& spec);

/// Only the canonical space of a model: Hugging Face names and shapes. Fails as above.
Result<CanonicalSpace> CanonicalFromConfig(std::string_view config_json);

/// Sentences about what config.json says without an effect, as a module that quantization leaves
/// out and that the model has not: a name with a mistake would quantize what it was to spare. Empty
/// for most. Fails as above.
Result<std::vector<std::string>> NotesOfConfig(std::string_view config_json);

/// What a live process reports about one tensor; no pieces, so that it costs little to send.
struct ObservedTensor {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape;
};

/// Compares what `rank` should hold (`expected`) with what its process reports.
///
/// The tensors of the result are `expected`'s, in the order of `observed`, so that the process
/// binds memory in the order in which it reported; dtypes are the observed ones (casts are
/// planned). Differences are collected into one readable message (at most 20 lines, then a count),
/// each line naming tensor, expected and found; the Status carries the first tensor and a remedy.
/// Differences come in the order of `observed`, then what is missing in the order of `expected`.
///
/// Newer megatron-core's names are understood (schemes/megatron_names.h). Observed names that end
/// in
/// `_extra_state` are no weights and are ignored. bf16, f16 and f32
/// stand for each other, any other dtype only for itself (else kDtypeMismatch). A name that is
/// reported twice is kTensorUnexpected. Vocabulary rows that differ are a kShapeMismatch whose
/// remedy names the option to pass: padding is the loader's convention and never guessed.
///
///   kFailedPrecondition / kTensorMissing | kTensorUnexpected | kShapeMismatch | kDtypeMismatch |
///   kDuplicateRank is never returned here
Result<RankLayout> Reconcile(const RankLayout& expected, std::vector<ObservedTensor> observed);

/// Whether a rank describes the model of its group's other ranks (`expected`); the first tensor
/// that differs is named.
///   kFailedPrecondition / kShapeMismatch
Status CheckSameModel(const CanonicalSpace& expected, const CanonicalSpace& found);

/// Whether both sides agree that lm_head is, or is not, the embedding. A source with a head of its
/// own would otherwise leave it behind, and the target would compute with the embedding. Models
/// without an embedding are not looked at; of several (layout/models.h) each is by itself.
///   kFailedPrecondition / kTensorUnexpected  only the source has lm_head
///   kFailedPrecondition / kTensorMissing     only the target has it
Status CheckTie(const CanonicalSpace& source, const CanonicalSpace& target);

}  // namespace weightwire::layout
