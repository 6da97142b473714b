#include "server/store/etcd/election.h"

#include <string>
#include <utility>

namespace weightwire::store {
namespace {

namespace pb = etcdserverpb;

constexpr Nanos kCallLimit = std::chrono::seconds(1);
constexpr Nanos kRetry = std::chrono::milliseconds(100);

pb::Compare Created(const std::string& key, int64_t revision) {
  pb::Compare compare;
  compare.set_result(pb::Compare::EQUAL);
  compare.set_target(pb::Compare::CREATE);
  compare.set_key(key);
  compare.set_create_revision(revision);
  return compare;
}

Status Ended(std::string what) {
  return Status(Code::kAborted, Reason::kLeaseExpired, std::move(what));
}

}  // namespace

pb::Compare StillLeads(const Term& term) { return Created(term.key, term.revision); }

Election::Election(EtcdClient& client, Options options, Events events)
    : client_(client),
      options_(std::move(options)),
      events_(std::move(events)),
      thread_([this] { Run(); }) {}

Election::~Election() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (lease_ != 0) (void)client_.Revoke(lease_, kCallLimit);  // else it ends by itself
}

void Election::Run() {
  while (true) {
    Result<bool> won = Stand();
    if (!won && won.error().code() != Code::kUnavailable) {
      return events_.refused(std::move(won.error()));
    }
    if (!won) events_.hindered(std::move(won.error()));
    if (won && *won) break;
    // Whoever stands by asks a few times in a lease's time: fast enough for a leader that died.
    if (!Pause(Nanos(options_.ttl) / 10)) return;
  }
  events_.won(term_);
  Hold();
}

/// True: this one leads.
Result<bool> Election::Stand() {
  WW_ASSIGN(const auto leader, Leader());
  // An earlier claim whose answer was lost may have been granted.
  if (leader && lease_ != 0 && leader->lease() == lease_) {
    term_ = {options_.key, leader->create_revision()};
    return true;
  }
  if (leader) {
    if (std::exchange(told_, leader->value()) != leader->value()) events_.stands_by(told_);
    return false;
  }
  return Campaign();
}

Result<std::optional<pb::KeyValue>> Election::Leader() {
  pb::RangeRequest request;
  request.set_key(options_.key);
  WW_ASSIGN(const pb::RangeResponse response, client_.Range(request, kCallLimit));
  if (response.kvs().empty()) return std::optional<pb::KeyValue>();
  return std::optional(response.kvs(0));
}

Result<bool> Election::Campaign() {
  // A lease of an earlier claim may have ended meanwhile; etcd then refuses the claim.
  const Nanos asked = SystemClock().Now();
  WW_ASSIGN(lease_, client_.GrantLease(options_.ttl, kCallLimit));
  valid_until_ = asked + options_.ttl;
  pb::TxnRequest request;
  *request.add_compare() = Created(options_.key, 0);
  pb::PutRequest& put = *request.add_success()->mutable_request_put();
  put.set_key(options_.key);
  put.set_value(options_.name);
  put.set_lease(lease_);
  WW_ASSIGN(const pb::TxnResponse response, client_.Txn(request, kCallLimit));
  if (!response.succeeded()) return false;
  term_ = {options_.key, response.header().revision()};
  return true;
}

void Election::Hold() {
  while (Pause(Nanos(options_.ttl) / 3)) {
    Status renewed = Renew();
    // Stopped (SIGSTOP) or cut off for longer than the lease: another one may lead by now.
    while (renewed.code() == Code::kUnavailable && SystemClock().Now() < valid_until_) {
      if (!Pause(kRetry)) return;
      renewed = Renew();
    }
    if (!renewed.ok()) return events_.lost(std::move(renewed));
  }
}

Status Election::Renew() {
  const Nanos asked = SystemClock().Now();
  WW_ASSIGN_OR_STATUS(const bool held, client_.KeepAlive(lease_, kCallLimit));
  if (!held) return Ended("its lease of " + std::to_string(options_.ttl.count()) + " s ended");
  WW_ASSIGN_OR_STATUS(const auto leader, Leader());
  if (!leader || leader->create_revision() != term_.revision) {
    return Ended("its key " + options_.key + " in etcd was removed or replaced");
  }
  valid_until_ = asked + options_.ttl;
  return OkStatus();
}

bool Election::Pause(Nanos pause) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, pause, [this] { return stopping_; });
}

}  // namespace weightwire::store
