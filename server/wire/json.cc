#include "server/wire/json.h"

#include <google/protobuf/util/json_util.h>

namespace weightwire::wire {

std::string JsonText(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  // Fails only for messages that hold a malformed Any; ours hold none.
  (void)google::protobuf::util::MessageToJsonString(message, &text, options);
  return text;
}

}  // namespace weightwire::wire
