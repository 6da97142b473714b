#include "tests/support/tls_for_tests.h"

#include <openssl/ssl.h>

#include <string>

namespace weightwire::testing {
namespace {

class TlsForTests final : public transport::TlsPeers {
 public:
  std::shared_ptr<ssl_ctx_st> Context() override {
    static const std::string folder = WEIGHTWIRE_TEST_TLS;
    std::shared_ptr<SSL_CTX> made(SSL_CTX_new(TLS_method()), SSL_CTX_free);
    WW_CHECK(SSL_CTX_set_min_proto_version(made.get(), TLS1_3_VERSION) == 1);
    WW_CHECK(SSL_CTX_use_certificate_chain_file(made.get(), (folder + "/agent.pem").c_str()) == 1);
    WW_CHECK(SSL_CTX_use_PrivateKey_file(made.get(), (folder + "/agent.key").c_str(),
                                         SSL_FILETYPE_PEM) == 1);
    WW_CHECK(SSL_CTX_load_verify_file(made.get(), (folder + "/ca.pem").c_str()) == 1);
    SSL_CTX_set_verify(made.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    SSL_CTX_set_num_tickets(made.get(), 0);
    return made;
  }
  Status Check(x509_st* certificate) override {
    if (certificate != nullptr) return OkStatus();
    return Status(Code::kUnauthenticated, Reason::kPermissionDenied, "no certificate");
  }
};

}  // namespace

std::shared_ptr<transport::TlsPeers> TlsPeersFor(transport::Integrity integrity) {
  if (integrity != transport::Integrity::kTls) return nullptr;
  return std::make_shared<TlsForTests>();
}

}  // namespace weightwire::testing
