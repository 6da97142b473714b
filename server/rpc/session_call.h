#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <grpcpp/support/client_callback.h>

#include "server/control/control.h"
#include "server/rpc/client_calls.h"
#include "server/tls/token.h"
#include "server/wire/reports.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

namespace weightwire::rpc {

/// An agent's session stream, seen from the agent. Held by itself while gRPC knows it.
class SessionCall final : public grpc::ClientBidiReactor<v1::SessionUp, v1::SessionDown>,
                          public std::enable_shared_from_this<SessionCall> {
 public:
  /// Both run on the strand; `ended` once, last.
  struct Events {
    std::function<void(const v1::SessionDown&)> down;
    std::function<void(Status)> ended;
  };

  /// `token`: the file of the token that the stream's metadata shows; null: none. Another one that
  /// comes into it is shown with the next heartbeat.
  SessionCall(std::shared_ptr<ClientCalls> calls, Events events,
              std::shared_ptr<tls::TokenFile> token)
      : calls_(std::move(calls)), events_(std::move(events)), token_(std::move(token)) {}

  /// Once. Nothing happens when the client is going.
  void Start(v1::Coordinator::Stub& stub, const control::AgentHello& hello);
  /// One that finds the last one still unwritten is dropped: nothing new would be said.
  void Heartbeat(const control::Beat& beat = {});
  /// In order; those that find the stream busy travel together. `number`: wire::ReportsWriter::Add.
  void Report(v1::ReportRequest report, uint64_t number);
  /// Says goodbye behind the reports, after which the coordinator ends the stream.
  void Leave();
  /// True when gRPC has let go of the stream within `span`. Any thread but gRPC's.
  bool WaitUntilOver(Nanos span);
  /// Cancels. `ended` still follows. Idempotent.
  void Stop();

  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  void LetGo();
  /// With mutex_ held: the next thing to say, when there is one and nothing is being written.
  void WriteNext();
  void FillHeartbeat();

  const std::shared_ptr<ClientCalls> calls_;
  const Events events_;
  const std::shared_ptr<tls::TokenFile> token_;
  grpc::ClientContext context_;
  v1::SessionDown down_;
  std::mutex mutex_;
  v1::SessionUp up_;
  bool writing_ = false;
  bool over_ = false;  ///< no write may start any more
  bool beat_due_ = false;
  control::Beat beat_;  ///< that is due
  wire::ReportsWriter reports_;
  bool leaving_ = false, said_goodbye_ = false;
  bool done_ = false;
  std::condition_variable done_changed_;
  uint64_t sequence_ = 0;
  std::string shown_;  ///< of token_
  std::shared_ptr<SessionCall> self_;
};

}  // namespace weightwire::rpc
