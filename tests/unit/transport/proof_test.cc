#include "server/transport/proof.h"

#include <set>

#include "gtest/gtest.h"
#include "server/transport/handshake.h"

namespace weightwire::transport {
namespace {

constexpr Incarnation kCaller(7), kCallee(9);
const Ticket kTicket = {1, 2, 3};

class Admits final : public Handler {
 public:
  explicit Admits(const Ticket& ticket) : ticket_(ticket) {}
  Result<Ticket> OnHello(const CallerHello&) override { return ticket_; }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}

 private:
  const Ticket ticket_;
};

Hello HelloWith(const Ticket& ticket) {
  Hello hello;
  hello.caller = kCaller;
  hello.callee = kCallee;
  hello.ticket = ticket;
  return hello;
}

std::string Hex(std::span<const uint8_t> bytes) {
  std::string hex;
  for (uint8_t byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

/// From `python3 -c "import hmac; …"`: a peer of another build must come to the same.
TEST(Proof, NamesAndSecretsAreWhatAnotherImplementationMakes) {
  EXPECT_EQ(Hex(NameOf(kTicket)), "9a5d30cf4724dea514736cbba7034551");
  const std::vector<std::byte> first(80, std::byte{1}), reply(48, std::byte{2});
  const SessionSecrets secrets = SecretsOf(kTicket, first, reply, {3});
  EXPECT_EQ(Hex(secrets.of_callee),
            "8e0b343a1d69155cf39ce2cdcf0ded6b9e53297d1a62495f68f68e04f6af92ea");
  EXPECT_EQ(Hex(secrets.of_caller),
            "eaa9ee4a224484165db50e0528391f77a1851def67ba0d7514759d044d99e0de");
  EXPECT_EQ(Hex(secrets.key), "03a4d1b216cad99106b013cf24ab86111bdd216bd1acc2240da4484d9af749a7");
}

TEST(Proof, SecretsDependOnAllThatWasSaid) {
  const std::vector<std::byte> first(80, std::byte{1}), reply(48, std::byte{2});
  std::set<Proof> seen;
  for (const Ticket& ticket : {kTicket, Ticket{9}}) {
    for (int what = 0; what < 4; ++what) {
      auto other_first = first;
      auto other_reply = reply;
      Nonce nonce{3};
      if (what == 1) other_first[79] ^= std::byte{1};
      if (what == 2) other_reply[47] ^= std::byte{1};
      if (what == 3) nonce[15] ^= 1;
      const SessionSecrets secrets = SecretsOf(ticket, other_first, other_reply, nonce);
      seen.insert({secrets.of_callee, secrets.of_caller, secrets.key});
    }
  }
  EXPECT_EQ(seen.size(), 24u);
}

TEST(Handshake, BothSidesWithTheTicketEndWithOneKey) {
  Admits handler(kTicket);
  CallerHandshake caller(HelloWith(kTicket));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler);
  ASSERT_TRUE(callee.awaits_proof());
  const auto proof = caller.OnCalleeProof(first, callee.callee_proof());
  ASSERT_TRUE(proof.has_value());
  EXPECT_EQ(callee.OnProof(*proof).value().code, Code::kOk);
  EXPECT_EQ(callee.hello(), caller.hello());
  EXPECT_EQ(callee.key(), caller.key());
  EXPECT_NE(callee.key(), Proof{});
}

TEST(Handshake, NoTwoSessionsHaveOneKey) {
  Admits handler(kTicket);
  std::set<Proof> keys;
  for (int i = 0; i < 20; ++i) {
    CallerHandshake caller(HelloWith(kTicket));
    const auto first = EncodeCallerHello(caller.caller_hello());
    const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler);
    keys.insert(callee.key());
  }
  EXPECT_EQ(keys.size(), 20u);
}

TEST(Handshake, ACalleeRefusesEveryOtherProof) {
  Admits handler(kTicket);
  CallerHandshake caller(HelloWith(kTicket));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler);
  const auto right = caller.OnCalleeProof(first, callee.callee_proof());
  ASSERT_TRUE(right.has_value());
  Proof proof = DecodeCallerProof(*right).value();
  for (size_t bit = 0; bit < proof.size() * 8; ++bit) {
    proof[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    const auto verdict = callee.OnProof(EncodeCallerProof(proof));
    EXPECT_EQ(verdict.value().reason, Reason::kTicketRejected) << "bit " << bit;
    proof[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
  }
  const auto callee_proof = callee.callee_proof();
  const CalleeProof theirs =
      DecodeCalleeProof(std::span(callee_proof).subspan(kCalleeReplyBytes)).value();
  EXPECT_EQ(callee.OnProof(EncodeCallerProof(theirs.proof)).value().code, Code::kUnauthenticated)
      << "the callee's own proof, sent back";
  EXPECT_EQ(callee.OnProof(first).error().reason(), Reason::kInvalidRequest);
}

TEST(Handshake, ACallerRefusesACalleeWithAnotherTicket) {
  Admits handler({6, 6, 6});
  CallerHandshake caller(HelloWith(kTicket));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler);
  const auto proof = caller.OnCalleeProof(first, callee.callee_proof());
  ASSERT_FALSE(proof.has_value());
  EXPECT_EQ(proof.error().code(), Code::kUnauthenticated);
  EXPECT_EQ(proof.error().reason(), Reason::kTicketRejected);
}

}  // namespace
}  // namespace weightwire::transport
