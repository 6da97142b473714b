#pragma once

#include "server/transport/transport.h"

namespace weightwire::transport {

/// The callee's decision on a hello: protocol, then whom the caller meant, then the handler.
HelloReply AnswerHello(const Hello& hello, Incarnation self, Handler& handler);

/// What the caller makes of the answer: OK, or the peer's code and reason.
Status StatusOf(const HelloReply& reply);

}  // namespace weightwire::transport
