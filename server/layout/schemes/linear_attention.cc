// Rank t of T of linear attention (see docs/layouts.md). The checkpoint's parts, one behind another
// unless they are said to alternate by groups:
//
//   gated delta    q, k, v, z, b, a: in_proj_qkvz and in_proj_ba alternate by groups (Qwen3-Next),
//   or
//                  in_proj_qkv, in_proj_z, in_proj_b, in_proj_a (Qwen3.5); conv1d over q, k, v
//   Mamba 2        z, x, B, C, dt in in_proj; conv1d over x, B, C
//
//   vLLM, SGLang   chunk t of each part: of q, k, v, z in in_proj_qkvz, of b, a in in_proj_ba;
//   where
//                  the checkpoint alternates by groups they do so too. Mamba's single group of B
//                  and C is whole on every rank
//   Megatron       chunk t of each part, all in in_proj
//   conv1d         chunk t of each part of its channels
//   A_log, D, dt_bias, Mamba's norm   chunk t; the gated delta rule's norm, of one head, whole
//   out_proj       columns, chunk t
#include "server/layout/schemes/linear_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

/// A part of a tensor: `units` runs of `unit` rows, of heads or groups, each `stride` rows behind
/// the one before it.
struct LinearPart {
  View view;
  int64_t first = 0;
  int64_t unit = 0;
  int64_t units = 0;
  int64_t stride = 0;
  bool whole = false;  ///< on every rank
};

/// Parts of one tensor, each behind the one before it.
class PartList {
 public:
  PartList(const Model& model, Role role, int64_t layer)
      : linear_(model.config().linear), view_(model.Find(role, layer)) {}

  bool present() const { return view_.has_value(); }
  /// One unit for each group, or each head.
  void Groups(bool whole = false) { Add(linear_.state, linear_.groups, whole); }
  void Heads() { Add(linear_.head_dim, linear_.heads, false); }
  void Numbers() { Add(1, linear_.heads, false); }
  /// `unit` rows of every group, `at` rows behind the group's first one, of `stride` rows.
  void Alternating(int64_t at, int64_t unit, int64_t stride) {
    parts_.push_back({*view_, at, unit, linear_.groups, stride});
  }
  const std::vector<LinearPart>& parts() const { return parts_; }

 private:
  void Add(int64_t unit, int64_t units, bool whole) {
    parts_.push_back({*view_, next_, unit, units, unit, whole});
    next_ += unit * units;
  }

  const LinearConfig& linear_;
  const std::optional<View> view_;
  std::vector<LinearPart> parts_;
  int64_t next_ = 0;
};

class LayerCutter {
 public:
  LayerCutter(RoleCutter& cutter, std::string_view text, int64_t layer)
      : cutter_(cutter), model_(cutter.model()), text_(text), layer_(layer) {}

  /// The checkpoint's name within the text model, behind `text`; empty when there is none.
  std::string NameOf(Role role) const {
    const auto view = model_.Find(role, layer_);
    return view ? std::string(text_) + model_.TextName(view->tensor) : "";
  }

  /// Chunk t of every part under one name.
  void Chunks(std::string name, const std::vector<LinearPart>& parts,
              std::optional<DType> dtype = std::nullopt) {
    if (parts.empty()) return;
    std::vector<RowRun> runs;
    int64_t rows = 0;
    for (const LinearPart& part : parts) {
      const int64_t units =
          part.whole ? part.units : cutter_.Divide(part.view, part.units, cutter_.tp());
      if (units == 0) return;  // the rank is refused
      const int64_t begin = part.first + (part.whole ? 0 : cutter_.t() * units * part.stride);
      rows += units * part.unit;
      if (part.stride == part.unit) {
        runs.push_back({part.view, begin, units * part.unit});
        continue;
      }
      for (int64_t i = 0; i < units; ++i) {
        runs.push_back({part.view, begin + i * part.stride, part.unit});
      }
    }
    const TensorSpec& tensor = model_.canonical().tensors[parts[0].view.tensor];
    Shape shape = tensor.shape;
    shape[0] = rows;
    cutter_.builder().Start(std::move(name), dtype.value_or(tensor.dtype), std::move(shape));
    const int64_t columns = parts[0].view.columns();
    int64_t at = 0;
    for (const RowRun& run : runs) {
      cutter_.builder().Put(run.view, {run.begin, run.rows}, {0, columns}, at * columns, columns,
                            1);
      at += run.rows;
    }
  }
  void Numbers(std::string name, Role role, std::optional<DType> dtype = std::nullopt) {
    PartList list(model_, role, layer_);
    if (!list.present()) return;
    list.Numbers();
    Chunks(std::move(name), list.parts(), dtype);
  }
  void Columns(std::string name, Role role) { cutter_.Columns(std::move(name), role, layer_); }
  void Whole(std::string name, Role role) { cutter_.Whole(std::move(name), role, layer_); }

  bool IsMamba() const {
    return model_.config().kinds[static_cast<size_t>(layer_)].mixer == Mixer::kMamba;
  }

  /// q, k, v and z, then b and a of the gated delta rule, from whichever tensors have them.
  std::vector<LinearPart> Qkvz() const {
    const LinearConfig& linear = model_.config().linear;
    PartList together(model_, Role::kLinearQkvz, layer_);
    if (together.present()) {
      const int64_t values = linear.heads / linear.groups * linear.head_dim;
      const int64_t stride = 2 * linear.state + 2 * values;
      together.Alternating(0, linear.state, stride);
      together.Alternating(linear.state, linear.state, stride);
      together.Alternating(2 * linear.state, values, stride);
      together.Alternating(2 * linear.state + values, values, stride);
      return together.parts();
    }
    PartList qkv(model_, Role::kLinearQkv, layer_);
    PartList z(model_, Role::kLinearZ, layer_);
    if (!qkv.present()) return {};
    qkv.Groups();
    qkv.Groups();
    qkv.Heads();
    z.Heads();
    return Joined({qkv, z});
  }
  std::vector<LinearPart> Ba() const {
    const LinearConfig& linear = model_.config().linear;
    PartList together(model_, Role::kLinearBa, layer_);
    if (together.present()) {
      const int64_t heads = linear.heads / linear.groups;
      together.Alternating(0, heads, 2 * heads);
      together.Alternating(heads, heads, 2 * heads);
      return together.parts();
    }
    PartList b(model_, Role::kLinearB, layer_);
    PartList a(model_, Role::kLinearA, layer_);
    if (!b.present()) return {};
    b.Numbers();
    a.Numbers();
    return Joined({b, a});
  }
  /// `shares_group`: B and C of a single group are whole.
  std::vector<LinearPart> MambaIn(bool shares_group) const {
    PartList in(model_, Role::kMambaIn, layer_);
    if (!in.present()) return {};
    in.Heads();
    in.Heads();
    in.Groups(Shares(shares_group));
    in.Groups(Shares(shares_group));
    in.Numbers();
    return in.parts();
  }
  /// Of the weight or the bias of the convolution.
  std::vector<LinearPart> Channels(Role role, bool shares_group) const {
    PartList conv(model_, role, layer_);
    if (!conv.present()) return {};
    if (IsMamba()) conv.Heads();
    conv.Groups(IsMamba() && Shares(shares_group));
    conv.Groups(IsMamba() && Shares(shares_group));
    if (!IsMamba()) conv.Heads();
    return conv.parts();
  }
  std::vector<LinearPart> MambaNorm() const {
    PartList norm(model_, Role::kMambaNorm, layer_);
    if (norm.present()) norm.Heads();
    return norm.parts();
  }

 private:
  bool Shares(bool shares_group) const {
    return shares_group && model_.config().linear.groups == 1;
  }
  static std::vector<LinearPart> Joined(const std::vector<PartList>& lists) {
    std::vector<LinearPart> parts;
    for (const PartList& list : lists) {
      parts.insert(parts.end(), list.parts().begin(), list.parts().end());
    }
    return parts;
  }

  RoleCutter& cutter_;
  const Model& model_;
  const std::string_view text_;
  const int64_t layer_;
};

/// "a.b.<from>.weight" → "a.b.<to>.weight"
std::string Renamed(std::string name, std::string_view from, std::string_view to) {
  const size_t at = name.rfind(from);
  if (at != std::string::npos) name.replace(at, from.size(), to);
  return name;
}

/// By canonical tensor: whether a rank has any of it.
std::vector<bool> HeldTensors(const ModelLayout& layout) {
  std::vector<bool> held(layout.canonical.tensors.size(), false);
  for (const RankLayout& rank : layout.ranks) {
    for (const LocalTensor& local : rank.tensors) {
      for (const Piece& piece : local.pieces) held[piece.tensor] = true;
    }
  }
  return held;
}

struct Computed {
  Role role = Role::kCount;
  Mixer mixer = Mixer::kNone;
  std::string_view held;
  std::string_view remedy;
};

}  // namespace

void AddEngineLinear(RoleCutter& cutter, std::string_view text, int64_t number) {
  LayerCutter layer(cutter, text, number);
  if (const std::string name = layer.NameOf(Role::kLinearQkvz); !name.empty()) {
    cutter.Rows(name, Role::kLinearQkvz, number);
    cutter.Rows(layer.NameOf(Role::kLinearBa), Role::kLinearBa, number);
  } else {
    layer.Chunks(Renamed(layer.NameOf(Role::kLinearQkv), "in_proj_qkv", "in_proj_qkvz"),
                 layer.Qkvz());
    layer.Chunks(Renamed(layer.NameOf(Role::kLinearB), "in_proj_b", "in_proj_ba"), layer.Ba());
  }
  layer.Chunks(layer.NameOf(Role::kMambaIn), layer.MambaIn(true));
  for (Role role : {Role::kLinearConv, Role::kLinearConvBias}) {
    layer.Chunks(layer.NameOf(role), layer.Channels(role, true));
  }
  const std::string a_log = layer.NameOf(Role::kLinearALog);
  layer.Numbers(layer.IsMamba() ? Renamed(a_log, "A_log", "A") : a_log, Role::kLinearALog,
                DType::kF32);
  for (Role role : {Role::kLinearD, Role::kLinearDtBias}) layer.Numbers(layer.NameOf(role), role);
  layer.Whole(layer.NameOf(Role::kLinearNorm), Role::kLinearNorm);
  layer.Chunks(layer.NameOf(Role::kMambaNorm), layer.MambaNorm());
  layer.Columns(layer.NameOf(Role::kLinearOut), Role::kLinearOut);
}

void AddMegatronLinear(RoleCutter& cutter, const std::string& at, bool flat_conv, int64_t number) {
  LayerCutter layer(cutter, "", number);
  const bool mamba = layer.IsMamba();
  const std::string here = at + (mamba ? "mixer." : "self_attention.");
  std::vector<LinearPart> in = mamba ? layer.MambaIn(false) : layer.Qkvz();
  const std::vector<LinearPart> ba = layer.Ba();
  in.insert(in.end(), ba.begin(), ba.end());
  layer.Chunks(here + "in_proj.weight", in);
  const std::string conv = here + (mamba && flat_conv ? "conv1d_" : "conv1d.");
  layer.Chunks(conv + "weight", layer.Channels(Role::kLinearConv, false));
  layer.Chunks(conv + "bias", layer.Channels(Role::kLinearConvBias, false));
  const std::optional<DType> full = mamba ? std::optional(DType::kF32) : std::nullopt;
  layer.Numbers(here + "A_log", Role::kLinearALog, full);
  layer.Numbers(here + "D", Role::kLinearD, full);
  layer.Numbers(here + "dt_bias", Role::kLinearDtBias);
  layer.Whole(here + "out_norm.weight", Role::kLinearNorm);
  layer.Chunks(here + "norm.weight", layer.MambaNorm());
  layer.Columns(here + "out_proj.weight", Role::kLinearOut);
}

Status CheckLinearParallel(const Model& model, int64_t tp, bool shares_group) {
  const std::string tensor = FirstTensor(model, {Role::kLinearConv});
  if (tensor.empty()) return OkStatus();
  const LinearConfig& linear = model.config().linear;
  WW_RETURN_IF_ERROR(
      CheckDivides("the number of heads of linear attention", linear.heads, "tp", tp, tensor));
  const bool mamba = !FirstTensor(model, {Role::kMambaIn}).empty();
  if (shares_group && mamba && linear.groups == 1) return OkStatus();
  return CheckDivides(mamba ? "n_groups" : "linear_num_key_heads", linear.groups, "tp", tp, tensor);
}

Status RefuseComputed(const Model& model, const ParallelSpec& spec, const ModelLayout& layout) {
  const std::string_view scheme = spec.scheme;
  constexpr Computed kInMegatron = {
      Role::kLinearNorm, Mixer::kGatedDelta, "w - 1 of it, in out_norm",
      "use weightwire.megatron, which adds the 1 and says so by out_norm=plain, or "
      "weightwire.megatron_bridge; or leave it out with "
      "skip=*.linear_attn.norm.weight if it is frozen"};
  constexpr Computed kInEngines = {Role::kLinearALog, Mixer::kMamba, "-exp(A_log) of it, in A",
                                   "leave it out with skip=*.mixer.A_log if it is frozen"};
  constexpr std::string_view kOutNorms[] = {"less_one", "plain"};
  WW_ASSIGN_OR_STATUS(const std::optional<size_t> out_norm,
                      ChoiceOption(spec, "out_norm", kOutNorms));
  if (scheme == "hf" || scheme == "fsdp" || out_norm == 1u) return OkStatus();
  const Computed& computed = scheme == "megatron" ? kInMegatron : kInEngines;
  const auto& kinds = model.config().kinds;
  if (std::ranges::find(kinds, computed.mixer, &LayerKind::mixer) == kinds.end()) {
    return OkStatus();
  }
  const std::vector<bool> held = HeldTensors(layout);
  for (size_t layer = 0; layer < kinds.size(); ++layer) {
    if (kinds[layer].mixer != computed.mixer) continue;
    const auto view = model.Find(computed.role, static_cast<int64_t>(layer));
    if (!view || !held[view->tensor]) continue;
    return Status(Code::kInvalidArgument, Reason::kUnknownModel,
                  "scheme " + std::string(scheme) + " does not describe the tensor of " +
                      model.config().family + ": it holds " + std::string(computed.held) +
                      ", which no copy makes")
        .AtTensor(model.canonical().tensors[view->tensor].name)
        .Remedy(std::string(computed.remedy));
  }
  return OkStatus();
}

}  // namespace weightwire::layout
