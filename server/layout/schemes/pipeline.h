#pragma once

#include <vector>

#include "server/layout/scheme.h"

namespace weightwire::layout {

/// The layers of one model chunk: [first, first + count).
struct ChunkLayers {
  int64_t first = 0;
  int64_t count = 0;
};

/// Megatron's distribution of `layers` over pp stages of vpp chunks each, by stage, then chunk. The
/// model passes all stages' chunk 0, then all stages' chunk 1, and so on. Without options evenly;
///
///   first=N last=N     layers of those stages, evenly over their chunks; the rest evenly
///   account_embedding  the embedding counts as a layer of the first chunk,
///   account_loss       the loss as one of the last
///   layers=7-7-6       every chunk, in the order in which the model passes them
///   layout=Et*2|t*3|tL     Megatron's own notation (--pipeline-model-parallel-layout; also
///                      pipeline=): t a layer, E, m and L what is not one, | ends a chunk,
///                      x*N and (x)*N repeat
///
///   kInvalidArgument / kUnknownScheme  an option is malformed, or options exclude each other
///   kInvalidArgument / kShapeMismatch  the layers cannot be distributed so; the remedy says how
Result<std::vector<std::vector<ChunkLayers>>> PipelineChunks(const ParallelSpec& spec,
                                                             int64_t layers, int64_t stages,
                                                             int64_t chunks);

}  // namespace weightwire::layout
