#include "server/transfer/context.h"

namespace weightwire::transfer {

transport::Transport* Context::TransportOf(const std::string& name) const {
  auto entry = transports.find(name);
  return entry == transports.end() ? nullptr : entry->second;
}

void Context::Send(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& notify) {
  const NotifyBytes bytes = EncodeNotify(notify);
  if (!endpoint->Notify(bytes.span()).ok()) endpoint->Close();
}

}  // namespace weightwire::transfer
