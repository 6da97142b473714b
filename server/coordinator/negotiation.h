#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/command_queue.h"
#include "server/coordinator/membership.h"
#include "server/coordinator/scheme_cache.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// Agrees with every rank on what it holds, and with the ranks of a group on what the group holds.
///
/// A scheme's layout is computed once for the group and compared with what the rank's process
/// reports; explicit boxes are validated. All of that runs on the workers. When every rank has
/// agreed, the group's layout and its fingerprint are put together, on the workers too, and
/// `Group::agreed` is set. A rank's layout is fixed until the rank registers anew. Strand only.
class Negotiation {
 public:
  Negotiation(Executor& strand, Executor& workers, std::shared_ptr<const Work> work,
              Membership& membership, CommandQueue& commands, Membership::Observer& observer,
              metrics::Sink& metrics)
      : strand_(strand),
        workers_(workers),
        work_(std::move(work)),
        membership_(membership),
        commands_(commands),
        observer_(observer),
        metrics_(metrics),
        schemes_(strand, workers, work_) {}

  /// Errors: CoordinatorPort::SubmitLayout's.
  void Submit(control::LayoutSubmission submission, control::Reply<control::LayoutReply> reply);

 private:
  using Submission = std::shared_ptr<const control::LayoutSubmission>;
  using LayoutReplier = control::Reply<control::LayoutReply>;

  Status CheckSubmission(const control::LayoutSubmission& submission) const;
  /// With `schemes` for the first models of the submission (or for its only one), gets the next.
  void GetSchemes(const Submission& submission, const LayoutReplier& reply,
                  std::vector<SchemeLayout> schemes);
  void Compute(const Submission& submission, std::vector<SchemeLayout> schemes,
               const LayoutReplier& reply);
  void Offered(const Submission& submission, const LayoutReplier& reply, Result<RankOffer> offer);
  Status Agree(const control::LayoutSubmission& submission, const RankOffer& offer);
  /// No other rank of the group is at one of these places.
  static Status CheckPlaces(const Group& group, uint32_t rank,
                            const std::vector<PlaceInModel>& places);
  void Refuse(const control::LayoutSubmission& submission, const LayoutReplier& reply, Status why);
  void AssembleWhenComplete(Group& group);
  void Assembled(const std::string& name, uint64_t generation,
                 const std::vector<epoch::Member>& members, AgreedLayoutPtr agreed);

  Executor& strand_;
  Executor& workers_;
  const std::shared_ptr<const Work> work_;
  Membership& membership_;
  CommandQueue& commands_;
  Membership::Observer& observer_;
  metrics::Sink& metrics_;
  SchemeCache schemes_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
