#include "server/wire/fd_protocol.h"

#include <gtest/gtest.h>

#include <cstring>

namespace weightwire::wire {
namespace {

TEST(FdProtocol, FramesHaveTheDocumentedBytes) {
  const FdFrame get = Encode(FdRequest{FdOp::kGet, 0x1122334455667788});
  const unsigned char expected[] = {'W',  'W',  'F',  'D',  2,    0,    0,    0,
                                    0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11};
  EXPECT_EQ(std::memcmp(get.data(), expected, sizeof(expected)), 0);
  const FdFrame reply = Encode(FdReply{Reason::kNotRegistered, 1});
  EXPECT_EQ(static_cast<int>(reply[4]), 22);
}

TEST(FdProtocol, ComesBackEqual) {
  const FdRequest request{FdOp::kPut, 0};
  EXPECT_EQ(DecodeFdRequest(Encode(request)), request);
  const FdReply reply{Reason::kLimitExceeded, 77};
  EXPECT_EQ(DecodeFdReply(Encode(reply)), reply);
}

TEST(FdProtocol, RefusesForeignMagicUnknownOpAndUnknownReason) {
  FdFrame frame = Encode(FdRequest{FdOp::kPut, 0});
  frame[0] = std::byte{'X'};
  EXPECT_EQ(DecodeFdRequest(frame).error().reason(), Reason::kInvalidRequest);
  frame = Encode(FdRequest{FdOp::kPut, 0});
  frame[4] = std::byte{3};
  EXPECT_EQ(DecodeFdRequest(frame).error().reason(), Reason::kUnknownEnum);
  frame[4] = std::byte{200};
  EXPECT_EQ(DecodeFdReply(frame).error().reason(), Reason::kUnknownEnum);
}

}  // namespace
}  // namespace weightwire::wire
