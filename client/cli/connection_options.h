#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "client/cli/connection.h"

namespace weightwire::cli {

/// --address, --timeout and --tls-… of a command that asks a running coordinator.
struct ConnectionOptions {
  std::string address = "127.0.0.1:7411";
  double timeout_seconds = 10;
  tls::TlsFiles files;

  void AddTo(CLI::App& command) {
    command.add_option("--address", address, "Coordinator, HOST:PORT")
        ->envname("WEIGHTWIRE_ADDRESS")
        ->capture_default_str();
    command.add_option("--timeout", timeout_seconds, "Seconds for each call")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    AddTls(command);
  }
  Connection Connect() const { return {address, timeout_seconds, files}; }

 private:
  void AddTls(CLI::App& command) {
    auto file = [&command](const char* flag, const char* variable, const char* about,
                           std::string& value) {
      return command.add_option(flag, value, about)->envname(variable)->group("TLS");
    };
    auto* cert = file("--tls-cert", "WEIGHTWIRE_TLS_CERT", "Own certificate (PEM)", files.cert);
    auto* key = file("--tls-key", "WEIGHTWIRE_TLS_KEY", "Its private key (PEM)", files.key);
    auto* ca = file("--tls-ca", "WEIGHTWIRE_TLS_CA", "Whom to believe (PEM)", files.ca);
    file("--tls-server-name", "WEIGHTWIRE_TLS_SERVER_NAME",
         "Name in the coordinator's certificate, where it is not that of --address",
         files.server_name);
    auto* token = file("--token-file", "WEIGHTWIRE_TOKEN_FILE",
                       "Job token, with --tls-ca, instead of certificate and key", files.token);
    cert->needs(key)->needs(ca);
    key->needs(cert);
    token->needs(ca)->excludes(cert);
  }
};

}  // namespace weightwire::cli
