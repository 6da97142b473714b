#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "client/cpp/attachment.h"
#include "client/cpp/weightwire.h"
#include "server/wire/checks.h"
#include "server/wire/status.h"

namespace weightwire::client {
namespace {

class PublisherImpl final : public Publisher {
 public:
  static Result<std::unique_ptr<Publisher>> Open(Place place) {
    auto publisher = std::make_unique<PublisherImpl>(place);
    PublisherImpl* self = publisher.get();
    WW_ASSIGN(self->attachment_,
              Attachment::Open(place, v1::GROUP_ROLE_TRAINER,
                               {[self](const v1::AttachEvent& event) { self->OnEvent(event); },
                                [self](Status why) { self->OnEnd(std::move(why)); }}));
    return publisher;
  }

  explicit PublisherImpl(const Place& place)
      : name_(place.group + "-" + std::to_string(place.rank)) {}
  ~PublisherImpl() override { attachment_.reset(); }

  Status Bind(Layout layout) override {
    WW_ASSIGN_OR_STATUS(const layout::RankLayout agreed, attachment_->SubmitLayout(layout));
    WW_ASSIGN_OR_STATUS(SharedArena arena, SharedArena::Make("weightwire-" + name_, agreed));
    WW_RETURN_IF_ERROR(
        attachment_->Import(arena.region().fd(), arena.region().size(), arena.map().offsets));
    arena_ = std::make_unique<SharedArena>(std::move(arena));
    return OkStatus();
  }

  const SharedArena& arena() const override {
    WW_CHECK(arena_ != nullptr);
    return *arena_;
  }

  Status BindMemory(Layout layout, int fd, uint64_t bytes,
                    const std::vector<uint64_t>& offsets) override {
    WW_ASSIGN_OR_STATUS(const layout::RankLayout agreed, attachment_->SubmitLayout(layout));
    if (agreed.tensors.size() != offsets.size()) {
      return Status(Code::kInvalidArgument, Reason::kTensorMissing,
                    std::to_string(offsets.size()) + " offsets for " +
                        std::to_string(agreed.tensors.size()) + " tensors");
    }
    return attachment_->Import(fd, bytes, offsets);
  }

  Status Publish(Version version, const PublishOptions& options) override {
    {
      std::lock_guard lock(mutex_);
      Release& release = releases_[version];
      if (release.revoked) release = {};
    }
    Status accepted = attachment_->Publish(version, options);
    if (accepted.code() == Code::kDeadlineExceeded || accepted.code() == Code::kUnavailable) {
      accepted = TakeBack(version, std::move(accepted));
    }
    std::lock_guard lock(mutex_);
    auto release = releases_.find(version);
    if (release == releases_.end()) return accepted;
    release->second.accepted |= accepted.ok();
    // The refusal of a repeat says nothing of what is held.
    if (!release->second.accepted && !release->second.done) releases_.erase(release);
    return accepted;
  }

  Result<Withdrawal> Withdraw(Version version) override {
    WW_ASSIGN(const v1::Withdrawal found, attachment_->Withdraw(version, /*if_accepted=*/true));
    if (found == v1::WITHDRAWAL_READ) return Withdrawal::kRead;
    if (found == v1::WITHDRAWAL_RELEASED) return Withdrawal::kReleased;
    if (found != v1::WITHDRAWAL_REVOKED) return Fail(wire::UnknownEnum("withdrawal", found));
    std::lock_guard lock(mutex_);
    if (auto release = releases_.find(version); release != releases_.end()) {
      release->second.done = release->second.revoked = true;
      release->second.why =
          Status(Code::kAborted, Reason::kAbortRequested,
                 "version " + std::to_string(version.value) + " was withdrawn by its publisher");
      changed_.notify_all();
    }
    return Withdrawal::kRevoked;
  }

  Result<Epoch> WaitReleased(Version version, Nanos timeout) override {
    std::unique_lock lock(mutex_);
    if (!releases_.contains(version)) {
      return Fail(Code::kNotFound, Reason::kNotRegistered,
                  "version " + std::to_string(version.value) + " is not waiting for its release");
    }
    if (!changed_.wait_for(lock, timeout, [&] { return releases_.at(version).done; })) {
      return Fail(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                         "version " + std::to_string(version.value) + " is not released yet")
                      .Remedy("`wwctl status` says what everyone waits for"));
    }
    const Release release = releases_.at(version);
    releases_.erase(version);
    if (!release.why.ok()) return Fail(release.why);
    return release.epoch;
  }

 private:
  /// What became of a version whose Publish was not answered, for `why`.
  Status TakeBack(Version version, Status why) {
    const auto found = attachment_->Withdraw(version, /*if_accepted=*/false);
    if (!found) {
      return std::move(why).Remedy("nor did the agent confirm that it withdrew the version (" +
                                   found.error().message() +
                                   "): the memory must not change until Withdraw has returned");
    }
    if (*found != v1::WITHDRAWAL_REVOKED) return OkStatus();
    return std::move(why).Remedy("it was withdrawn: nobody will serve it; publish it again");
  }

  struct Release {
    bool accepted = false;
    bool done = false;
    Epoch epoch{};
    Status why;
    bool revoked = false;
  };

  void OnEvent(const v1::AttachEvent& event) {
    if (!event.has_released()) return;
    std::lock_guard lock(mutex_);
    auto release = releases_.find(Version(event.released().version()));
    if (release == releases_.end()) return;
    release->second.done = true;
    release->second.epoch = Epoch(event.released().epoch());
    release->second.why = wire::FromProto("why", event.released().why())
                              .value_or(Status(Code::kUnknown, Reason::kUnknownEnum,
                                               "released for an unknown reason"));
    changed_.notify_all();
  }

  void OnEnd(Status why) {
    std::lock_guard lock(mutex_);
    for (auto& [version, release] : releases_) {
      if (std::exchange(release.done, true)) continue;
      release.epoch = {};
      release.why = why;
    }
    changed_.notify_all();
  }

  const std::string name_;
  std::unique_ptr<SharedArena> arena_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Version, Release> releases_;
  std::unique_ptr<Attachment> attachment_;  // last: its reader thread uses what is above
};

}  // namespace

Result<std::unique_ptr<Publisher>> Publisher::Open(Place place) {
  return PublisherImpl::Open(std::move(place));
}

}  // namespace weightwire::client
