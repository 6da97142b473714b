#include "client/cli/layout_tool.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "client/checkpoint/layout_json.h"
#include "client/cli/observed.h"
#include "client/cli/offline.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/layout/scheme.h"
#include "server/plan/classes.h"

namespace weightwire::cli {
namespace {

using checkpoint::Json;
using layout::LocalTensor;
using layout::ModelLayout;

int64_t BytesOf(const layout::RankLayout& rank) {
  int64_t bytes = 0;
  for (const LocalTensor& tensor : rank.tensors) {
    bytes += layout::StorageBytes(tensor.dtype, tensor.shape).value_or(0);
  }
  return bytes;
}

std::string NumbersText(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

std::string BoxText(const layout::Box& box) {
  std::string text;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    text += (text.empty() ? "" : ", ") + std::to_string(box.begin[d]) + ":" +
            std::to_string(box.begin[d] + box.extent[d]);
  }
  return "[" + text + "]";
}

Status CheckRank(const LayoutRequest& request, const ModelLayout& layout) {
  if (!request.rank || *request.rank < layout.ranks.size()) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "rank " + std::to_string(*request.rank) + " does not exist: '" + request.spec +
                    "' has " + std::to_string(layout.ranks.size()) + " ranks");
}

struct Described {
  ModelLayout layout;
  std::vector<std::string> notes;
};

/// With the notes on stderr where it fails: they may be the reason.
Result<Described> LayoutFor(const LayoutRequest& request) {
  WW_ASSIGN(const std::string config, ReadConfig(request.config_path));
  std::vector<std::string> notes = NotesOf(config);
  Result<ModelLayout> made = LayoutOf(config, request.spec);
  const Status status = made ? CheckRank(request, *made) : made.error();
  if (status.ok()) return Described{std::move(*made), std::move(notes)};
  std::fputs(NotesText(notes).c_str(), stderr);
  return Fail(status);
}

bool Wanted(const LayoutRequest& request, const ModelLayout& layout, const LocalTensor& tensor) {
  return Matches(request.tensor, tensor.name) ||
         std::any_of(tensor.pieces.begin(), tensor.pieces.end(), [&](const layout::Piece& piece) {
           return Matches(request.tensor, layout.canonical.tensors[piece.tensor].name);
         });
}

/// Calls visit(rank, tensor) for every tensor that the request asks for.
template <typename Visit>
void ForEachWanted(const LayoutRequest& request, const ModelLayout& layout, Visit visit) {
  if (!request.rank && request.tensor.empty()) return;
  for (uint32_t rank = 0; rank < layout.ranks.size(); ++rank) {
    if (request.rank.value_or(rank) != rank) continue;
    for (const LocalTensor& tensor : layout.ranks[rank].tensors) {
      if (Wanted(request, layout, tensor)) visit(rank, tensor);
    }
  }
}

std::string ShowAsJson(const LayoutRequest& request, const Described& described) {
  const ModelLayout& layout = described.layout;
  Json json = {{"spec", request.spec},
               {"ranks", layout.ranks.size()},
               {"canonical_tensors", layout.canonical.tensors.size()},
               {"classes", Json::array()},
               {"notes", described.notes},
               {"tensors", Json::array()}};
  for (const plan::LayoutClass& entry : plan::LayoutClasses(layout)) {
    const layout::RankLayout& rank = layout.ranks[entry.ranks[0]];
    json["classes"].push_back(
        {{"ranks", entry.ranks}, {"tensors", rank.tensors.size()}, {"bytes", BytesOf(rank)}});
  }
  ForEachWanted(request, layout, [&](uint32_t rank, const LocalTensor& tensor) {
    json["tensors"].push_back(checkpoint::TensorJson(layout, rank, tensor));
  });
  return json.dump() + "\n";
}

/// Bytes of storage that no piece covers.
int64_t PaddingOf(const layout::RankLayout& rank) {
  int64_t bytes = BytesOf(rank);
  for (const LocalTensor& tensor : rank.tensors) {
    for (const layout::Piece& piece : tensor.pieces) {
      bytes -= layout::ElementCount(piece.box) * layout::ElementBytes(tensor.dtype);
    }
  }
  return bytes;
}

struct Lint {
  int64_t bytes_total = 0;
  int64_t bytes_least = 0;
  int64_t bytes_most = 0;
  int64_t padding = 0;
  int64_t canonical_bytes = 0;
  std::vector<std::string> warnings;
};

/// How often the ranks together hold each element of a canonical tensor, on average.
std::vector<double> CopiesByTensor(const ModelLayout& layout) {
  std::vector<double> copies(layout.canonical.tensors.size(), 0);
  for (const layout::RankLayout& rank : layout.ranks) {
    for (const LocalTensor& tensor : rank.tensors) {
      for (const layout::Piece& piece : tensor.pieces) {
        copies[piece.tensor] += static_cast<double>(layout::ElementCount(piece.box));
      }
    }
  }
  for (size_t t = 0; t < copies.size(); ++t) {
    double elements = 1;
    for (int64_t size : layout.canonical.tensors[t].shape) elements *= static_cast<double>(size);
    copies[t] /= elements;
  }
  return copies;
}

void WarnOfTensors(const ModelLayout& layout, Lint& lint) {
  const std::vector<double> copies = CopiesByTensor(layout);
  const auto& tensors = layout.canonical.tensors;
  size_t unheld = 0;
  std::string first_unheld;
  bool kv_told = false;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (copies[t] == 0 && unheld++ == 0) first_unheld = tensors[t].name;
    const size_t at = tensors[t].name.find("k_proj.weight");
    if (at == std::string::npos || kv_told) continue;
    std::string query = tensors[t].name;
    query[at] = 'q';
    const auto q = layout.canonical.Find(query);
    if (!q || copies[*q] == 0 || copies[t] < 1.5 * copies[*q]) continue;
    kv_told = true;
    lint.warnings.push_back("kv heads are replicated: every key and value is held " +
                            std::to_string(static_cast<int>(copies[t] / copies[*q])) +
                            " times as often as every query, as there are fewer kv heads than tp");
  }
  if (unheld > 0) {
    lint.warnings.push_back(std::to_string(unheld) + " tensors of the model are held by no rank, " +
                            first_unheld + " first");
  }
}

void WarnOfPadding(const ModelLayout& layout, Lint& lint) {
  if (lint.padding == 0) return;
  for (const layout::RankLayout& rank : layout.ranks) {
    for (const LocalTensor& tensor : rank.tensors) {
      if (PaddingOf({{tensor}}) == 0) continue;
      lint.warnings.push_back(BytesText(lint.padding) + " of padding in all, in '" + tensor.name +
                              "' " + NumbersText(tensor.shape) +
                              " first: it is never read or written");
      return;
    }
  }
}

Lint LintOf(const ModelLayout& layout) {
  Lint lint;
  for (size_t r = 0; r < layout.ranks.size(); ++r) {
    const int64_t bytes = BytesOf(layout.ranks[r]);
    lint.bytes_total += bytes;
    lint.bytes_least = r == 0 ? bytes : std::min(lint.bytes_least, bytes);
    lint.bytes_most = std::max(lint.bytes_most, bytes);
    lint.padding += PaddingOf(layout.ranks[r]);
  }
  for (const layout::TensorSpec& spec : layout.canonical.tensors) {
    lint.canonical_bytes += layout::StorageBytes(spec.dtype, spec.shape).value_or(0);
  }
  WarnOfTensors(layout, lint);
  WarnOfPadding(layout, lint);
  if (lint.bytes_most > lint.bytes_least + lint.bytes_least / 5) {
    lint.warnings.push_back("ranks are uneven: the largest holds " + BytesText(lint.bytes_most) +
                            ", the smallest " + BytesText(lint.bytes_least));
  }
  return lint;
}

}  // namespace

Result<std::string> ShowLayout(const LayoutRequest& request) {
  WW_ASSIGN(const Described described, LayoutFor(request));
  if (request.json) return ShowAsJson(request, described);
  const ModelLayout& layout = described.layout;
  const std::string notes = NotesText(described.notes);
  Table classes({"RANKS", "TENSORS", "BYTES"});
  for (const plan::LayoutClass& entry : plan::LayoutClasses(layout)) {
    const layout::RankLayout& rank = layout.ranks[entry.ranks[0]];
    classes.Add(
        {RanksText(entry.ranks), std::to_string(rank.tensors.size()), BytesText(BytesOf(rank))});
  }
  if (!request.rank && request.tensor.empty()) return classes.Text() + notes;
  Table tensors({"RANK", "TENSOR", "DTYPE", "SHAPE", "HOLDS", "AT", "STRIDES"});
  ForEachWanted(request, layout, [&](uint32_t rank, const LocalTensor& tensor) {
    std::vector<std::string> head = {std::to_string(rank), tensor.name,
                                     std::string(layout::DTypeName(tensor.dtype)),
                                     NumbersText(tensor.shape)};
    if (tensor.pieces.empty()) tensors.Add({head[0], head[1], head[2], head[3], "-", "-", "-"});
    for (const layout::Piece& piece : tensor.pieces) {
      tensors.Add({head[0], head[1], head[2], head[3],
                   layout.canonical.tensors[piece.tensor].name + " " + BoxText(piece.box),
                   std::to_string(piece.local_offset), NumbersText(piece.local_stride)});
      head.assign(4, "");
    }
  });
  return tensors.Text() + notes;
}

Result<std::string> DiffLayout(const LayoutRequest& request) {
  WW_ASSIGN(const Described described, LayoutFor(request));
  const ModelLayout& layout = described.layout;
  WW_ASSIGN(std::vector<layout::ObservedTensor> observed, ReadObserved(request.observed_path));
  const uint32_t rank = request.rank.value_or(0);
  const auto same = layout::Reconcile(layout.ranks[rank], std::move(observed));
  if (same.has_value()) {
    const size_t tensors = same->tensors.size();
    if (request.json) return Json({{"equal", true}, {"tensors", tensors}}).dump() + "\n";
    return "equal: rank " + std::to_string(rank) + " holds the " + std::to_string(tensors) +
           " tensors that it should\n";
  }
  if (request.json) {
    const Json json = {{"equal", false},
                       {"reason", std::string(ReasonName(same.error().reason()))},
                       {"tensor", same.error().tensor()},
                       {"message", same.error().message()},
                       {"remedy", same.error().remedy()}};
    std::puts(json.dump().c_str());
  }
  return Fail(Status(same.error()).AtRank("rank " + std::to_string(rank)));
}

Result<std::string> LintLayout(const LayoutRequest& request) {
  WW_ASSIGN(Described described, LayoutFor(request));
  const ModelLayout& layout = described.layout;
  Lint lint = LintOf(layout);
  std::ranges::move(described.notes, std::back_inserter(lint.warnings));
  const size_t classes = plan::LayoutClasses(layout).size();
  const double copies =
      static_cast<double>(lint.bytes_total) / static_cast<double>(lint.canonical_bytes);
  if (request.json) {
    const Json json = {{"legal", true},
                       {"ranks", layout.ranks.size()},
                       {"classes", classes},
                       {"bytes_total", lint.bytes_total},
                       {"bytes_least", lint.bytes_least},
                       {"bytes_most", lint.bytes_most},
                       {"padding_bytes", lint.padding},
                       {"canonical_bytes", lint.canonical_bytes},
                       {"copies", copies},
                       {"warnings", lint.warnings}};
    return json.dump() + "\n";
  }
  char times[32];
  std::snprintf(times, sizeof times, "%.2f", copies);
  std::string text = "legal: " + std::to_string(layout.ranks.size()) + " ranks in " +
                     std::to_string(classes) + " layout classes\n";
  text += "a rank holds " + BytesText(lint.bytes_least) + " to " + BytesText(lint.bytes_most) +
          ", all together " + BytesText(lint.bytes_total) + " = " + times + " x the model\n";
  return text + NotesText(lint.warnings);
}

}  // namespace weightwire::cli
