// libweightwire_nccl.so as an application meets it: by dlopen, over the fake.
#include <dlfcn.h>

#include <cstring>
#include <thread>

#include "client/collective/weightwire_nccl.h"
#include "tests/unit/collective/members.h"

namespace weightwire::collective {
namespace {

class NcclLibrary : public testing::Test {
 protected:
  void SetUp() override {
    library_ = dlopen(WEIGHTWIRE_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
  }
  void TearDown() override {
    EXPECT_EQ(fake_nccl_live_comms(), 0);
    EXPECT_EQ(fake_nccl_live_events(), 0);
    fake_nccl_reset();
  }
  template <typename Function>
  Function* Find(const char* name, Function*) {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }
  void* library_ = nullptr;
};
#define FIND(name) const auto name = Find(#name, static_cast<decltype(&::name)>(nullptr))

TEST_F(NcclLibrary, ExportsItsInterfaceAndNothingElse) {
  FIND(ww_nccl_abi_version);
  ASSERT_NE(ww_nccl_abi_version, nullptr);
  EXPECT_EQ(ww_nccl_abi_version(), uint32_t{WW_NCCL_ABI_VERSION});
  EXPECT_NE(dlsym(library_, "ww_nccl_exchange"), nullptr);
  EXPECT_EQ(dlsym(library_, "_ZN10weightwire10collective9StateNameENS0_5StateE"), nullptr);
}

TEST_F(NcclLibrary, SaysWhyNcclIsNotThere) {
  FIND(ww_nccl_open);
  FIND(ww_nccl_last);
  ww_nccl_options options{"/nowhere/libnccl.so.2", FAKE_NCCL_LIBRARY, 0, 0};
  ww_nccl* collective = nullptr;
  EXPECT_EQ(ww_nccl_open(&options, &collective), static_cast<int32_t>(Code::kUnavailable));
  EXPECT_EQ(collective, nullptr);
  EXPECT_EQ(ww_nccl_last().reason, static_cast<int32_t>(Reason::kTransportFailed));
  EXPECT_NE(std::strstr(ww_nccl_last().message, "/nowhere/libnccl.so.2"), nullptr);
  EXPECT_NE(std::strstr(ww_nccl_last().remedy, "install NCCL"), nullptr);
  EXPECT_EQ(ww_nccl_open(nullptr, &collective), static_cast<int32_t>(Code::kInvalidArgument));
}

TEST_F(NcclLibrary, TwoMembersFormMoveAndClose) {
  FIND(ww_nccl_open);
  FIND(ww_nccl_free);
  FIND(ww_nccl_unique_id);
  FIND(ww_nccl_form);
  FIND(ww_nccl_broadcast);
  FIND(ww_nccl_exchange);
  FIND(ww_nccl_abort);
  FIND(ww_nccl_close);
  FIND(ww_nccl_state);
  FIND(ww_nccl_epoch);
  ww_nccl_options options{FAKE_NCCL_LIBRARY, FAKE_NCCL_LIBRARY, 0, 60'000};
  ww_nccl* members[2] = {};
  for (ww_nccl*& member : members) ASSERT_EQ(ww_nccl_open(&options, &member), 0);
  uint8_t id[WW_NCCL_UNIQUE_ID_BYTES];
  ASSERT_EQ(ww_nccl_unique_id(members[0], id), 0);
  Bytes broadcast[2] = {Pattern(999, 1), Bytes(999)};
  Bytes out[2] = {Pattern(100, 2), Pattern(200, 3)}, in[2] = {Bytes(200), Bytes(100)};
  char streams[2];
  auto life = [&](uint32_t rank) {
    const uint32_t peer = 1 - rank;
    EXPECT_EQ(ww_nccl_form(members[rank], id, rank, 2, 3, 60'000), 0);
    EXPECT_EQ(ww_nccl_state(members[rank]), WW_NCCL_READY);
    EXPECT_EQ(ww_nccl_epoch(members[rank]), 3u);
    EXPECT_EQ(
        ww_nccl_broadcast(members[rank], broadcast[rank].data(), 999, 0, &streams[rank], 60'000),
        0);
    ww_nccl_piece send{out[rank].data(), out[rank].size(), peer};
    ww_nccl_piece receive{in[rank].data(), in[rank].size(), peer};
    EXPECT_EQ(ww_nccl_exchange(members[rank], &send, 1, &receive, 1, &streams[rank], 60'000), 0);
    if (rank == 0) {
      EXPECT_EQ(ww_nccl_close(members[rank], 60'000), 0);
      EXPECT_EQ(ww_nccl_state(members[rank]), WW_NCCL_CLOSED);
    } else {
      EXPECT_EQ(ww_nccl_abort(members[rank], nullptr), 0);
      EXPECT_EQ(ww_nccl_state(members[rank]), WW_NCCL_UNFORMED);
    }
    ww_nccl_free(members[rank]);
  };
  std::thread other(life, 1);
  life(0);
  other.join();
  EXPECT_EQ(broadcast[1], broadcast[0]);
  EXPECT_EQ(in[0], out[1]);
  EXPECT_EQ(in[1], out[0]);
}

}  // namespace
}  // namespace weightwire::collective
