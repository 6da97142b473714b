#include "client/cli/token_command.h"

#include "client/cli/global_options.h"
#include "server/tls/token.h"

namespace weightwire::cli {

TokenCommand::TokenCommand(CLI::App& app, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("token", "Make a job token, for agents and people without a certificate");
  command->add_option("--key", key_path_, "The file that the coordinator has as token_key")
      ->required();
  command->add_option("--domain", domain_, "Trust domain of the coordinator's certificate")
      ->required();
  command->add_option("--job", job_, "Job that it is good for")->required();
  command->add_option("--role", role_, "trainer, engine, agent, operator or metrics")->required();
  command->add_option("--ranks", ranks_, "The one rank, or the range N-M, that it may register");
  command->add_option("--ns", ns_, "Namespace of the coordinator's certificate")
      ->capture_default_str();
  command->add_option("--hours", hours_, "How long it is good")
      ->check(Real(0, 24.0 * 366))
      ->capture_default_str();
  command->callback([this, &chosen] { chosen = [this] { return Run(); }; });
}

Result<std::string> TokenCommand::Run() const {
  const std::string uri = "spiffe://" + domain_ + "/ns/" + ns_ + "/job/" + job_ + "/role/" + role_ +
                          (ranks_.empty() ? "" : "/rank/" + ranks_);
  WW_ASSIGN(const tls::Identity identity, tls::ParseIdentity(uri, tls::Ranges::kAllowed));
  if (identity.role == tls::Role::kCoordinator) {
    return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
                "a coordinator has a certificate, and no token");
  }
  const auto seconds = static_cast<int64_t>(hours_ * 3'600);
  WW_ASSIGN(const std::string token,
            tls::TokenKeys(key_path_).Mint(identity, tls::WallSecondsNow() + seconds));
  return token + "\n";
}

}  // namespace weightwire::cli
