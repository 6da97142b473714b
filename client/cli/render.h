#pragma once

#include <string>

#include "server/base/status.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::cli {

/// How much of a table is shown.
struct View {
  bool wide = false;        ///< every column, nothing cut
  size_t columns = 0;       ///< of the screen; 0: no limit
  size_t rows = 0;          ///< at most; engines that need somebody come first; 0: all
  bool errors_cut = false;  ///< an engine's takes one line, whatever its last error is
};

bool Ended(const v1::StatusResponse::Epoch& epoch);
/// "63 % of 129 MB at 81.3 MB/s, about 590.0 ms left"; empty where no bytes move.
std::string ProgressText(const v1::StatusResponse::Epoch& epoch);
/// "changes 15.8 MB for 988 MB, 3.1 % of its elements"; empty where nothing was made of changes.
std::string DeltaText(const v1::StatusResponse::Epoch& epoch);
/// "1 agent", "2 agents".
std::string CountText(uint64_t count, const std::string& noun);
/// What everyone waits for; where that is nothing, what the engines serve.
std::string WaitingText(const v1::StatusResponse& status);
/// The whole status: what everyone waits for, then engines and the newest epochs.
std::string StatusText(const v1::StatusResponse& status, const View& view);
std::string ParticipantsText(const v1::StatusResponse& status, const View& view);
std::string EnginesText(const v1::StatusResponse& status, const View& view);
std::string EpochsText(const v1::StatusResponse& status, const View& view);
/// And how many older ones there are.
std::string EpochsPageText(const v1::StatusResponse& status, const View& view);

std::string RollbackText(const v1::RollbackResponse& result);

std::string RollbackJson(const v1::RollbackResponse& result);
/// One JSON object or array with the proto's field names; every field is present, and epochs have
/// names of engines.
std::string StatusJson(v1::StatusResponse status);
std::string ParticipantsJson(v1::StatusResponse status);
std::string EnginesJson(v1::StatusResponse status);
std::string EpochsJson(v1::StatusResponse status);

/// Every engine, then every difference.
std::string VerifyText(const v1::VerifyResponse& result);
std::string VerifyJson(const v1::VerifyResponse& result);
/// kAborted / kDigestMismatch: something differs; else why the first engine could not be read.
Status VerifyOutcome(const v1::VerifyResponse& result);

}  // namespace weightwire::cli
