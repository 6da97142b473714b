#pragma once

#include <string>

namespace google::protobuf {
class Message;
}

namespace weightwire::wire {

/// The message as one line of JSON without a line end: every field, under the proto's names. Not of
/// a message that holds an Any.
std::string JsonText(const google::protobuf::Message& message);

}  // namespace weightwire::wire
