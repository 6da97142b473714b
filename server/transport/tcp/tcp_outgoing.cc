#include "server/transport/tcp/tcp_outgoing.h"

namespace weightwire::transport {

void TcpOutgoing::Seal(FrameMac& mac) {
  mac.Add(header);
  header_tag = mac.Seal();
  if (small.empty() && ranges.empty()) return;
  mac.Add(small);
  for (const PieceRange& range : ranges) mac.Add(range.span());
  payload_tag = mac.Seal();
}

void TcpOutgoing::AppendTo(std::vector<boost::asio::const_buffer>* buffers) const {
  buffers->push_back(boost::asio::buffer(header));
  if (header_tag) buffers->push_back(boost::asio::buffer(*header_tag));
  if (!small.empty()) buffers->push_back(boost::asio::buffer(small));
  for (const PieceRange& range : ranges) buffers->emplace_back(range.span().data(), range.bytes);
  if (payload_tag) buffers->push_back(boost::asio::buffer(*payload_tag));
}

}  // namespace weightwire::transport
