#include "server/store/etcd/etcd_client.h"

#include <grpcpp/grpcpp.h>

#include <fstream>
#include <iterator>
#include <utility>

#include "etcd/rpc.grpc.pb.h"
#include "server/tls/credentials.h"

namespace weightwire::store {
namespace {

namespace pb = etcdserverpb;

// One answer holds a few values, of which etcd is told with --max-request-bytes how long they are.
constexpr int kAnswerBytesMax = 64 << 20;
constexpr size_t kPasswordBytesMax = 4'096;

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kAnswerBytesMax);
  return arguments;
}

Result<std::string> PasswordIn(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (!file || text.empty() || text.size() > kPasswordBytesMax) {
    return Fail(Status(Code::kInvalidArgument, Reason::kJournalFailed,
                       path + ": cannot be read, is empty or longer than " +
                           std::to_string(kPasswordBytesMax) + " bytes")
                    .Remedy("etcd_password_file holds the password of etcd_user"));
  }
  return text;
}

bool Says(const grpc::Status& status, const char* words) {
  return status.error_message().find(words) != std::string::npos;
}

/// The token, not the user, is refused: it has expired, or users have changed.
bool TokenIsOver(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         Says(status, "revision of auth store is old");
}

bool MayPass(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::NOT_FOUND:  // a lease that has ended: the next one is asked for
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:  // etcd's own; gRPC's is a message over the limit
      return Says(status, "etcdserver:");
    default:
      return false;
  }
}

std::string RemedyFor(const grpc::Status& status, const std::string& user) {
  const std::string who = user.empty() ? "the user of etcd_cert (its CN)" : "etcd_user " + user;
  if (Says(status, "database space exceeded")) {
    return "compact and defragment etcd, or raise --quota-backend-bytes; then etcdctl alarm disarm";
  }
  if (Says(status, "authentication is not enabled")) {
    return "etcd asks for no user: leave etcd_user out, or run etcdctl auth enable";
  }
  if (Says(status, "user name is empty")) {
    return "etcd asks for a user: set etcd_user and etcd_password_file, or etcd_cert and etcd_key";
  }
  switch (status.error_code()) {
    case grpc::StatusCode::PERMISSION_DENIED:
      return "grant " + who + " readwrite on the prefix weightwire/JOB/";
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::INVALID_ARGUMENT:
      if (Says(status, "too large")) return "raise etcd's --max-request-bytes";
      return "check etcd_user and etcd_password_file against etcd's users";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return Says(status, "etcdserver:") ? "etcd has too much to do"
                                         : "a value in etcd is too large";
    case grpc::StatusCode::DATA_LOSS:
      return "a member of etcd is corrupt: restore it from the others, or from a snapshot";
    default:
      break;
  }
  return MayPass(status) ? "check that etcd runs, has a quorum and can be reached from here, and "
                           "that etcd_ca is set if it speaks TLS and only then"
                         : "check etcd's version (3.4 or later) and its log";
}

}  // namespace

struct EtcdClient::Endpoint {
  Endpoint(const std::string& at, const tls::Dialer& dialer)
      : address(at),
        channel(dialer.Open(at, Arguments())),
        kv(pb::KV::NewStub(channel)),
        lease(pb::Lease::NewStub(channel)),
        auth(pb::Auth::NewStub(channel)) {}
  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<pb::KV::Stub> kv;
  const std::unique_ptr<pb::Lease::Stub> lease;
  const std::unique_ptr<pb::Auth::Stub> auth;
};

EtcdClient::EtcdClient(Options options) : options_(std::move(options)) {
  const tls::Dialer dialer(options_.tls);
  for (const std::string& endpoint : options_.endpoints) {
    endpoints_.push_back(std::make_unique<Endpoint>(endpoint, dialer));
  }
}

EtcdClient::~EtcdClient() = default;

template <typename Call>
Status EtcdClient::Ask(const char* what, Nanos limit, const Call& call) {
  const size_t index = current_;
  Endpoint& endpoint = *endpoints_[index % endpoints_.size()];
  const Nanos end = SystemClock().Now() + limit;
  auto once = [&](const std::string& token) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + (end - SystemClock().Now()));
    // gRPC connects only while a blocking call waits: one that failed at once would never get
    // through.
    context.set_wait_for_ready(true);
    if (!token.empty()) context.AddMetadata("token", token);
    return call(endpoint, &context);
  };
  grpc::Status status;
  for (const bool first : {true, false}) {
    WW_ASSIGN_OR_STATUS(const std::string token, Token(endpoint, end - SystemClock().Now()));
    status = once(token);
    if (status.ok()) return OkStatus();
    if (token.empty() || !TokenIsOver(status) || !first) break;
    std::lock_guard lock(mutex_);
    if (token_ == token) token_.clear();
  }
  if (MayPass(status)) {
    size_t seen = index;
    current_.compare_exchange_strong(seen, index + 1);
  }
  return Failed(endpoint, what, status);
}

Status EtcdClient::Failed(const Endpoint& endpoint, const char* what,
                          const grpc::Status& status) const {
  const Code code = MayPass(status) ? Code::kUnavailable : static_cast<Code>(status.error_code());
  return Status(code, Reason::kJournalFailed,
                "etcd at " + endpoint.address + " (" + what + "): " + status.error_message())
      .Remedy(RemedyFor(status, options_.user));
}

Result<std::string> EtcdClient::Token(Endpoint& endpoint, Nanos limit) {
  if (options_.user.empty()) return std::string();
  {
    std::lock_guard lock(mutex_);
    if (!token_.empty()) return token_;
  }
  pb::AuthenticateRequest request;
  request.set_name(options_.user);
  WW_ASSIGN(*request.mutable_password(), PasswordIn(options_.password_file));
  pb::AuthenticateResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + limit);
  context.set_wait_for_ready(true);
  const grpc::Status status = endpoint.auth->Authenticate(&context, request, &response);
  if (!status.ok()) {
    if (MayPass(status)) ++current_;
    return Fail(Failed(endpoint, "Authenticate", status));
  }
  std::lock_guard lock(mutex_);
  return token_ = response.token();
}

Result<pb::TxnResponse> EtcdClient::Txn(const pb::TxnRequest& request, Nanos limit) {
  pb::TxnResponse response;
  WW_FAIL_IF_ERROR(Ask("Txn", limit, [&](Endpoint& endpoint, grpc::ClientContext* context) {
    return endpoint.kv->Txn(context, request, &response);
  }));
  return response;
}

Result<pb::RangeResponse> EtcdClient::Range(const pb::RangeRequest& request, Nanos limit) {
  pb::RangeResponse response;
  WW_FAIL_IF_ERROR(Ask("Range", limit, [&](Endpoint& endpoint, grpc::ClientContext* context) {
    return endpoint.kv->Range(context, request, &response);
  }));
  return response;
}

Result<int64_t> EtcdClient::GrantLease(std::chrono::seconds ttl, Nanos limit) {
  pb::LeaseGrantRequest request;
  request.set_ttl(ttl.count());
  pb::LeaseGrantResponse response;
  WW_FAIL_IF_ERROR(Ask("LeaseGrant", limit, [&](Endpoint& endpoint, grpc::ClientContext* context) {
    return endpoint.lease->LeaseGrant(context, request, &response);
  }));
  return response.id();
}

Result<bool> EtcdClient::KeepAlive(int64_t lease, Nanos limit) {
  pb::LeaseKeepAliveRequest request;
  request.set_id(lease);
  pb::LeaseKeepAliveResponse response;
  WW_FAIL_IF_ERROR(
      Ask("LeaseKeepAlive", limit, [&](Endpoint& endpoint, grpc::ClientContext* context) {
        auto stream = endpoint.lease->LeaseKeepAlive(context);
        stream->Write(request);
        stream->WritesDone();
        const bool answered = stream->Read(&response);
        const grpc::Status status = stream->Finish();
        if (answered || !status.ok()) return answered ? grpc::Status::OK : status;
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "no answer");
      }));
  return response.ttl() > 0;
}

Status EtcdClient::Revoke(int64_t lease, Nanos limit) {
  pb::LeaseRevokeRequest request;
  request.set_id(lease);
  pb::LeaseRevokeResponse response;
  return Ask("LeaseRevoke", limit, [&](Endpoint& endpoint, grpc::ClientContext* context) {
    return endpoint.lease->LeaseRevoke(context, request, &response);
  });
}

}  // namespace weightwire::store
