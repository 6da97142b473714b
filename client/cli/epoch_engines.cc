#include "client/cli/epoch_engines.h"

#include <algorithm>
#include <utility>

namespace weightwire::cli {
namespace {

void Shift(uint32_t by, google::protobuf::RepeatedField<uint32_t>* runs) {
  for (int i = 0; i + 1 < runs->size(); i += 2) runs->Set(i, runs->Get(i) + by);
}

}  // namespace

EpochEngines::EpochEngines(const v1::StatusResponse& status) {
  for (const auto& engine : status.engines()) table_.emplace_back(engine.name());
  for (const std::string& name : status.engine_names()) table_.emplace_back(name);
}

std::vector<std::string_view> EpochEngines::Named(const Runs& runs, const Names& names) const {
  std::vector<std::string_view> out(names.begin(), names.end());
  for (int i = 0; i + 1 < runs.size(); i += 2) {
    const size_t first = std::min<size_t>(runs.Get(i), table_.size());
    // No epoch has an engine twice: whatever a peer sends, this is the most.
    const size_t room = table_.size() - std::min(table_.size(), out.size());
    const size_t count = std::min<size_t>({runs.Get(i + 1), table_.size() - first, room});
    const auto begin = table_.begin() + static_cast<std::ptrdiff_t>(first);
    out.insert(out.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
  }
  return out;
}

std::vector<std::string_view> EpochEngines::Of(const Epoch& epoch) const {
  return Named(epoch.engine_runs(), epoch.engines());
}

std::vector<std::string_view> EpochEngines::LeftOut(const Epoch& epoch) const {
  return Named(epoch.left_out_runs(), epoch.left_out());
}

void NameEngines(v1::StatusResponse* status) {
  const EpochEngines engines(*status);
  for (auto& epoch : *status->mutable_epochs()) {
    if (epoch.engine_runs_size() > 0) {
      for (const std::string_view name : engines.Of(epoch)) epoch.add_engines(std::string(name));
    }
    if (epoch.left_out_runs_size() > 0) {
      for (const std::string_view name : engines.LeftOut(epoch)) {
        epoch.add_left_out(std::string(name));
      }
    }
    epoch.clear_engine_runs();
    epoch.clear_left_out_runs();
  }
  status->clear_engine_names();
}

void AppendPage(v1::StatusResponse page, v1::StatusResponse* status) {
  const auto table = static_cast<uint32_t>(status->engines_size() + status->engine_names_size());
  for (std::string& name : *page.mutable_engine_names()) status->add_engine_names(std::move(name));
  for (auto& epoch : *page.mutable_epochs()) {
    Shift(table, epoch.mutable_engine_runs());
    Shift(table, epoch.mutable_left_out_runs());
    *status->add_epochs() = std::move(epoch);
  }
  status->set_epochs_left(page.epochs_left());
}

void KeepEpochs(uint32_t epochs_max, v1::StatusResponse* status) {
  const int over = status->epochs_size() - static_cast<int>(epochs_max);
  if (epochs_max == 0 || over <= 0) return;
  status->mutable_epochs()->DeleteSubrange(static_cast<int>(epochs_max), over);
  status->set_epochs_left(status->epochs_left() + static_cast<uint32_t>(over));
}

size_t ParticipantsOf(const v1::StatusResponse& status) {
  return std::max<size_t>(status.participants_total(),
                          static_cast<size_t>(status.participants_size()));
}

}  // namespace weightwire::cli
