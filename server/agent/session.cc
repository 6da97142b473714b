#include "server/agent/session.h"

#include <algorithm>
#include <utility>

namespace weightwire::agent {
namespace {

constexpr uint32_t kDoublingsMax = 2;  // a pause's bound grows to four times the first one

/// Evenly in (0, bound]. Agents differ by their incarnations, which are random; one that is given
/// makes a run repeatable.
Nanos RandomPause(Nanos bound, Incarnation self, uint64_t number) {
  uint64_t x = self.value + number * 0x9e3779b97f4a7c15;  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return Nanos(1 + static_cast<int64_t>(x % static_cast<uint64_t>(bound.count())));
}

Status NoSession(const Status& why) {
  return Status(Code::kUnavailable, Reason::kNotReady,
                "no session with the coordinator: " +
                    (why.ok() ? std::string("not opened yet") : why.ToString()))
      .Remedy("the agent goes on trying; call again");
}

}  // namespace

Session::Session(control::AgentHello hello, Nanos reconnect, Executor& strand,
                 control::CoordinatorPort& coordinator, control::AgentPort* port,
                 std::function<void()> opened, std::function<control::Beat()> beat)
    : hello_(std::move(hello)),
      reconnect_(reconnect),
      strand_(strand),
      coordinator_(coordinator),
      port_(port),
      opened_(std::move(opened)),
      beat_(std::move(beat)),
      status_(NoSession(OkStatus())) {}

Session::~Session() { Close(); }

void Session::Start() { Open(); }

void Session::Open() {
  const uint64_t number = ++number_;
  coordinator_.OpenSession(hello_, port_,
                           [weak = std::weak_ptr(self_), number,
                            &coordinator = coordinator_](Result<control::AgentWelcome> welcome) {
                             auto self = weak.lock();
                             if (self && (*self)->number_ == number) {
                               (*self)->Opened(std::move(welcome));
                             } else if (welcome && (!self || (*self)->closed_)) {
                               coordinator.CloseSession(welcome->agent);  // it came after Close
                             }
                           });
}

void Session::Opened(Result<control::AgentWelcome> welcome) {
  if (!welcome) {
    status_ = NoSession(welcome.error());
    OpenAfterPause();
    return;
  }
  failures_ = 0;
  welcome_ = *welcome;
  status_ = OkStatus();
  Beat();
  opened_();
}

void Session::Beat() {
  coordinator_.Heartbeat(welcome_.agent, beat_());
  // Timers run late, never early: a quarter of the interval is left for that.
  timer_ = strand_.PostAfter(welcome_.heartbeat * 3 / 4,
                             [weak = std::weak_ptr(self_), number = number_] {
                               auto self = weak.lock();
                               if (self && (*self)->number_ == number) (*self)->Beat();
                             });
}

void Session::Lost(const Status& why) {
  if (closed_) return;
  ++number_;  // heartbeats and replies of the lost session end here
  strand_.Cancel(timer_);
  status_ = NoSession(why);
  OpenAfterPause();
}

void Session::OpenAfterPause() {
  const Nanos bound = reconnect_ * (int64_t{1} << std::min(failures_, kDoublingsMax));
  const Nanos pause = RandomPause(bound, hello_.incarnation, number_);
  ++failures_;
  timer_ = strand_.PostAfter(pause, [weak = std::weak_ptr(self_), number = number_] {
    auto self = weak.lock();
    if (self && (*self)->number_ == number) (*self)->Open();
  });
}

void Session::Close() {
  if (closed_) return;
  closed_ = true;
  strand_.Cancel(timer_);
  if (status_.ok()) coordinator_.CloseSession(welcome_.agent);
  ++number_;
  status_ = Status(Code::kUnavailable, Reason::kShuttingDown, "the agent is shutting down");
}

}  // namespace weightwire::agent
