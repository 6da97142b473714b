#pragma once

#include <vector>

#include "server/layout/scheme.h"

namespace weightwire::layout {

/// The layers of one model chunk: [first, first + count).
struct ChunkLayers {
  int64_t first = 0;
  int64_t count = 0;
};

/// What each stage's chunks hold.
struct Pipeline {
  std::vector<std::vector<ChunkLayers>> chunks;  ///< by stage, then chunk
  int64_t mtp_stage = 0;                         ///< whose last chunk has the MTP layers
};

/// Megatron's distribution of `layers` over pp stages of vpp chunks each. The model passes all
/// stages' chunk 0, then all stages' chunk 1, and so on. Without options evenly, and `mtp_layers`
/// on the last stage;
///
///   first=N last=N     layers of those stages, evenly over their chunks; the rest evenly
///   account_embedding  the embedding counts as a layer of the first chunk,
///   account_loss       the loss as one of the last
///   layers=7-7-6       every chunk, in the order in which the model passes them
///   layout=Et*2|t*3|tL     Megatron's own notation (--pipeline-model-parallel-layout; also
///                      pipeline=): t a layer, m an MTP layer, E the embedding, L the loss, | ends
///                      a chunk, x*N and (x)*N repeat
///
///   kInvalidArgument / kUnknownScheme  an option is malformed, or options exclude each other
///   kInvalidArgument / kShapeMismatch  the layers cannot be distributed so; the remedy says how.
///                                      Megatron's own rules of its notation: E first and L last,
///                                      once; as many m as there are MTP layers, all in the last
///                                      chunk of one stage and behind every t
Result<Pipeline> PipelineOf(const ParallelSpec& spec, int64_t layers, int64_t mtp_layers,
                            int64_t stages, int64_t chunks);

}  // namespace weightwire::layout
