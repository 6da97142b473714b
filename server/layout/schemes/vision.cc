#include "server/layout/schemes/vision.h"

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

}  // namespace

void AddWholeVision(RoleCutter& cutter, const std::string& at) {
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
