#pragma once

#include <string_view>

#include "server/control/control.h"
#include "server/layout/scheme.h"
#include "server/layout/types.h"
#include "weightwire/v1/types.pb.h"

/// Layouts. What is checked here is form (enums, counts, sizes of names, ndim); what a layout means
/// is layout::ValidateRank's to check.
namespace weightwire::wire {

v1::DType ToProto(layout::DType dtype);
Result<layout::DType> FromProto(std::string_view field, v1::DType dtype);

v1::TensorSpec ToProto(const layout::TensorSpec& spec);
Result<layout::TensorSpec> FromProto(std::string_view field, const v1::TensorSpec& spec);

v1::CanonicalSpace ToProto(const layout::CanonicalSpace& canonical);
Result<layout::CanonicalSpace> FromProto(std::string_view field,
                                         const v1::CanonicalSpace& canonical);

v1::RankLayout ToProto(const layout::RankLayout& rank);
Result<layout::RankLayout> FromProto(std::string_view field, const v1::RankLayout& rank);

v1::LayoutSubmission ToProto(const control::LayoutSubmission& submission);
/// `member` is not part of the message and stays empty.
Result<control::LayoutSubmission> FromProto(std::string_view field,
                                            const v1::LayoutSubmission& submission);

}  // namespace weightwire::wire
