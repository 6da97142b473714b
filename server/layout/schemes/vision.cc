#include "server/layout/schemes/vision.h"

#include <map>
#include <numeric>

namespace weightwire::layout {
namespace {

class TowerCutter {
 public:
  explicit TowerCutter(RoleCutter& cutter) : cutter_(cutter) {}

  /// As stored: the patch embedding has more dimensions than a view speaks of.
  void Whole(Role role, int64_t block = 0) {
    const auto view = cutter_.model().Find(role, block);
    if (!view) return;
    cutter_.builder().Stored(NameAt(*view), view->tensor,
                             cutter_.model().StoredShape(view->tensor));
  }
  void Rows(Role role, int64_t block = 0) { cutter_.Rows(Name(role, block), role, block); }
  void Columns(Role role, int64_t block = 0) { cutter_.Columns(Name(role, block), role, block); }
  void GateUp(Role gate, Role up, int64_t block) {
    cutter_.ChunkOfEach(Replaced(Name(gate, block), ".gate_proj.", ".gate_up_proj."), {gate, up},
                        block);
  }
  void Qkv(std::array<Role, 3> roles, int64_t block, std::string_view module) {
    std::vector<RowRun> runs;
    for (Role role : roles) {
      const auto view = cutter_.model().Find(role, block);
      if (!view) return;
      const int64_t heads = cutter_.model().config().vision.heads;
      const int64_t rows = cutter_.Divide(*view, heads, cutter_.tp()) * (view->rows() / heads);
      runs.push_back({*view, cutter_.t() * rows, rows});
    }
    cutter_.builder().Rows(Replaced(Name(roles[0], block), "qkv", module), runs, 0,
                           3 * runs[0].rows);
  }

 private:
  std::string NameAt(const View& view) const {
    return cutter_.model().canonical().tensors[view.tensor].name;
  }
  std::string Name(Role role, int64_t block) const {
    const auto view = cutter_.model().Find(role, block);
    return view ? NameAt(*view) : "";
  }
  static std::string Replaced(std::string name, std::string_view what, std::string_view by) {
    const size_t at = name.find(what);
    if (at != std::string::npos) name.replace(at, what.size(), by);
    return name;
  }

  RoleCutter& cutter_;
};

/// vLLM's name: its own, or the checkpoint's without what transformers puts around all modules.
std::string EngineName(const Model::TowerPlace& place) {
  std::string_view name = place.of->engine.empty() ? place.of->name : place.of->engine;
  if (name.starts_with("model.")) name.remove_prefix(6);
  return NameOf(name, place.block, 0);
}

View WholeView(const Model& model, uint32_t tensor) {
  const Shape& shape = model.canonical().tensors[tensor].shape;
  return {tensor, {Shape(shape.size(), 0), shape}, 0, shape.size() > 1 ? 1 : -1};
}

/// The rank's rows of each of the tensor's runs.
void AddRuns(RoleCutter& cutter, const Model::TowerPlace& place, std::vector<RowRun>& runs) {
  View view = WholeView(cutter.model(), place.tensor);
  const int64_t rows = view.rows() / place.of->slices;
  const int64_t heads = cutter.model().config().vision.heads;
  int64_t mine = rows;
  if (place.of->cut == TowerCut::kHeads) {
    mine = cutter.Divide(view, heads, cutter.tp()) * (rows / heads);
  } else if (place.of->cut == TowerCut::kRows) {
    mine = cutter.Divide(view, rows, cutter.tp());
  }
  const int64_t first = place.of->cut == TowerCut::kWhole ? 0 : cutter.t() * mine;
  for (int64_t slice = 0; slice < place.of->slices; ++slice) {
    runs.push_back({view, slice * rows + first, mine});
  }
}

}  // namespace

void AddTowerShards(RoleCutter& cutter) {
  std::vector<std::string> names;
  std::map<std::string, std::vector<RowRun>, std::less<>> fused;
  for (const Model::TowerPlace& place : cutter.model().tower()) {
    if (place.of->cut == TowerCut::kAbsent) continue;
    const std::string name = EngineName(place);
    const View view = WholeView(cutter.model(), place.tensor);
    if (place.of->cut == TowerCut::kWhole) {
      cutter.builder().Stored(name, place.tensor, cutter.model().StoredShape(place.tensor));
    } else if (place.of->cut == TowerCut::kColumns) {
      const int64_t width = cutter.Divide(view, view.columns(), cutter.tp());
      cutter.builder().Columns(name, view, cutter.t() * width, width);
    } else {
      const auto [at, added] = fused.try_emplace(name);
      if (added) names.push_back(name);
      AddRuns(cutter, place, at->second);
    }
  }
  for (const std::string& name : names) {
    const std::vector<RowRun>& runs = fused.find(name)->second;
    const int64_t rows =
        std::accumulate(runs.begin(), runs.end(), int64_t{0},
                        [](int64_t sum, const RowRun& run) { return sum + run.rows; });
    cutter.builder().Rows(name, runs, 0, rows);
  }
}

Status Undescribed(std::string_view scheme, std::string_view part, std::string_view family) {
  const bool trainer = scheme == "megatron";
  return Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                std::string("the ")
                    .append(scheme)
                    .append(" scheme does not describe the ")
                    .append(part)
                    .append(" of ")
                    .append(family))
      .Remedy(std::string(trainer ? "use weightwire.megatron_bridge (recorded layouts)"
                                  : "let the engine's own loader be recorded") +
              ", or send explicit boxes" +
              (part == "tower" ? "; where only the text model is trained, text_config alone may be "
                                 "config.json"
                               : ""));
}

void AddWholeVision(RoleCutter& cutter, const std::string& at) {
  const Model& model = cutter.model();
  for (const Model::TowerPlace& place : model.tower()) {
    const std::string& name = model.canonical().tensors[place.tensor].name;
    for (const NamePrefix& prefix : model.wrapper()->megatron) {
      if (!name.starts_with(prefix.checkpoint)) continue;
      cutter.builder().Stored(
          std::string(at).append(prefix.megatron).append(name, prefix.checkpoint.size()),
          place.tensor, model.StoredShape(place.tensor));
      break;
    }
  }
  if (model.wrapper() != nullptr) return;
  if (!cutter.model().config().HasVision()) return;
  const auto& tensors = cutter.model().canonical().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].name.starts_with(kVisionPrefix)) continue;
    cutter.builder().Stored(at + tensors[i].name, i, cutter.model().StoredShape(i));
  }
}

void AddVisionShards(RoleCutter& cutter, std::string_view qkv) {
  TowerCutter tower(cutter);
  tower.Whole(Role::kVisionPatch);
  for (int64_t block = 0; block < cutter.model().config().vision.depth; ++block) {
    tower.Whole(Role::kVisionAttentionNorm, block);
    tower.Whole(Role::kVisionMlpNorm, block);
    tower.Qkv({Role::kVisionQWeight, Role::kVisionKWeight, Role::kVisionVWeight}, block, qkv);
    tower.Qkv({Role::kVisionQBias, Role::kVisionKBias, Role::kVisionVBias}, block, qkv);
    tower.Columns(Role::kVisionOWeight, block);
    tower.Whole(Role::kVisionOBias, block);
    tower.GateUp(Role::kVisionGateWeight, Role::kVisionUpWeight, block);
    tower.GateUp(Role::kVisionGateBias, Role::kVisionUpBias, block);
    tower.Columns(Role::kVisionDownWeight, block);
    tower.Whole(Role::kVisionDownBias, block);
  }
  tower.Whole(Role::kMergerNorm);
  tower.Rows(Role::kMergerInWeight);
  tower.Rows(Role::kMergerInBias);
  tower.Columns(Role::kMergerOutWeight);
  tower.Whole(Role::kMergerOutBias);
}

}  // namespace weightwire::layout
