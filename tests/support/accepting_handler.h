#pragma once

#include <memory>
#include <span>

#include "server/transport/transport.h"

namespace weightwire::testing {

/// Lets every session in and does nothing about it: of a peer that only exports.
class AcceptingHandler final : public transport::Handler {
 public:
  Result<Ticket> OnHello(const transport::CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<transport::Endpoint>) override {}
  void OnNotify(const std::shared_ptr<transport::Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<transport::Endpoint>&, const Status&) override {}
};

}  // namespace weightwire::testing
