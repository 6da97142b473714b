#include "server/daemon/http_tls.h"

#include <utility>

#include "server/rpc/rights.h"
#include "server/tls/certificate.h"

namespace weightwire::daemon {
namespace {

constexpr char kStatusMethod[] = "/weightwire.v1.Coordinator/Status";

}  // namespace

HttpTls::HttpTls(const tls::TlsFiles& files, tls::Identity own, metrics::Sink& metrics)
    : context_(files, TlsContext::Peers::kMayShowNone, "the pages"),
      own_(std::move(own)),
      metrics_(metrics) {}

Result<std::unique_ptr<HttpTls>> HttpTls::Make(const tls::TlsFiles& files, tls::Identity own,
                                               metrics::Sink& metrics) {
  std::unique_ptr<HttpTls> made(new HttpTls(files, std::move(own), metrics));
  WW_FAIL_IF_ERROR(made->context_.Load());
  return made;
}

std::shared_ptr<boost::asio::ssl::context> HttpTls::Context() { return context_.Get(); }

Status HttpTls::MaySee(const std::string& path, x509_st* certificate) {
  Status may = Check(path, certificate);
  if (!may.ok()) metrics_.Add("auth_failures_total", 1, {{"reason", "page"}});
  return may;
}

Status HttpTls::Check(const std::string& path, x509_st* certificate) const {
  if (path == "/healthz" || path == "/readyz") return OkStatus();
  if (certificate == nullptr) {
    return Status(Code::kUnauthenticated, Reason::kPermissionDenied,
                  path + " is shown to who has a certificate");
  }
  WW_ASSIGN_OR_STATUS(const tls::Identity caller, tls::IdentityIn(certificate));
  const bool own = caller.domain == own_.domain && caller.ns == own_.ns && caller.job == own_.job;
  if (path == "/metrics" && own && caller.role == tls::Role::kMetrics) return OkStatus();
  return rpc::CheckRight(kStatusMethod, caller, own_);
}

}  // namespace weightwire::daemon
