#include "server/tls/certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <memory>
#include <vector>

namespace weightwire::tls {
namespace {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* held) const {
    Free(held);
  }
};
using CertificatePtr = std::unique_ptr<X509, Freed<X509_free>>;
using BioPtr = std::unique_ptr<BIO, Freed<BIO_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using StorePtr = std::unique_ptr<X509_STORE, Freed<X509_STORE_free>>;
using ContextPtr = std::unique_ptr<X509_STORE_CTX, Freed<X509_STORE_CTX_free>>;
using NamesPtr = std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES_free>>;
void FreeChain(STACK_OF(X509) * chain) { sk_X509_pop_free(chain, X509_free); }
using ChainPtr = std::unique_ptr<STACK_OF(X509), Freed<FreeChain>>;

Status Bad(const std::string& path, const std::string& what) {
  ERR_clear_error();
  return Status(Code::kInvalidArgument, Reason::kConfigInvalid, path + ": " + what)
      .Remedy("docs/security.md says what it must hold; deploy/certs.sh makes such for tests");
}

/// Every certificate of the file, the leaf first.
Result<std::vector<CertificatePtr>> ReadAll(const std::string& path) {
  BioPtr file(BIO_new_file(path.c_str(), "r"));
  if (!file) return Fail(Bad(path, "cannot be read"));
  std::vector<CertificatePtr> found;
  while (X509* next = PEM_read_bio_X509(file.get(), nullptr, nullptr, nullptr)) {
    found.emplace_back(next);
  }
  ERR_clear_error();  // the end of the file is one
  if (found.empty()) return Fail(Bad(path, "holds no certificate in PEM"));
  return found;
}

std::vector<std::string> UriNames(X509* certificate) {
  const NamesPtr names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::vector<std::string> found;
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* uri = name->d.uniformResourceIdentifier;
    found.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                       static_cast<size_t>(ASN1_STRING_length(uri)));
  }
  return found;
}

Result<Certificate> Describe(const std::string& path, X509* leaf) {
  const std::vector<std::string> uris = UriNames(leaf);
  if (uris.size() != 1) {
    return Fail(Bad(path, "has " + std::to_string(uris.size()) + " URI SANs; it must have one"));
  }
  Certificate out;
  WW_ASSIGN(out.identity, ParseIdentity(uris.front()));
  std::tm end{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(leaf), &end) != 1) {
    return Fail(Bad(path, "says no time until which it holds"));
  }
  out.not_after = static_cast<double>(timegm(&end));
  return out;
}

Status CheckKey(const std::string& path, X509* leaf) {
  BioPtr file(BIO_new_file(path.c_str(), "r"));
  if (!file) return Bad(path, "cannot be read");
  const KeyPtr key(PEM_read_bio_PrivateKey(file.get(), nullptr, nullptr, nullptr));
  if (!key) return Bad(path, "holds no private key in PEM");
  if (X509_check_private_key(leaf, key.get()) != 1) {
    return Bad(path, "is not the key of the certificate");
  }
  return OkStatus();
}

Status CheckChain(const TlsFiles& files, const std::vector<CertificatePtr>& chain) {
  WW_ASSIGN_OR_STATUS(const std::vector<CertificatePtr> roots, ReadAll(files.ca));
  const StorePtr store(X509_STORE_new());
  for (const CertificatePtr& root : roots) X509_STORE_add_cert(store.get(), root.get());
  const ChainPtr between(sk_X509_new_null());
  for (size_t i = 1; i < chain.size(); ++i) {
    X509_up_ref(chain[i].get());
    sk_X509_push(between.get(), chain[i].get());
  }
  const ContextPtr context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), chain.front().get(), between.get());
  if (X509_verify_cert(context.get()) == 1) return OkStatus();
  const int error = X509_STORE_CTX_get_error(context.get());
  return Bad(files.cert, std::string("is not good under ") + files.ca + ": " +
                             X509_verify_cert_error_string(error));
}

}  // namespace

Result<Identity> IdentityIn(x509_st* certificate) {
  const std::vector<std::string> uris = UriNames(certificate);
  return ParseIdentity(uris.size() == 1 ? uris.front() : "");
}

Result<Certificate> ReadCertificate(const std::string& path) {
  WW_ASSIGN(const std::vector<CertificatePtr> chain, ReadAll(path));
  return Describe(path, chain.front().get());
}

Status CheckCertificate(const std::string& path) {
  auto found = ReadAll(path);
  return found ? OkStatus() : found.error();
}

Status CheckKeyOf(const std::string& cert, const std::string& key) {
  WW_ASSIGN_OR_STATUS(const std::vector<CertificatePtr> chain, ReadAll(cert));
  return CheckKey(key, chain.front().get());
}

Result<Certificate> CheckFiles(const TlsFiles& files) {
  WW_ASSIGN(const std::vector<CertificatePtr> chain, ReadAll(files.cert));
  WW_ASSIGN(const Certificate found, Describe(files.cert, chain.front().get()));
  WW_FAIL_IF_ERROR(CheckKey(files.key, chain.front().get()));
  WW_FAIL_IF_ERROR(CheckChain(files, chain));
  return found;
}

}  // namespace weightwire::tls
