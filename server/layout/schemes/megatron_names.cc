#include "server/layout/schemes/megatron_names.h"

#include <string>
#include <string_view>
#include <unordered_map>

namespace weightwire::layout {
namespace {

constexpr std::string_view kNewMtp = ".mtp_model_layer.";
constexpr std::string_view kOldMtp = ".transformer_layer.";
constexpr std::string_view kFused = "self_attention.linear_qkv_down_proj.";

std::string Replaced(std::string name, std::string_view what, std::string_view by) {
  if (const size_t at = name.find(what); at != std::string::npos) name.replace(at, what.size(), by);
  return name;
}

class Renamer {
 public:
  explicit Renamer(RankLayout expected) : expected_(std::move(expected)) {
    for (size_t i = 0; i < expected_.tensors.size(); ++i) at_.emplace(expected_.tensors[i].name, i);
  }

  void Report(const std::string& name) {
    if (at_.contains(name)) return;
    const std::string old = Replaced(name, kNewMtp, kOldMtp);
    if (const size_t fused = old.find(kFused); fused != std::string::npos) {
      ReportFused(name, old.substr(0, fused), old.substr(fused + kFused.size()));
    } else {
      Rename(old, name);
    }
  }
  RankLayout Finish() && {
    std::erase_if(expected_.tensors, [](const LocalTensor& tensor) { return tensor.name.empty(); });
    return std::move(expected_);
  }

 private:
  LocalTensor* Find(const std::string& name) {
    const auto it = at_.find(name);
    return it == at_.end() ? nullptr : &expected_.tensors[it->second];
  }
  void Rename(std::string from, const std::string& to) {
    LocalTensor* tensor = Find(from);
    if (tensor == nullptr) return;
    tensor->name = to;
    at_.emplace(to, at_.at(from));
    at_.erase(from);
  }
  void ReportFused(const std::string& name, const std::string& layer, const std::string& leaf) {
    if (leaf == "layer_norm_weight") return Rename(layer + "input_layernorm.weight", name);
    const std::string second = layer + "self_attention.linear_kv_down_proj.weight";
    LocalTensor* q = Find(layer + "self_attention.linear_q_down_proj.weight");
    LocalTensor* kv = Find(second);
    if (leaf != "weight" || q == nullptr || kv == nullptr || q->dtype != kv->dtype) return;
    const int64_t before = q->shape[0] * q->shape[1];
    for (Piece& piece : kv->pieces) {
      piece.local_offset += before;
      q->pieces.push_back(std::move(piece));
    }
    q->shape[0] += kv->shape[0];
    kv->name.clear();  // taken out in Finish
    at_.erase(second);
    Rename(q->name, name);
  }

  RankLayout expected_;
  std::unordered_map<std::string, size_t> at_;
};

}  // namespace

RankLayout NamedAsReported(const RankLayout& expected, std::span<const ObservedTensor> observed) {
  Renamer renamer(expected);
  for (const ObservedTensor& tensor : observed) renamer.Report(tensor.name);
  return std::move(renamer).Finish();
}

}  // namespace weightwire::layout
