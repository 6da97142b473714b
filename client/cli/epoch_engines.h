#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::cli {

/// The engines of a status's epochs by name, whether the coordinator sent names or numbers
/// (StatusRequest.engine_runs). Numbers that are no engine's are left out. Names are the message's.
class EpochEngines {
 public:
  using Epoch = v1::StatusResponse::Epoch;

  explicit EpochEngines(const v1::StatusResponse& status);
  std::vector<std::string_view> Of(const Epoch& epoch) const;
  std::vector<std::string_view> LeftOut(const Epoch& epoch) const;

 private:
  using Runs = google::protobuf::RepeatedField<uint32_t>;
  using Names = google::protobuf::RepeatedPtrField<std::string>;
  std::vector<std::string_view> Named(const Runs& runs, const Names& names) const;

  std::vector<std::string_view> table_;
};

/// Names in place of numbers, for whoever reads the message itself.
void NameEngines(v1::StatusResponse* status);
/// The epochs of a further page (StatusRequest.epochs_before), after those of `status`.
void AppendPage(v1::StatusResponse page, v1::StatusResponse* status);
/// The newest `epochs_max` only; 0: all.
void KeepEpochs(uint32_t epochs_max, v1::StatusResponse* status);
/// Also of a coordinator that does not say how many there are.
size_t ParticipantsOf(const v1::StatusResponse& status);

}  // namespace weightwire::cli
