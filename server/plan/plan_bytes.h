#pragma once

#include <string>
#include <string_view>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// A plan as the bytes of a file; FromBytes(ToBytes(p)) == p.
///
/// The text "wwplan2\n", or "wwplan3\n" where ranks gather; then numbers, each as LEB128 (7 bits a
/// byte, low ones first, the top bit says that more follow):
///
///   plan      id.high id.low source.high source.low target.high target.low source_ranks
///             target_ranks bytes_total copies_total, a count and the tensor names, a count and the
///             streams; in wwplan3 a count and what ranks gather
///   name      length, then its bytes
///   stream    source_rank target_rank bytes, a count and the copies; its id is its place
///   copy      canonical source_tensor target_tensor source_dtype target_dtype source_offset
///             target_offset, the number of dimensions, and for each: extent source_stride
///             target_stride; what it makes (0 elements, 1 codes, 2 scales), a count and the
///             extents of a block, a count and the extents at the source (plan.h)
///   gathered  target rank (rising), dtype, elements, a count and the copies made of them
///
/// and nothing after that. A plan of half a million copies has about 17 MB.
std::string ToBytes(const TransferPlan& plan);

/// Reads form only: that the plan is right, VerifyPlan proves.
///   kInvalidArgument / kInvalidRequest  not such a file, cut short, longer than it says, or with a
///                                       number that does not fit; names the byte
///   kInvalidArgument / kUnknownEnum     a dtype, or what a copy makes, that this build does not
///   know
Result<TransferPlan> FromBytes(std::string_view bytes);

}  // namespace weightwire::plan
