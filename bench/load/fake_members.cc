#include "bench/load/fake_members.h"

#include <string>
#include <utility>

#include "server/base/clock.h"
#include "server/base/strand_call.h"

namespace weightwire::load {
namespace {

constexpr size_t kOpening = 64;  // agents that register at a time

double SecondsSince(Nanos start) {
  return std::chrono::duration<double>(SystemClock().Now() - start).count();
}

}  // namespace

FakeMembers::FakeMembers(const Connect& connect, ThreadExecutor& strand, uint32_t engines,
                         uint32_t ranks)
    : strand_(strand) {
  for (uint32_t i = 0; i <= engines; ++i) {
    const bool trainer = i == 0;
    fleet_.push_back(std::make_unique<FakeMember>(
        connect(), strand, trainer ? control::GroupRole::kTrainer : control::GroupRole::kEngine,
        trainer ? "trainer" : "engine-" + std::to_string(i), ranks, i + 1));
  }
}

FakeMembers::~FakeMembers() {
  OnStrand(strand_, [this] { fleet_.clear(); });
}

double FakeMembers::Open() {
  const Nanos start = SystemClock().Now();
  const auto ready = std::make_shared<std::promise<void>>();
  strand_.Post([this, ready] {
    for (size_t i = 0; i < kOpening; ++i) OpenNext(ready);
  });
  ready->get_future().get();
  return SecondsSince(start);
}

void FakeMembers::OpenNext(const std::shared_ptr<std::promise<void>>& ready) {
  if (opening_ == fleet_.size()) return;
  fleet_[opening_++]->Open([this, ready] {
    if (++open_ == fleet_.size()) return ready->set_value();
    OpenNext(ready);
  });
}

Result<double> FakeMembers::Publish() {
  std::promise<Status> released;
  const Nanos start = SystemClock().Now();
  strand_.Post([&, version = Version{++version_}] {
    fleet_[0]->Publish(version, [&](Status why) { released.set_value(std::move(why)); });
  });
  if (Status why = released.get_future().get(); !why.ok()) return Fail(std::move(why));
  return SecondsSince(start);
}

void FakeMembers::CountBytes() {
  OnStrand(strand_, [this] {
    for (const auto& each : fleet_) each->CountBytes(bytes_);
  });
}

}  // namespace weightwire::load
