#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "client/cpp/weightwire.h"
#include "weightwire/v1/agent.grpc.pb.h"

namespace weightwire::client {

/// One attached incarnation of a rank: the event stream and the calls that carry its handle.
/// Private to this folder.
class Attachment {
 public:
  /// Both run on the reader thread; `on_end` once, last. Neither may destroy the attachment.
  struct Events {
    std::function<void(const v1::AttachEvent&)> on_event;
    std::function<void(Status)> on_end;
  };
  /// Errors: Agent.Attach's; kDeadlineExceeded when the agent does not answer in time.
  static Result<std::unique_ptr<Attachment>> Open(const Place& place, v1::GroupRole role,
                                                  Events events);
  /// Leaves in good order and joins the reader; `on_end` has run then.
  ~Attachment();

  Result<layout::RankLayout> SubmitLayout(const Layout& layout);
  Status Import(int fd, uint64_t bytes, const std::vector<uint64_t>& offsets);
  Result<v1::SubscribeResponse> Subscribe();
  Status Publish(Version version, const PublishOptions& options);
  /// Of every call of Publish so far.
  Result<v1::Withdrawal> Withdraw(Version version, bool if_accepted);
  Status Acknowledge(Epoch epoch, double flip_seconds);
  Status Refuse(Epoch epoch, const std::string& why);
  Result<memory::UniqueFd> Redeem(uint64_t token) const;

 private:
  Attachment(const Place& place, Events events);
  Status Handshake(v1::GroupRole role);
  void ReadUntilEnd();
  template <typename Request, typename Response>
  Status Call(grpc::Status (v1::Agent::Stub::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
              Request request, Response* response);

  const Place place_;
  const std::string socket_;
  Events events_;
  std::unique_ptr<v1::Agent::Stub> stub_;
  grpc::ClientContext stream_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachUp, v1::AttachEvent>> stream_;
  uint64_t handle_ = 0;
  uint64_t publish_calls_ = 0;
  Status end_;
  bool attached_ = false;
  bool ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread reader_;
};

}  // namespace weightwire::client
