#include <algorithm>
#include <map>
#include <unordered_map>

#include "server/layout/trace.h"

namespace weightwire::layout {
namespace {

constexpr size_t kLinesMax = 20;
constexpr size_t kBoxesMax = 4'096;  // of one tensor in one rank; pairs of them are compared

Status Refuse(Reason reason, std::string message, const std::string& param) {
  return Status(Code::kFailedPrecondition, reason, std::move(message))
      .AtTensor(param)
      .Remedy("trace the loader of the model that runs, and report its parameters");
}

/// Last element of storage that a piece fills, and 1.
int64_t EndOf(const LocalTensor& tensor) {
  int64_t end = 0;
  for (const Piece& piece : tensor.pieces) {
    int64_t last = piece.local_offset;
    for (size_t d = 0; d < piece.box.extent.size(); ++d) {
      last += (piece.box.extent[d] - 1) * piece.local_stride[d];
    }
    end = std::max(end, last + 1);
  }
  return end;
}

/// By canonical tensor: the boxes that a rank holds.
std::map<uint32_t, std::vector<Box>> BoxesOf(const RankLayout& rank) {
  std::map<uint32_t, std::vector<Box>> boxes;
  for (const LocalTensor& tensor : rank.tensors) {
    for (const Piece& piece : tensor.pieces) boxes[piece.tensor].push_back(piece.box);
  }
  return boxes;
}

int64_t ElementsOf(const std::vector<Box>& boxes) {
  int64_t elements = 0;
  for (const Box& box : boxes) elements += ElementCount(box);
  return elements;
}

/// Pairs of an element of `a` and the same element of `b`; an element that a rank holds twice
/// (a redundant expert) counts each time.
int64_t Common(const std::vector<Box>& a, const std::vector<Box>& b) {
  int64_t elements = 0;
  for (const Box& x : a) {
    for (const Box& y : b) {
      if (const auto both = Intersect(x, y)) elements += ElementCount(*both);
    }
  }
  return elements;
}

/// Equal as multisets of elements: by Cauchy and Schwarz, exactly when all three sums agree.
bool Same(const std::vector<Box>& a, const std::vector<Box>& b) {
  const int64_t common = Common(a, b);
  return common == Common(a, a) && common == Common(b, b);
}

}  // namespace

Result<RankLayout> BindTrace(RankLayout traced, const std::vector<ObservedTensor>& observed) {
  std::unordered_map<std::string, LocalTensor> by_name;
  for (LocalTensor& tensor : traced.tensors) {
    std::string name = tensor.name;
    by_name.emplace(std::move(name), std::move(tensor));
  }
  RankLayout bound;
  for (const ObservedTensor& seen : observed) {
    LocalTensor local{seen.name, seen.dtype, seen.shape, {}};
    if (auto entry = by_name.extract(seen.name); !entry.empty()) {
      LocalTensor& tensor = entry.mapped();
      if (tensor.dtype != seen.dtype) {
        return Fail(Refuse(Reason::kDtypeMismatch,
                           "expected " + std::string(DTypeName(tensor.dtype)) +
                               ", which the loader filled, found " +
                               std::string(DTypeName(seen.dtype)),
                           seen.name));
      }
      const auto bytes = StorageBytes(seen.dtype, seen.shape);
      const int64_t elements = bytes ? *bytes / ElementBytes(seen.dtype) : 0;
      if (elements < EndOf(tensor)) {
        return Fail(Refuse(Reason::kShapeMismatch,
                           "expected " + std::to_string(EndOf(tensor)) +
                               " elements or more, as the loader filled, found " +
                               std::to_string(elements),
                           seen.name));
      }
      local.pieces = std::move(tensor.pieces);
    }
    bound.tensors.push_back(std::move(local));
  }
  if (by_name.empty()) return bound;
  const auto first =
      std::min_element(by_name.begin(), by_name.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
  return Fail(Refuse(Reason::kTensorMissing,
                     "expected name, dtype and shape of every parameter that the loader filled, "
                     "found none of " +
                         std::to_string(by_name.size()),
                     first->first));
}

std::vector<std::string> CompareTrace(const CanonicalSpace& canonical, const RankLayout& traced,
                                      const RankLayout& scheme) {
  auto in_trace = BoxesOf(traced);
  auto in_scheme = BoxesOf(scheme);
  std::vector<std::string> lines;
  size_t differences = 0;
  for (uint32_t tensor = 0; tensor < canonical.tensors.size(); ++tensor) {
    const std::vector<Box>& loaded = in_trace[tensor];
    const std::vector<Box>& derived = in_scheme[tensor];
    const bool fine = loaded.size() > kBoxesMax || derived.size() > kBoxesMax;
    if (!fine && Same(loaded, derived)) continue;
    if (++differences > kLinesMax) continue;
    if (fine) {
      lines.push_back(canonical.tensors[tensor].name + ": cut too finely to be compared");
      continue;
    }
    lines.push_back(canonical.tensors[tensor].name + ": the loader takes " +
                    std::to_string(ElementsOf(loaded)) + " elements, the scheme " +
                    std::to_string(ElementsOf(derived)) + "; " +
                    std::to_string(Common(loaded, derived)) + " are the same");
  }
  if (differences > kLinesMax) {
    lines.push_back("… and " + std::to_string(differences - kLinesMax) + " more tensors");
  }
  return lines;
}

}  // namespace weightwire::layout
