// One thread drives the worker: it runs UCX as long as that has work, polls a little longer, then
// arms UCX's event descriptor and sleeps in epoll. Whatever a task does with the worker may need
// UCX again before the next event, so every task is followed by a drive.
#include "server/transport/ucx/ucx_core.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <future>
#include <utility>

#include "server/base/clock.h"
#include "server/transport/ucx/ucx_setup.h"

namespace weightwire::transport {
namespace {

/// Calls of UCX before other tasks of the loop get their turn.
constexpr int kCallsInTurn = 64;
/// Since UCX last had work: the next piece of a read that is under way mostly comes sooner than a
/// sleeping thread wakes.
constexpr Nanos kPollFor = std::chrono::microseconds(50);

}  // namespace

UcxCore::UcxCore(UcxOptions the_options)
    : options(std::move(the_options)),
      loop("ww-ucx"),
      exports([this](Task task) { Post(std::move(task)); }) {
  std::promise<void> opened;
  loop.Post([this, &opened] {
    OpenWorker();
    opened.set_value();
  });
  opened.get_future().wait();
}

void UcxCore::OpenWorker() {
  auto setup = SetUpUcx(options);
  if (!setup.has_value()) {
    viable_ = setup.error();
    return;
  }
  worker_ = std::move(setup->worker);
  choices_ = std::move(setup->choices);
  gpu_direct_ = setup->gpu_direct;
  event_.emplace(loop.context(), worker_->event_fd());
}

void UcxCore::Post(Task task) {
  loop.Post([this, task = std::move(task)]() mutable {
    task();
    task = nullptr;
    Kick();
  });
}

void UcxCore::Kick() {
  if (worker_ == nullptr || std::exchange(driving_, true)) return;
  boost::asio::post(loop.context(), [this] {
    driving_ = false;
    Drive();
  });
}

void UcxCore::Drive() {
  if (worker_ == nullptr) return;
  for (int i = 0; i < kCallsInTurn; ++i) {
    if (worker_->Progress(*this)) {
      worked_ = SystemClock().Now();
    } else if (SystemClock().Now() - worked_ >= kPollFor && worker_->Arm()) {
      return Await();
    }
  }
  Kick();
}

void UcxCore::Await() {
  if (std::exchange(waiting_, true)) return;
  event_->async_wait(boost::asio::posix::stream_descriptor::wait_read,
                     [this](const boost::system::error_code& cancelled) {
                       waiting_ = false;
                       if (!cancelled) Drive();
                     });
}

void UcxCore::CountClose(const char* cause) {
  options.metrics->Add("transport_closes_total", 1, {{"transport", name}, {"cause", cause}});
}

void UcxCore::CountFull() {
  options.metrics->Add("accept_errors_total", 1, {{"errno", "handshakes_full"}});
}

void UcxCore::ShowSessions(size_t count) {
  options.metrics->Set("connections", static_cast<double>(count),
                       {{"transport", name}, {"state", "open"}});
}

void UcxCore::SessionProved(const std::string& lanes, double bytes_per_second) {
  CountSelfTest("passed");
  const metrics::Labels labels = {{"lanes", lanes}};
  options.metrics->Set("ucx_sessions", static_cast<double>(++proved_[lanes]), labels);
  options.metrics->Set("ucx_self_test_bytes_per_second", bytes_per_second, labels);
}

void UcxCore::SessionLeft(const std::string& lanes) {
  options.metrics->Set("ucx_sessions", static_cast<double>(--proved_[lanes]), {{"lanes", lanes}});
}

void UcxCore::CountSelfTest(const char* result) {
  options.metrics->Add("ucx_self_tests_total", 1, {{"result", result}});
}

void UcxCore::Bind(uint64_t id, std::shared_ptr<UcxConnection> connection) {
  connections_[id] = std::move(connection);
  std::lock_guard lock(mutex_);
  count_ = connections_.size();
}

void UcxCore::ShutAll() {
  for (const auto& [id, connection] : std::map(connections_)) connection->Shut();
}

void UcxCore::ForgetDeadRegions() {
  if (worker_ == nullptr) return;
  for (uint64_t region : registry_.ReleaseDead(*worker_)) {
    for (const auto& [id, connection] : connections_) connection->OnRegionGone(region);
  }
}

std::shared_ptr<UcxConnection> UcxCore::Find(uint64_t id) const {
  auto connection = connections_.find(id);
  return connection == connections_.end() ? nullptr : connection->second;
}

void UcxCore::OnMessage(uint64_t connection, std::span<const std::byte> message) {
  if (auto found = Find(connection)) found->OnMessage(message);
}

void UcxCore::OnSent(uint64_t connection) {
  if (auto found = Find(connection)) found->OnSent();
}

void UcxCore::OnRead(uint64_t connection, uint64_t cookie, const std::string& failure) {
  if (auto found = Find(connection)) found->OnRead(cookie, failure);
}

void UcxCore::OnBroken(uint64_t connection, const std::string& why) {
  if (auto found = Find(connection)) found->OnBroken(why);
}

void UcxCore::OnClosed(uint64_t connection) {
  auto found = Find(connection);
  connections_.erase(connection);
  if (found != nullptr) found->OnClosed();
  std::lock_guard lock(mutex_);
  count_ = connections_.size();
  none_left_.notify_all();
}

void UcxCore::WaitUntilNoneIsLeft() {
  std::unique_lock lock(mutex_);
  none_left_.wait(lock, [this] { return count_ == 0; });
}

void UcxCore::Stop() {
  std::promise<void> stopped;
  loop.Post([this, &stopped] {
    if (worker_ != nullptr) {
      registry_.ReleaseAll(*worker_);
      event_->release();  // UCX's own descriptor
      event_.reset();
      worker_.reset();
    }
    stopped.set_value();
  });
  stopped.get_future().wait();
  loop.Stop();
}

}  // namespace weightwire::transport
