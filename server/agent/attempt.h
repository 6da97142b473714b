#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "server/base/clock.h"
#include "server/epoch/messages.h"
#include "server/transfer/transfer.h"

namespace weightwire::agent {

/// What one rank does for one epoch, from its PrepareCommand until it is drained.
struct Attempt {
  epoch::PrepareCommand command;
  std::vector<std::shared_ptr<const plan::RankSlice>>
      slices;                                        ///< by assignment; as a relay's reader sees it
  std::shared_ptr<const plan::RankSlice> passed_on;  ///< target that others read from
  size_t gates = 0;                                  ///< what prepare still waits for
  bool refused = false;                              ///< a gate failed; later ones count no more
  bool awaits_layout = false;  ///< the command has overtaken the answer to the rank's layout
  bool wants_room = false;     ///< target with one buffer: the application was asked
  bool admitted = false;
  int buffer = 0;   ///< target: the one that is written
  Nanos began{};    ///< with its PrepareCommand
  Nanos started{};  ///< with its TransferCommand
  Nanos ended{};    ///< sourced or staged
  std::optional<transfer::SourceReport> sourced;
  std::optional<transfer::TargetReport> staged;
  Nanos offered{};       ///< target: COMMIT came
  bool aborted = false;  ///< by the coordinator
  bool draining = false;
  bool drained = false;
  std::vector<std::function<void()>> when_drained;
};

/// "trainer/3" sends: the job that the transfer engine runs.
transfer::SourceJob SourceJobOf(const Attempt& attempt, std::string name,
                                transfer::Binding binding);
transfer::TargetJob TargetJobOf(const Attempt& attempt, std::string name,
                                transfer::Binding binding);
/// What a target passes on while it receives: `received` is its target job's.
transfer::SourceJob RelayJobOf(const Attempt& attempt, std::string name, transfer::Binding binding,
                               std::shared_ptr<transfer::SlotBitmap> received);
/// The report that the coordinator waits for; the attempt must be sourced or staged.
epoch::Report TransferReportOf(const Attempt& attempt);

/// Every stream of a target's slices has a sender. kInvalidArgument / kInvalidRequest.
Status CheckSenders(const Attempt& attempt);

}  // namespace weightwire::agent
