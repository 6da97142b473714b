#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "client/cpp/attachment.h"
#include "client/cpp/weightwire.h"

// One keeper thread owns the attachment: it opens it again, with growing pauses, whenever it has
// ended, and destroys the old one, so that the reader thread never joins itself.
namespace weightwire::client {
namespace {

constexpr Nanos kPauseFirst = std::chrono::milliseconds(100);
constexpr Nanos kPauseMax = std::chrono::seconds(5);

/// The mapped buffers of one attachment.
struct Stage {
  std::vector<std::shared_ptr<memory::MemoryRegion>> buffers;
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> sizes;
};

class SubscriberImpl final : public Subscriber {
 public:
  explicit SubscriberImpl(Place place) : place_(std::move(place)) {}

  Status Start() {
    WW_RETURN_IF_ERROR(AttachOnce());
    keeper_ = std::thread([this] { Keep(); });
    return OkStatus();
  }

  ~SubscriberImpl() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    if (keeper_.joinable()) keeper_.join();
    attachment_.reset();
  }

  Status Bind(Layout layout) override {
    std::lock_guard attach_lock(attach_mutex_);
    layout_ = std::move(layout);
    return MapStage();
  }

  std::optional<Offer> WaitOffer(Nanos timeout) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [this] { return !offers_.empty() || closing_; });
    if (offers_.empty()) return std::nullopt;
    Offer offer = offers_.front();
    offers_.pop_front();
    return offer;
  }

  Result<std::vector<std::span<const std::byte>>> Flip(const Offer& offer) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, place_.call_timeout,
                      [&] { return stage_ != nullptr || offer.generation != generation_; });
    if (offer.generation != generation_ || stage_ == nullptr || offer.buffer < 0 ||
        static_cast<size_t>(offer.buffer) >= stage_->buffers.size()) {
      return Fail(Status(Code::kAborted, Reason::kStaleIncarnation,
                         "the offer belongs to an incarnation that was fenced")
                      .AtEpoch(offer.epoch));
    }
    const std::byte* base = stage_->buffers[static_cast<size_t>(offer.buffer)]->data();
    std::vector<std::span<const std::byte>> tensors;
    for (size_t i = 0; i < stage_->offsets.size(); ++i) {
      tensors.emplace_back(base + stage_->offsets[i], stage_->sizes[i]);
    }
    serving_ = offer;
    served_stage_ = stage_;
    return tensors;
  }

  Status Acknowledge(const Offer& offer, Nanos flip_time) override {
    std::lock_guard attach_lock(attach_mutex_);
    if (attachment_ == nullptr) return LastFence();
    return attachment_->Acknowledge(offer.epoch, std::chrono::duration<double>(flip_time).count());
  }

  Status Refuse(const Offer& offer, const std::string& why) override {
    std::lock_guard attach_lock(attach_mutex_);
    if (attachment_ == nullptr) return LastFence();
    return attachment_->Refuse(offer.epoch, why);
  }

  std::optional<Offer> Serving() const override {
    std::lock_guard lock(mutex_);
    return serving_;
  }

  Status LastFence() const override {
    std::lock_guard lock(mutex_);
    return last_fence_;
  }

 private:
  /// Needs attach_mutex_, or the only thread.
  Status AttachOnce() {
    uint64_t generation = 0;
    {
      std::lock_guard lock(mutex_);
      generation = ++generation_;
      ended_ = false;
    }
    WW_ASSIGN_OR_STATUS(attachment_,
                        Attachment::Open(place_, v1::GROUP_ROLE_ENGINE,
                                         {[this, generation](const v1::AttachEvent& event) {
                                            OnEvent(event, generation);
                                          },
                                          [this](Status why) { OnEnd(std::move(why)); }}));
    return OkStatus();
  }

  /// Needs attach_mutex_.
  Status MapStage() {
    if (attachment_ == nullptr) return LastFence();
    WW_ASSIGN_OR_STATUS(const layout::RankLayout agreed, attachment_->SubmitLayout(*layout_));
    WW_ASSIGN_OR_STATUS(const v1::SubscribeResponse response, attachment_->Subscribe());
    auto stage = std::make_shared<Stage>();
    stage->offsets.assign(response.offsets().begin(), response.offsets().end());
    stage->sizes.assign(response.sizes().begin(), response.sizes().end());
    if (response.fd_tokens_size() < 2 || stage->offsets.size() != agreed.tensors.size() ||
        stage->sizes.size() != agreed.tensors.size()) {
      return {Code::kInternal, Reason::kInternal, "the agent's stage does not fit the layout"};
    }
    for (size_t i = 0; i < stage->offsets.size(); ++i) {
      if (stage->offsets[i] > response.bytes_total() ||
          stage->sizes[i] > response.bytes_total() - stage->offsets[i]) {
        return {Code::kInternal, Reason::kInternal, "the agent's stage map leaves its buffer"};
      }
    }
    for (const uint64_t token : response.fd_tokens()) {
      WW_ASSIGN_OR_STATUS(memory::UniqueFd fd, attachment_->Redeem(token));
      WW_ASSIGN_OR_STATUS(auto buffer,
                          memory::MemoryRegion::Import(std::move(fd), response.bytes_total(),
                                                       memory::Access::kReadOnly));
      stage->buffers.push_back(std::move(buffer));
    }
    std::lock_guard lock(mutex_);
    stage_ = std::move(stage);
    changed_.notify_all();
    return OkStatus();
  }

  void OnEvent(const v1::AttachEvent& event, uint64_t generation) {
    if (!event.has_swap_offer()) return;
    const auto& offer = event.swap_offer();
    std::lock_guard lock(mutex_);
    offers_.push_back({Epoch(offer.epoch()), Epoch(offer.content()), Version(offer.version()),
                       static_cast<int>(offer.buffer()), offer.leader(), generation,
                       offer.lineage()});
    changed_.notify_all();
  }

  void OnEnd(Status why) {
    std::lock_guard lock(mutex_);
    serving_.reset();
    stage_.reset();
    offers_.clear();
    last_fence_ = std::move(why);
    ++generation_;  // offers of this attachment are void
    ended_ = true;
    changed_.notify_all();
  }

  void Keep() {
    Nanos pause = kPauseFirst;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || closing_; });
      changed_.wait_for(lock, pause, [this] { return closing_; });
      if (closing_) return;
      lock.unlock();
      const Status back = Reattach();
      lock.lock();
      pause = back.ok() ? kPauseFirst : std::min<Nanos>(2 * pause, kPauseMax);
      if (!back.ok()) {
        last_fence_ = back;
        ended_ = true;
      }
    }
  }

  Status Reattach() {
    std::lock_guard attach_lock(attach_mutex_);
    attachment_.reset();
    WW_RETURN_IF_ERROR(AttachOnce());
    return layout_.has_value() ? MapStage() : OkStatus();
  }

  const Place place_;
  /// Held while the attachment is used or exchanged; taken before mutex_.
  std::mutex attach_mutex_;
  std::optional<Layout> layout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t generation_ = 0;
  bool ended_ = false;
  bool closing_ = false;
  std::deque<Offer> offers_;
  std::optional<Offer> serving_;
  std::shared_ptr<Stage> stage_;
  std::shared_ptr<Stage> served_stage_;  ///< keeps the spans that Flip gave valid
  Status last_fence_;
  std::unique_ptr<Attachment> attachment_;
  std::thread keeper_;
};

}  // namespace

Result<std::unique_ptr<Subscriber>> Subscriber::Open(Place place) {
  auto subscriber = std::make_unique<SubscriberImpl>(std::move(place));
  WW_FAIL_IF_ERROR(subscriber->Start());
  return subscriber;
}

}  // namespace weightwire::client
