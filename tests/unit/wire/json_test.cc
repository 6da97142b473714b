#include "server/wire/json.h"

#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::wire {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::string ByProtobuf(const Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  EXPECT_TRUE(google::protobuf::util::MessageToJsonString(message, &text, options).ok());
  return text;
}

/// Whatever a message of this type can hold.
class Filler {
 public:
  explicit Filler(uint32_t seed) : random_(seed) {}

  void Fill(Message* message, int depth = 0) {
    const auto* type = message->GetDescriptor();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* field = type->field(i);
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && depth > 3) continue;
      if (field->message_type() != nullptr && field->message_type()->name() == "Any") continue;
      const uint64_t count = field->is_repeated() ? Up(3) : Up(1);
      for (uint64_t k = 0; k < count; ++k) Set(message, field, depth);
    }
  }

 private:
  uint64_t Up(uint64_t most) { return random_() % (most + 1); }

  std::string Text(bool bytes) {
    static const std::string kWords[] = {
        "", "engine-a", "\"\\/<>&'", "\b\f\n\r\t\x01\x1f\x7f", "Zürich", "日本語", "🚀"};
    if (!bytes) return kWords[Up(6)] + kWords[Up(6)];
    std::string raw(Up(7), '\0');
    for (char& c : raw) c = static_cast<char>(random_());
    return raw;
  }

  double Real() {
    static const double kReals[] = {0,
                                    1,
                                    -1.5,
                                    0.1,
                                    1e-9,
                                    1e300,
                                    12345.678901234567,
                                    1.0 / 3,
                                    std::numeric_limits<double>::infinity()};
    return kReals[Up(8)];
  }

  void Set(Message* message, const FieldDescriptor* field, int depth) {
    const auto* values = message->GetReflection();
    const bool add = field->is_repeated();
    const uint64_t bits = Up(1) == 0 ? Up(100) : random_() << 32U | random_();
    switch (field->cpp_type()) {
#define WW_SET(CASE, METHOD, VALUE)                         \
  case FieldDescriptor::CASE:                               \
    return add ? values->Add##METHOD(message, field, VALUE) \
               : values->Set##METHOD(message, field, VALUE)
      WW_SET(CPPTYPE_INT32, Int32, static_cast<int32_t>(bits));
      WW_SET(CPPTYPE_UINT32, UInt32, static_cast<uint32_t>(bits));
      WW_SET(CPPTYPE_INT64, Int64, static_cast<int64_t>(bits));
      WW_SET(CPPTYPE_UINT64, UInt64, bits);
      WW_SET(CPPTYPE_DOUBLE, Double, Real());
      WW_SET(CPPTYPE_FLOAT, Float, static_cast<float>(Real()));
      WW_SET(CPPTYPE_BOOL, Bool, Up(1) == 1);
      WW_SET(CPPTYPE_ENUM, EnumValue, static_cast<int>(Up(12)));
      WW_SET(CPPTYPE_STRING, String, Text(field->type() == FieldDescriptor::TYPE_BYTES));
#undef WW_SET
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Fill(
            add ? values->AddMessage(message, field) : values->MutableMessage(message, field),
            depth + 1);
    }
  }

  std::mt19937_64 random_;
};

template <typename T>
void Same(uint32_t seed) {
  T message;
  Filler(seed).Fill(&message);
  // Fields of a map that were added twice are one.
  T settled;
  ASSERT_TRUE(settled.ParseFromString(message.SerializeAsString()));
  const std::string ours = JsonText(settled), theirs = ByProtobuf(settled);
  ASSERT_EQ(nlohmann::json::parse(ours), nlohmann::json::parse(theirs)) << "seed " << seed;
  EXPECT_EQ(ours.find_first_of("<>\n"), std::string::npos);
  T back;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(ours, &back).ok()) << ours;
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(settled, back)) << "seed " << seed;
}

TEST(Json, IsAsProtobufWritesIt) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Same<v1::StatusResponse>(seed);
    Same<v1::DescribeEpochResponse>(seed);
    Same<v1::VerifyResponse>(seed);
    Same<v1::RollbackResponse>(seed);
    Same<v1::Prepare>(seed);      // bytes, maps of numbers and messages
    Same<v1::SessionDown>(seed);  // one of several
  }
}

TEST(Json, OfNothingHasEveryField) {
  EXPECT_EQ(JsonText(v1::DrainRequest()), R"({"name":"","undo":false})");
  EXPECT_EQ(JsonText(v1::StatusRequest()),
            R"({"epochs_max":0,"epochs_before":"0","engine_runs":false,"no_participants":false})");
  EXPECT_EQ(JsonText(v1::CommitResponse()), "{}");
}

}  // namespace
}  // namespace weightwire::wire
