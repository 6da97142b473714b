#include "server/rpc/gatekeeper.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>
#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "server/rpc/grpc_status.h"
#include "server/rpc/rights.h"
#include "server/tls/credentials.h"

namespace weightwire::rpc {
namespace {

/// gRPC sets the property when the certificate has one URI SAN and that is a SPIFFE id.
Result<tls::Identity> IdentityOf(const grpc::AuthContext& context) {
  const auto names = context.FindPropertyValues(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME);
  const std::string uri =
      names.size() == 1 ? std::string(names.front().data(), names.front().size()) : "";
  return tls::ParseIdentity(uri);
}

class Gatekeeper final : public grpc::AuthMetadataProcessor {
 public:
  Gatekeeper(tls::Identity server, metrics::Sink& metrics)
      : server_(std::move(server)), metrics_(metrics) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const std::string method =
        path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
    const auto caller = IdentityOf(*context);
    if (!caller) {
      metrics_.Add("auth_failures_total", 1, {{"reason", "identity"}});
      return Refuse(caller.error());
    }
    Status right = CheckRight(method, *caller, server_);
    if (right.ok()) return grpc::Status::OK;
    metrics_.Add("authz_denied_total", 1,
                 {{"role", std::string(tls::RoleName(caller->role))},
                  {"method", FindRights(method) != nullptr ? method : "unknown"}});
    return Refuse(right);
  }

 private:
  static grpc::Status Refuse(const Status& why) {
    spdlog::warn("a call was refused: {}", why.ToString());
    return ToGrpc(why);
  }

  const tls::Identity server_;
  metrics::Sink& metrics_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> GuardedCredentials(const tls::TlsFiles& files,
                                                            tls::Identity server,
                                                            metrics::Sink& metrics) {
  auto credentials = tls::ServerCredentials(files);
  credentials->SetAuthMetadataProcessor(std::make_shared<Gatekeeper>(std::move(server), metrics));
  return credentials;
}

std::optional<tls::Identity> CallerOf(const grpc::CallbackServerContext& context) {
  const auto proof = context.auth_context();
  if (!proof || !proof->IsPeerAuthenticated()) return std::nullopt;
  auto identity = IdentityOf(*proof);
  if (!identity) return std::nullopt;
  return std::move(*identity);
}

}  // namespace weightwire::rpc
