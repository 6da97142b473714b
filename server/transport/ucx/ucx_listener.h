#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <set>
#include <string>

#include "server/transport/ucx/ucx_core.h"

namespace weightwire::transport {

class UcxPendingConnection;
class UcxDial;

/// Lets peers in and calls them: whatever is not yet a session. After Open on the loop.
class UcxListener final : public std::enable_shared_from_this<UcxListener> {
 public:
  explicit UcxListener(std::shared_ptr<UcxCore> core);
  /// Not on the loop. kUnavailable / kIoError naming the address.
  Status Open();
  std::string address() const { return address_; }
  void Call(const std::string& address, const Hello& hello, Nanos timeout,
            Transport::ConnectDone done);
  /// No session is made afterwards.
  void Stop();

  // For its pending connections and dials.
  void Left(const std::shared_ptr<UcxPendingConnection>& pending);
  void Ended(const std::shared_ptr<UcxDial>& dial);

 private:
  Status Listen();
  void Admit(void* request);
  void ShowVisitors();

  const std::shared_ptr<UcxCore> core_;
  std::string address_;
  bool stopped_ = false;
  std::set<std::shared_ptr<UcxPendingConnection>> pending_;
  std::set<std::shared_ptr<UcxDial>> dials_;
};

}  // namespace weightwire::transport
