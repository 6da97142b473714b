#include "server/transport/handshake.h"

#include <string>

namespace weightwire::transport {
namespace {

HelloReply Refusal(const Status& why) { return HelloReply{0, 0, why.code(), why.reason()}; }

}  // namespace

HelloReply AnswerHello(const Hello& hello, Incarnation self, Handler& handler) {
  auto protocol = ChooseProtocol(hello.protocol_min, hello.protocol_max);
  if (!protocol.has_value()) return Refusal(protocol.error());
  if (hello.callee != self) {
    return Refusal(Status(Code::kFailedPrecondition, Reason::kStaleIncarnation, ""));
  }
  if (Status verdict = handler.OnHello(hello); !verdict.ok()) return Refusal(verdict);
  return HelloReply{*protocol, 0, Code::kOk, Reason::kNone};
}

Status StatusOf(const HelloReply& reply) {
  if (reply.code == Code::kOk) return OkStatus();
  return Status(reply.code, reply.reason,
                "the peer refused the session: " + std::string(ReasonName(reply.reason)));
}

}  // namespace weightwire::transport
