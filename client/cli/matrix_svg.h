#pragma once

#include <string>

#include "server/plan/plan.h"

namespace weightwire::cli {

/// The bytes from every source rank (row) to every target rank (column) as a self-contained SVG.
/// The darker, the more; a cell's tooltip names ranks and bytes. Beyond 128 ranks on a side,
/// neighbours share a cell.
std::string MatrixSvg(const plan::TransferPlan& plan, const std::string& title);

}  // namespace weightwire::cli
