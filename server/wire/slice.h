#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

#include "server/plan/plan.h"
#include "weightwire/v1/types.pb.h"

namespace weightwire::wire {

v1::PlanId ToProto(const PlanId& id);
PlanId FromProto(const v1::PlanId& id);
Result<plan::Side> FromProto(std::string_view field, v1::Side side);

/// Cuts a slice into parts of at most `part_bytes_max` serialised bytes (≥ 4096), one at a time, so
/// that a large slice never exists twice. There is always a first part (it carries the header).
class SliceWriter {
 public:
  /// `names_shared`: the reader understands SlicePart.names_shared.
  SliceWriter(std::shared_ptr<const plan::RankSlice> slice, size_t part_bytes_max,
              bool names_shared);
  /// False when everything has been given; `part` is then untouched.
  bool Next(v1::SlicePart* part);

 private:
  bool done() const;
  void AddNames(v1::SlicePart* part, size_t* bytes);
  void AddOps(v1::SlicePart* part, size_t* bytes);
  void AddMade(v1::SlicePart* part, size_t* bytes);

  std::shared_ptr<const plan::RankSlice> slice_;
  size_t part_bytes_max_;
  bool names_shared_;
  bool started_ = false;
  size_t name_ = 0;
  size_t stream_ = 0;
  size_t op_ = 0;
  size_t made_ = 0;
};

/// Puts a slice together again. A failed Add ends it: every later call fails too.
///
/// Checked: header first and once, counts as announced, stream ids rising, ops in order and
/// complete, bytes equal to the ops' sum, what is made behind the last stream and of matrices,
/// extents and strides ≥ 1, offsets ≥ 0, every reach within int64, names and limits. Nothing is
/// reserved on the word of the sender.
///   kInvalidArgument / kInvalidRequest | kUnknownEnum | kMessageTooLarge
class SliceReader {
 public:
  Status Add(const v1::SlicePart& part);
  /// After the last part.
  Result<plan::RankSlice> Finish();

 private:
  Status AddChecked(const v1::SlicePart& part);
  Status AddHeader(const v1::SlicePart::Header& header);
  Status AddNames(const v1::SlicePart& part);
  Status AddStream(const v1::SlicePart::Stream& stream);
  Status EndStream() const;
  Status AddMade(const v1::CopyOp& op);

  Status failed_;
  std::optional<v1::SlicePart::Header> header_;
  plan::RankSlice slice_;
  uint64_t ops_announced_ = 0;  ///< of the last stream
  int64_t bytes_seen_ = 0;      ///< of the last stream
  size_t ops_total_ = 0;
  size_t name_bytes_ = 0;
};

}  // namespace weightwire::wire
