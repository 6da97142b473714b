#include "server/rpc/authorizer.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>
#include <spdlog/spdlog.h>

#include <iterator>
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

bool IsTls(const grpc::AuthContext* context) {
  if (context == nullptr) return false;
  const auto kinds = context->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return kinds.size() == 1 && kinds.front() == GRPC_TLS_TRANSPORT_SECURITY_TYPE;
}

bool HasCertificate(const grpc::AuthContext& context) {
  return !context.FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME).empty();
}

/// The token that a call shows; empty: none, or more than one.
template <typename Metadata>
std::string ShownToken(const Metadata& metadata) {
  const auto [first, end] = metadata.equal_range(tls::kTokenMetadata);
  if (first == end || std::next(first) != end) return "";
  return std::string(first->second.data(), first->second.size());
}

class Authorizer final : public grpc::AuthMetadataProcessor {
 public:
  Authorizer(tls::Identity server, std::shared_ptr<tls::TokenKeys> tokens, metrics::Sink& metrics)
      : server_(std::move(server)), tokens_(std::move(tokens)), metrics_(metrics) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const std::string method =
        path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
    const bool by_token = tokens_ != nullptr && !HasCertificate(*context);
    const auto caller = by_token ? Shown(metadata) : IdentityOf(*context);
    if (!caller) {
      metrics_.Add("auth_failures_total", 1, {{"reason", by_token ? "token" : "identity"}});
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
  Result<tls::Identity> Shown(const InputMetadata& metadata) const {
    const std::string text = ShownToken(metadata);
    if (text.empty()) {
      return Fail(Status(Code::kUnauthenticated, Reason::kPermissionDenied,
                         "the caller shows neither a certificate nor one job token")
                      .Remedy("set tls_cert and tls_key, or token_file"));
    }
    WW_ASSIGN(tls::Token token, tokens_->Verify(text, tls::WallSecondsNow()));
    return std::move(token.identity);
  }
  static grpc::Status Refuse(const Status& why) {
    spdlog::warn("a call was refused: {}", why.ToString());
    return ToGrpc(why);
  }

  const tls::Identity server_;
  const std::shared_ptr<tls::TokenKeys> tokens_;
  metrics::Sink& metrics_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> GuardedCredentials(const tls::TlsFiles& files,
                                                            tls::Identity server,
                                                            std::shared_ptr<tls::TokenKeys> tokens,
                                                            metrics::Sink& metrics) {
  auto credentials = tls::ServerCredentials(
      files, tokens == nullptr ? tls::Clients::kCertificate : tls::Clients::kCertificateOrToken);
  credentials->SetAuthMetadataProcessor(
      std::make_shared<Authorizer>(std::move(server), std::move(tokens), metrics));
  return credentials;
}

std::optional<tls::Identity> CallerOf(const grpc::CallbackServerContext& context) {
  if (auto token = TokenOf(context)) return std::move(token->identity);
  const auto proof = context.auth_context();
  if (!proof || !proof->IsPeerAuthenticated()) return std::nullopt;
  auto identity = IdentityOf(*proof);
  if (!identity) return std::nullopt;
  return std::move(*identity);
}

// gRPC has one context for all calls of a connection, which a call can therefore not be noted in;
// the Authorizer has checked the token, so that its claims are true.
std::optional<std::string> TokenTextOf(const grpc::CallbackServerContext& context) {
  const auto proof = context.auth_context();
  if (!IsTls(proof.get()) || HasCertificate(*proof)) return std::nullopt;
  std::string text = ShownToken(context.client_metadata());
  if (text.empty()) return std::nullopt;
  return text;
}

std::optional<tls::Token> TokenOf(const grpc::CallbackServerContext& context) {
  const auto text = TokenTextOf(context);
  if (!text) return std::nullopt;
  auto token = tls::ParseToken(*text);
  if (!token) return std::nullopt;
  return std::move(*token);
}

Status CheckNotExposed(const grpc::CallbackServerContext& context) {
  if (IsTls(context.auth_context().get()) ||
      !context.client_metadata().contains(tls::kTokenMetadata)) {
    return OkStatus();
  }
  return Status(Code::kUnauthenticated, Reason::kInsecureListener,
                "a job token came in plaintext: whoever reads the network has it now")
      .Remedy("make another one, and give the coordinator tls_cert, tls_key, tls_ca and token_key");
}

}  // namespace weightwire::rpc
