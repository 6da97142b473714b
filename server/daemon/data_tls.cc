#include "server/daemon/data_tls.h"

#include <spdlog/spdlog.h>

#include <boost/asio/ssl/context.hpp>
#include <utility>

#include "server/tls/certificate.h"

namespace weightwire::daemon {
namespace {

/// Coordinators have one with role all.
bool HasAgent(tls::Role role) {
  return role == tls::Role::kTrainer || role == tls::Role::kEngine || role == tls::Role::kAgent ||
         role == tls::Role::kCoordinator;
}

}  // namespace

DataTls::DataTls(const tls::TlsFiles& files, tls::Identity own)
    : context_(files, TlsContext::Peers::kMustShowOne, "the data plane"), own_(std::move(own)) {}

Result<std::shared_ptr<DataTls>> DataTls::Make(const tls::TlsFiles& files, tls::Identity own) {
  std::shared_ptr<DataTls> made(new DataTls(files, std::move(own)));
  WW_FAIL_IF_ERROR(made->context_.Load());
  return made;
}

std::shared_ptr<ssl_ctx_st> DataTls::Context() {
  auto context = context_.Get();
  SSL_CTX* native = context->native_handle();
  return {std::move(context), native};
}

Status DataTls::Check(x509_st* certificate) {
  if (certificate == nullptr) {
    return Status(Code::kUnauthenticated, Reason::kPermissionDenied,
                  "the peer of a data session showed no certificate");
  }
  WW_ASSIGN_OR_STATUS(const tls::Identity peer, tls::IdentityIn(certificate));
  if (peer.domain == own_.domain && peer.ns == own_.ns && peer.job == own_.job &&
      HasAgent(peer.role)) {
    return OkStatus();
  }
  Status refused(Code::kPermissionDenied, Reason::kPermissionDenied,
                 peer.Uri() + " is no agent of the job of " + own_.Uri());
  spdlog::warn("data session refused: {}", refused.ToString());
  return refused;
}

}  // namespace weightwire::daemon
