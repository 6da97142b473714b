#include "server/plan/plan_bytes.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "server/plan/quantization.h"

namespace weightwire::plan {
namespace {

// The second one, where ranks gather: readers of the first know nothing of that.
constexpr std::string_view kMagic = "wwplan2\n";
constexpr std::string_view kGatheringMagic = "wwplan3\n";
static_assert(kMagic.size() == kGatheringMagic.size());

class Writer {
 public:
  explicit Writer(std::string_view magic) : bytes_(magic) {}
  Writer& Put(uint64_t number) {
    for (; number >= 0x80; number >>= 7) bytes_.push_back(static_cast<char>(number | 0x80));
    bytes_.push_back(static_cast<char>(number));
    return *this;
  }
  Writer& Put(std::string_view text) {
    Put(text.size());
    bytes_.append(text);
    return *this;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

void PutList(Writer& writer, const std::vector<int64_t>& list) {
  writer.Put(list.size());
  for (int64_t value : list) writer.Put(static_cast<uint64_t>(value));
}

void PutOp(Writer& writer, const CopyOp& op) {
  writer.Put(op.canonical).Put(op.source_tensor).Put(op.target_tensor);
  writer.Put(static_cast<uint64_t>(op.source_dtype)).Put(static_cast<uint64_t>(op.target_dtype));
  writer.Put(static_cast<uint64_t>(op.source_offset)).Put(static_cast<uint64_t>(op.target_offset));
  writer.Put(op.extent.size());
  for (size_t d = 0; d < op.extent.size(); ++d) {
    writer.Put(static_cast<uint64_t>(op.extent[d]));
    writer.Put(static_cast<uint64_t>(op.source_stride[d]));
    writer.Put(static_cast<uint64_t>(op.target_stride[d]));
  }
  writer.Put(static_cast<uint64_t>(MakesNumber(op)));
  PutList(writer, op.block);
  PutList(writer, op.source_extent);
}

/// Once something is wrong, every later number is 0 and the first failure stands.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {
    const std::string_view magic = bytes.substr(0, kMagic.size());
    gathers_ = magic == kGatheringMagic;
    if (magic != kMagic && !gathers_) Refuse("does not begin as a plan does");
    at_ = std::min(bytes.size(), kMagic.size());
  }

  uint64_t Get() {
    uint64_t number = 0;
    for (int shift = 0; failed_.ok(); shift += 7) {
      if (at_ == bytes_.size()) {
        Refuse("ends too early");
        break;
      }
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      const uint64_t part = byte & 0x7F;
      if (shift > 63 || (part << shift) >> shift != part) {
        Refuse("holds a number beyond 64 bits");
        break;
      }
      number |= part << shift;
      if (byte < 0x80) return number;
    }
    return 0;
  }
  template <typename Int>
  Int GetAs() {
    const uint64_t number = Get();
    if (number > static_cast<uint64_t>(std::numeric_limits<Int>::max())) {
      Refuse("holds a number that does not fit its field");
      return 0;
    }
    return static_cast<Int>(number);
  }
  std::string GetText() {
    const uint64_t length = Get();
    if (length > bytes_.size() - at_) {
      Refuse("ends too early");
      return {};
    }
    at_ += length;
    return std::string(bytes_.substr(at_ - length, length));
  }
  layout::DType GetDType() {
    const auto dtype = layout::DTypeFromNumber(GetAs<int>());
    if (dtype) return *dtype;
    Refuse("holds an unknown dtype", Reason::kUnknownEnum);
    return layout::DType::kBF16;
  }

  void Refuse(std::string_view what, Reason reason = Reason::kInvalidRequest) {
    if (!failed_.ok()) return;
    failed_ = Status(Code::kInvalidArgument, reason,
                     "the plan file " + std::string(what) + ", at byte " + std::to_string(at_))
                  .Remedy("write it again with wwctl plan --out");
  }
  const Status& failed() const { return failed_; }
  bool AtEnd() const { return at_ == bytes_.size(); }
  bool gathers() const { return gathers_; }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
  bool gathers_ = false;
  Status failed_;
};

std::vector<int64_t> GetList(Reader& reader) {
  std::vector<int64_t> list;
  for (uint64_t left = reader.Get(); left > 0 && reader.failed().ok(); --left) {
    if (list.size() == layout::kMaxDims) reader.Refuse("holds a copy of too many dimensions");
    list.push_back(reader.GetAs<int64_t>());
  }
  return list;
}

CopyOp GetOp(Reader& reader) {
  CopyOp op;
  op.canonical = reader.GetAs<uint32_t>();
  op.source_tensor = reader.GetAs<uint32_t>();
  op.target_tensor = reader.GetAs<uint32_t>();
  op.source_dtype = reader.GetDType();
  op.target_dtype = reader.GetDType();
  op.source_offset = reader.GetAs<int64_t>();
  op.target_offset = reader.GetAs<int64_t>();
  const auto ndim = reader.GetAs<uint32_t>();
  if (ndim > layout::kMaxDims) reader.Refuse("holds a copy of too many dimensions");
  for (uint32_t d = 0; d < ndim && reader.failed().ok(); ++d) {
    op.extent.push_back(reader.GetAs<int64_t>());
    op.source_stride.push_back(reader.GetAs<int64_t>());
    op.target_stride.push_back(reader.GetAs<int64_t>());
    if (op.extent.back() < 1) reader.Refuse("holds an empty copy");
  }
  if (!SetMakes(reader.GetAs<int>(), op)) {
    reader.Refuse("holds a copy that makes what is unknown", Reason::kUnknownEnum);
  }
  op.block = GetList(reader);
  op.source_extent = GetList(reader);
  if (const auto defect = QuantizationDefect(op)) reader.Refuse("holds a copy that " + *defect);
  int64_t bytes = layout::ElementBytes(op.target_dtype);
  for (int64_t extent : op.extent) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      reader.Refuse("holds a copy of more than 2^63 bytes");
      break;
    }
  }
  return op;
}

}  // namespace

std::string ToBytes(const TransferPlan& plan) {
  Writer writer(plan.gathered.empty() ? kMagic : kGatheringMagic);
  writer.Put(plan.id.high).Put(plan.id.low);
  writer.Put(plan.source.high).Put(plan.source.low).Put(plan.target.high).Put(plan.target.low);
  writer.Put(plan.source_ranks).Put(plan.target_ranks);
  writer.Put(static_cast<uint64_t>(plan.bytes_total)).Put(plan.copies_total);
  writer.Put(plan.tensor_names.size());
  for (const std::string& name : plan.tensor_names) writer.Put(std::string_view(name));
  writer.Put(plan.streams.size());
  for (const Stream& stream : plan.streams) {
    writer.Put(stream.source_rank).Put(stream.target_rank);
    writer.Put(static_cast<uint64_t>(stream.bytes)).Put(stream.ops.size());
    for (const CopyOp& op : stream.ops) PutOp(writer, op);
  }
  if (plan.gathered.empty()) return writer.Take();
  writer.Put(plan.gathered.size());
  for (const auto& [rank, gathered] : plan.gathered) {
    writer.Put(rank).Put(static_cast<uint64_t>(gathered.dtype));
    writer.Put(static_cast<uint64_t>(gathered.elements)).Put(gathered.made.size());
    for (const CopyOp& op : gathered.made) PutOp(writer, op);
  }
  return writer.Take();
}

Result<TransferPlan> FromBytes(std::string_view bytes) {
  Reader reader(bytes);
  TransferPlan plan;
  plan.id.high = reader.Get();
  plan.id.low = reader.Get();
  plan.source.high = reader.Get();
  plan.source.low = reader.Get();
  plan.target.high = reader.Get();
  plan.target.low = reader.Get();
  plan.source_ranks = reader.GetAs<uint32_t>();
  plan.target_ranks = reader.GetAs<uint32_t>();
  plan.bytes_total = reader.GetAs<int64_t>();
  plan.copies_total = reader.Get();
  // Counts are the writer's word: nothing is reserved, and a failed reader ends each loop.
  for (uint64_t names = reader.Get(); names > 0 && reader.failed().ok(); --names) {
    plan.tensor_names.push_back(reader.GetText());
  }
  for (uint64_t streams = reader.Get(); streams > 0 && reader.failed().ok(); --streams) {
    Stream stream;
    stream.id = static_cast<uint32_t>(plan.streams.size());
    stream.source_rank = reader.GetAs<uint32_t>();
    stream.target_rank = reader.GetAs<uint32_t>();
    stream.bytes = reader.GetAs<int64_t>();
    for (uint64_t ops = reader.Get(); ops > 0 && reader.failed().ok(); --ops) {
      stream.ops.push_back(GetOp(reader));
    }
    plan.streams.push_back(std::move(stream));
  }
  for (uint64_t ranks = reader.gathers() ? reader.Get() : 0; ranks > 0 && reader.failed().ok();
       --ranks) {
    const auto rank = reader.GetAs<uint32_t>();
    if (!plan.gathered.empty() && rank <= plan.gathered.rbegin()->first) {
      reader.Refuse("holds what ranks gather out of order");
    }
    GatherBuffer& gathered = plan.gathered[rank];
    gathered.dtype = reader.GetDType();
    gathered.elements = reader.GetAs<int64_t>();
    for (uint64_t ops = reader.Get(); ops > 0 && reader.failed().ok(); --ops) {
      gathered.made.push_back(GetOp(reader));
    }
  }
  if (reader.failed().ok() && !reader.AtEnd()) reader.Refuse("goes on after its end");
  WW_FAIL_IF_ERROR(reader.failed());
  return plan;
}

}  // namespace weightwire::plan
