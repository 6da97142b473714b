#include "server/wire/json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

// protobuf's own writer takes the message's bytes apart again by its type: a status of 10,000
// engines takes it seconds. This one writes the same (json_test.cc), through reflection.
namespace weightwire::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

/// As protobuf writes strings: also what would end a script.
void AppendString(std::string_view text, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  size_t plain = 0;  // where what is not yet copied begins
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\' && c != '<' && c != '>' && c != 0x7f) continue;
    out.append(text, plain, i - plain);
    plain = i + 1;
    constexpr std::string_view kNamed = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
    if (const size_t at = kNamed.find(text[i]); at != std::string_view::npos) {
      out.append({'\\', kLetters[at]});
    } else {
      out.append("\\u00").append({kHex[c >> 4U], kHex[c & 0xfU]});
    }
  }
  out.append(text, plain, text.size() - plain) += '"';
}

template <typename Number>
void AppendNumber(Number number, std::string& out) {
  std::array<char, 32> digits;
  out.append(digits.data(), std::to_chars(digits.data(), digits.end(), number).ptr);
}

template <typename Number>
void AppendReal(Number number, std::string& out) {
  if (std::isfinite(number)) return AppendNumber(number, out);
  out += std::isnan(number) ? "\"NaN\"" : number > 0 ? "\"Infinity\"" : "\"-Infinity\"";
}

/// 64 bits do not fit into the numbers of many readers.
template <typename Number>
void AppendLong(Number number, std::string& out) {
  out += '"';
  AppendNumber(number, out);
  out += '"';
}

std::string Base64Of(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t have = std::min<size_t>(3, bytes.size() - i);
    uint32_t three = 0;
    for (size_t k = 0; k < 3; ++k) {
      three = three << 8U | (k < have ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    }
    for (size_t k = 0; k < 4; ++k) {
      text += k <= have ? kDigits[three >> (18 - 6 * k) & 63U] : '=';
    }
  }
  return text;
}

class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  void Write(const Message& message) {
    const Descriptor& type = *message.GetDescriptor();
    const Reflection& values = *message.GetReflection();
    char before = '{';
    for (int i = 0; i < type.field_count(); ++i) {
      const FieldDescriptor& field = *type.field(i);
      if (field.has_presence() && !values.HasField(message, &field)) continue;
      out_ += before;
      before = ',';
      out_.append(1, '"').append(field.name()).append("\":");
      if (field.is_map()) {
        WriteMap(message, field);
      } else if (field.is_repeated()) {
        WriteList(message, field);
      } else {
        WriteValue(message, field, kAlone);
      }
    }
    out_.append(before == '{' ? "{}" : "}");
  }

 private:
  static constexpr int kAlone = -1;  ///< in place of an index

  void WriteList(const Message& message, const FieldDescriptor& field) {
    const int count = message.GetReflection()->FieldSize(message, &field);
    out_ += '[';
    for (int i = 0; i < count; ++i) {
      if (i > 0) out_ += ',';
      WriteValue(message, field, i);
    }
    out_ += ']';
  }

  void WriteMap(const Message& message, const FieldDescriptor& field) {
    const Reflection& values = *message.GetReflection();
    const FieldDescriptor& key = *field.message_type()->map_key();
    const FieldDescriptor& value = *field.message_type()->map_value();
    // By key, so that the same message is the same text.
    std::vector<std::pair<std::string, const Message*>> entries;
    for (int i = 0; i < values.FieldSize(message, &field); ++i) {
      const Message& entry = values.GetRepeatedMessage(message, &field, i);
      entries.emplace_back(KeyOf(entry, key), &entry);
    }
    std::ranges::sort(entries);
    out_ += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out_ += ',';
      out_ += entries[i].first + ":";
      WriteValue(*entries[i].second, value, kAlone);
    }
    out_ += '}';
  }

  /// Keys are strings, whatever their type.
  static std::string KeyOf(const Message& entry, const FieldDescriptor& key) {
    std::string text;
    Writer(text).WriteValue(entry, key, kAlone);
    return text.front() == '"' ? text : '"' + text + '"';
  }

  void WriteValue(const Message& message, const FieldDescriptor& field, int index) {
    const Reflection& values = *message.GetReflection();
    const bool alone = index == kAlone;
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return AppendNumber(alone ? values.GetInt32(message, &field)
                                  : values.GetRepeatedInt32(message, &field, index),
                            out_);
      case FieldDescriptor::CPPTYPE_UINT32:
        return AppendNumber(alone ? values.GetUInt32(message, &field)
                                  : values.GetRepeatedUInt32(message, &field, index),
                            out_);
      case FieldDescriptor::CPPTYPE_INT64:
        return AppendLong(alone ? values.GetInt64(message, &field)
                                : values.GetRepeatedInt64(message, &field, index),
                          out_);
      case FieldDescriptor::CPPTYPE_UINT64:
        return AppendLong(alone ? values.GetUInt64(message, &field)
                                : values.GetRepeatedUInt64(message, &field, index),
                          out_);
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return AppendReal(alone ? values.GetDouble(message, &field)
                                : values.GetRepeatedDouble(message, &field, index),
                          out_);
      case FieldDescriptor::CPPTYPE_FLOAT:
        return AppendReal(alone ? values.GetFloat(message, &field)
                                : values.GetRepeatedFloat(message, &field, index),
                          out_);
      case FieldDescriptor::CPPTYPE_BOOL:
        out_ += (alone ? values.GetBool(message, &field)
                       : values.GetRepeatedBool(message, &field, index))
                    ? "true"
                    : "false";
        return;
      case FieldDescriptor::CPPTYPE_ENUM:
        return WriteEnum(field, alone ? values.GetEnumValue(message, &field)
                                      : values.GetRepeatedEnumValue(message, &field, index));
      case FieldDescriptor::CPPTYPE_STRING:
        return WriteText(
            field, alone ? values.GetStringReference(message, &field, &scratch_)
                         : values.GetRepeatedStringReference(message, &field, index, &scratch_));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Write(alone ? values.GetMessage(message, &field)
                           : values.GetRepeatedMessage(message, &field, index));
    }
  }

  void WriteEnum(const FieldDescriptor& field, int number) {
    const auto* value = field.enum_type()->FindValueByNumber(number);
    if (value == nullptr) return AppendNumber(number, out_);  // of a newer peer
    AppendString(value->name(), out_);
  }

  void WriteText(const FieldDescriptor& field, const std::string& text) {
    if (field.type() != FieldDescriptor::TYPE_BYTES) return AppendString(text, out_);
    out_.append(1, '"').append(Base64Of(text)).append(1, '"');
  }

  std::string& out_;
  std::string scratch_;
};

}  // namespace

std::string JsonText(const Message& message) {
  std::string text;
  Writer(text).Write(message);
  return text;
}

}  // namespace weightwire::wire
