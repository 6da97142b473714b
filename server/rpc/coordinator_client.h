#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/control/control.h"
#include "server/tls/tls_files.h"

namespace weightwire::rpc {

struct CoordinatorClientOptions {
  /// "host:port" each; one at least. Of several the one that leads listens: OpenSession tries them
  /// in turn, each once, beginning after the one that was used last.
  std::vector<std::string> addresses;
  size_t message_bytes_max = 16 << 20;
  tls::TlsFiles tls;  ///< none: plaintext
  Nanos call_deadline = std::chrono::seconds(10);
  /// A call of Report (to coordinators that take none on the session) that finds it unavailable is
  /// sent again after a random time between half of this and all of it, doubled up to 16 times, as
  /// long as its session lives.
  Nanos report_retry = std::chrono::milliseconds(50);
};

/// The coordinator as an agent sees it over gRPC. Its methods are called on `strand`, where every
/// answer and command arrives.
///
/// Reports go on the session, in order; they end with it. To a coordinator that does not take them
/// there each is a call, one after another for each member. A Register waits, for call_deadline
/// at most, until every report that a member left has been answered: the next process in a place
/// finds it free. Other calls end within call_deadline, that one within two. The channel reconnects
/// by itself; a broken session is OnSessionLost, and the agent opens a new one.
/// `strand` must outlive it; destruction cancels every call, waits until gRPC has let go, and
/// answers nothing more.
std::unique_ptr<control::CoordinatorPort> MakeGrpcCoordinatorClient(
    CoordinatorClientOptions options, Executor& strand);

}  // namespace weightwire::rpc
