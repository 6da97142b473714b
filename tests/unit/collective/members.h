#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/collective/collective.h"
#include "tests/support/fake_nccl/fake_nccl.h"

namespace weightwire::collective {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// Long enough for a loaded machine; no test waits for it unless something is broken.
inline constexpr Nanos kAmple = seconds(60);
/// For operations that are to run out of time.
inline constexpr Nanos kShort = milliseconds(150);

inline Bytes Pattern(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes out(bytes);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

/// Members of one communicator after the other, each called on a thread of its own, over the fake.
class Members : public testing::Test {
 protected:
  void Open(uint32_t size, Nanos grace = kAmple) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      auto opened = Collective::Open({FAKE_NCCL_LIBRARY, FAKE_NCCL_LIBRARY, 0, grace});
      ASSERT_TRUE(opened) << opened.error().ToString();
      members_.push_back(std::move(*opened));
    }
  }

  /// `call(rank)` by all members at once; their results by rank.
  template <typename Call>
  std::vector<Status> All(Call call) {
    std::vector<std::future<Status>> running;
    for (uint32_t rank = 0; rank < members_.size(); ++rank) {
      running.push_back(std::async(std::launch::async, call, rank));
    }
    std::vector<Status> results;
    for (auto& future : running) results.push_back(future.get());
    return results;
  }

  std::vector<Status> Form(uint64_t epoch, Nanos deadline = kAmple) {
    auto id = members_[0]->MakeUniqueId();
    EXPECT_TRUE(id);
    return All(
        [&](uint32_t rank) { return members_[rank]->Form(*id, rank, size(), epoch, deadline); });
  }
  void FormWell(uint64_t epoch) {
    for (const Status& status : Form(epoch)) ASSERT_TRUE(status.ok()) << status.ToString();
  }
  Status Broadcast(uint32_t rank, Bytes& data, uint32_t root, Nanos deadline = kAmple) {
    return members_[rank]->Broadcast(data.data(), data.size(), root, StreamOf(rank), deadline);
  }
  void BroadcastWell(uint32_t root, uint32_t seed) {
    const Bytes want = Pattern(100'003, seed);
    std::vector<Bytes> data(size(), Bytes(want.size()));
    data[root] = want;
    for (const Status& s : All([&](uint32_t rank) { return Broadcast(rank, data[rank], root); })) {
      ASSERT_TRUE(s.ok()) << s.ToString();
    }
    for (uint32_t rank = 0; rank < size(); ++rank) EXPECT_EQ(data[rank], want) << rank;
  }

  uint32_t size() const { return static_cast<uint32_t>(members_.size()); }
  void* StreamOf(uint32_t rank) { return &streams_[rank]; }

  void TearDown() override {
    fake_nccl_reset();  // what hung goes on and ends
    members_.clear();
    EXPECT_EQ(fake_nccl_live_comms(), 0);
    EXPECT_EQ(fake_nccl_live_events(), 0);
    fake_nccl_reset();
  }

  std::vector<std::unique_ptr<Collective>> members_;
  char streams_[8] = {};
};

}  // namespace weightwire::collective
