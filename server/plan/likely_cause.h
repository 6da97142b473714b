#pragma once

#include <string>

#include "server/layout/types.h"

/// What to do where the two sides of a plan do not fit: the likeliest cause, with the names that
/// show it. Cost of each: a few passes over the names, whatever they are.
namespace weightwire::plan {

/// `missing`, of the target, is no tensor of the source.
std::string MissingRemedy(const layout::CanonicalSpace& source,
                          const layout::CanonicalSpace& target, const layout::TensorSpec& missing);

/// The source has the target's `tensor` in another shape.
std::string ShapeRemedy(const layout::TensorSpec& tensor, const layout::Shape& at_source);

}  // namespace weightwire::plan
