#include "server/store/etcd/etcd_client.h"

#include <grpcpp/grpcpp.h>

#include "etcd/rpc.grpc.pb.h"

namespace weightwire::store {
namespace {

namespace pb = etcdserverpb;

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

struct EtcdClient::Endpoint {
  explicit Endpoint(const std::string& at)
      : address(at),
        channel(ChannelTo(at)),
        kv(pb::KV::NewStub(channel)),
        lease(pb::Lease::NewStub(channel)) {}
  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<pb::KV::Stub> kv;
  const std::unique_ptr<pb::Lease::Stub> lease;
};

EtcdClient::EtcdClient(const std::vector<std::string>& endpoints) {
  for (const std::string& endpoint : endpoints) {
    endpoints_.push_back(std::make_unique<Endpoint>(endpoint));
  }
}

EtcdClient::~EtcdClient() = default;

template <typename Call>
Status EtcdClient::Ask(const char* what, Nanos limit, const Call& call) {
  const size_t index = current_;
  Endpoint& endpoint = *endpoints_[index % endpoints_.size()];
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + limit);
  // gRPC connects only while a blocking call waits: one that failed at once would never get
  // through.
  context.set_wait_for_ready(true);
  const grpc::Status status = call(endpoint, &context);
  if (status.ok()) return OkStatus();
  size_t seen = index;
  current_.compare_exchange_strong(seen, index + 1);
  return Status(Code::kUnavailable, Reason::kJournalFailed,
                "etcd at " + endpoint.address + " (" + what + "): " + status.error_message())
      .Remedy("check that etcd runs, has a quorum and can be reached from here");
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
