// kernels_bench [--mib N] [--rounds N] [--only TEXT] [--json FILE]: what the copies, casts, sums,
// quantizations and deltas cost on one thread beside memcpy. --only: the cases with TEXT in their
// names.
//
// Buffers are allocated and touched once. Every round runs every case, so that other load on the
// machine meets them alike; a ratio compares with the memcpy of the same round, and the median over
// the rounds is shown. `bytes` are the bytes that the case reads once from its source box; ratios
// are per such byte. Before the rounds each case is checked once against the reference.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/kernels/delta_case.h"
#include "bench/kernels/quantize_case.h"
#include "kernels/kernels.h"
#include "kernels/keyed_sum.h"

namespace weightwire::kernels {
namespace {

struct Options {
  int64_t mib = 256;
  int rounds = 15;
  std::string only;
  std::string json;
};

struct Buffers {
  std::vector<unsigned char> source;
  std::vector<unsigned char> target;
  std::vector<unsigned char> expected;
};

enum class Work {
  kMemcpy,
  kSum,
  kCopy,
  kCopyAndSum,
  kCopyAndSumBoth,
  kKeyedSum,
  kQuantize,
  kFourBit,
  kDeltaEncode,
  kDeltaEncodeAndCopy,
  kDeltaEncodeCopyAndSum,
  kDeltaApply,
  kDeltaApplyTo
};

struct Case {
  std::string name;
  Work work = Work::kCopy;
  StridedBox box;
  Element from = Element::kBF16;
  Element to = Element::kBF16;
  /// Of a matrix to quantize; no columns: all of a row.
  int64_t block_rows = 0;
  int64_t block_columns = 0;
  ScaleKind scale = ScaleKind::kF32;
  FourBitKind four_bit = FourBitKind::kMxFp4;
  std::shared_ptr<DeltaCase> delta = nullptr;
};

struct Row {
  std::string name;
  int64_t bytes = 0;
  std::vector<double> seconds;
  double ratio = 0;
};

int64_t SourceBytes(const Case& c) {
  int64_t bytes = ElementBytes(c.from);
  for (int d = 0; d < c.box.ndim; ++d) bytes *= c.box.extent[d];
  return bytes;
}

StridedBox Flat(int64_t elements) { return {1, {elements}, {1}, {1}}; }

StridedBox Plane(int64_t rows, int64_t columns, int64_t source_row, int64_t source_column) {
  return {2, {rows, columns}, {source_row, source_column}, {columns, 1}};
}

// Half the columns of a bf16 matrix of 896 columns: what tensor parallelism 2 → 1 reads.
constexpr int64_t kColumns = 896;
constexpr int64_t kRowsOfTranspose = 4096;
// DeepSeek-V3's hidden size.
constexpr int64_t kWeightColumns = 7168;

std::vector<Case> Cases(int64_t bytes) {
  constexpr Element kBF16 = Element::kBF16;
  const int64_t halves = bytes / 2;
  const StridedBox columns = Plane(halves / kColumns, kColumns / 2, kColumns, 1);
  const StridedBox transposed =
      Plane(kRowsOfTranspose, halves / kRowsOfTranspose, 1, kRowsOfTranspose);
  const StridedBox weights = Plane(halves / kWeightColumns, kWeightColumns, kWeightColumns, 1);
  const StridedBox floats = Plane(halves / 2 / kWeightColumns, kWeightColumns, kWeightColumns, 1);
  const StridedBox pairs = Plane(halves / 4, 2, 4, 1);
  return {
      {"memcpy", Work::kMemcpy, Flat(halves), kBF16, kBF16},
      {"sum contiguous", Work::kSum, Flat(halves), kBF16, kBF16},
      {"copy contiguous", Work::kCopy, Flat(halves), kBF16, kBF16},
      {"copy+sum contiguous", Work::kCopyAndSum, Flat(halves), kBF16, kBF16},
      {"copy+both sums contiguous", Work::kCopyAndSumBoth, Flat(halves), kBF16, kBF16},
      {"copy column halves (896 B of 1792 B)", Work::kCopy, columns, kBF16, kBF16},
      {"sum column halves", Work::kSum, columns, kBF16, kBF16},
      {"copy+sum column halves", Work::kCopyAndSum, columns, kBF16, kBF16},
      {"cast f32 to bf16", Work::kCopy, Flat(bytes / 4), Element::kF32, kBF16},
      {"cast+sum f32 to bf16", Work::kCopyAndSum, Flat(bytes / 4), Element::kF32, kBF16},
      {"cast bf16 to f16", Work::kCopy, Flat(halves), kBF16, Element::kF16},
      {"copy transposed bf16", Work::kCopy, transposed, kBF16, kBF16},
      {"copy+sum transposed bf16", Work::kCopyAndSum, transposed, kBF16, kBF16},
      {"copy runs of 4 B", Work::kCopy, pairs, kBF16, kBF16},
      {"sum runs of 4 B", Work::kSum, pairs, kBF16, kBF16},
      {"content sum contiguous", Work::kKeyedSum, Flat(halves), kBF16, kBF16},
      {"content sum column halves", Work::kKeyedSum, columns, kBF16, kBF16},
      {"content sum transposed bf16", Work::kKeyedSum, transposed, kBF16, kBF16},
      {"content sum cast f32 to bf16", Work::kKeyedSum, Flat(bytes / 4), Element::kF32, kBF16},
      {"quantize bf16, 128 x 128", Work::kQuantize, weights, kBF16, kBF16, 128, 128},
      {"quantize bf16, 128 x 128 ue8m0", Work::kQuantize, weights, kBF16, kBF16, 128, 128,
       ScaleKind::kPowerOfTwo},
      {"quantize bf16, per channel", Work::kQuantize, weights, kBF16, kBF16, 1},
      {"quantize bf16, mxfp8", Work::kQuantize, weights, kBF16, kBF16, 1, 32, ScaleKind::kE8M0},
      {"quantize bf16, mxfp4",
       Work::kFourBit,
       weights,
       kBF16,
       kBF16,
       1,
       32,
       {},
       FourBitKind::kMxFp4},
      {"quantize bf16, nvfp4",
       Work::kFourBit,
       weights,
       kBF16,
       kBF16,
       1,
       16,
       {},
       FourBitKind::kNvFp4},
      {"quantize bf16, nvfp4 modelopt",
       Work::kFourBit,
       weights,
       kBF16,
       kBF16,
       1,
       16,
       {},
       FourBitKind::kNvFp4Modelopt},
      {"quantize bf16, int4",
       Work::kFourBit,
       weights,
       kBF16,
       kBF16,
       1,
       128,
       {},
       FourBitKind::kInt4},
      {"quantize f16, 128 x 128", Work::kQuantize, weights, Element::kF16, Element::kF16, 128, 128},
      {"quantize f32, 128 x 128", Work::kQuantize, floats, Element::kF32, Element::kF32, 128, 128},
  };
}

void AddDeltas(std::vector<Case>& cases, const std::vector<unsigned char>& source,
               const std::string& only) {
  for (const double share : {0.001, 0.01, 0.03, 0.1}) {
    char percent[32];
    std::snprintf(percent, sizeof percent, ", %g %%", 100 * share);
    std::shared_ptr<DeltaCase> delta;
    for (const auto& [name, work] : {std::pair("delta encode", Work::kDeltaEncode),
                                     {"delta encode+copy", Work::kDeltaEncodeAndCopy},
                                     {"delta encode+copy+sum", Work::kDeltaEncodeCopyAndSum},
                                     {"delta apply", Work::kDeltaApply},
                                     {"delta apply+copy+sum", Work::kDeltaApplyTo}}) {
      const std::string full = name + std::string(percent);
      if (full.find(only) == std::string::npos) continue;
      if (delta == nullptr) delta = std::make_shared<DeltaCase>(source, share);
      cases.push_back({full,
                       work,
                       Flat(static_cast<int64_t>(source.size() / 2)),
                       Element::kBF16,
                       Element::kBF16,
                       0,
                       0,
                       ScaleKind::kF32,
                       {},
                       delta});
    }
  }
}

bool Quantizes(const Case& c) { return c.work == Work::kQuantize; }

QuantizeBox Matrix(const Case& c) {
  return PackedMatrix(c.box.extent[0], c.box.extent[1], c.block_rows, c.block_columns, c.scale);
}

int64_t Elements(const Case& c) { return c.box.extent[0] * c.box.extent[1]; }
// Of kNvFp4: as of a tensor whose largest magnitude is 4.
// One is the other's inverse.
float GlobalOf(FourBitKind kind) { return kind == FourBitKind::kNvFp4Modelopt ? 1.0f / 672 : 672; }

uint64_t Run(const Case& c, Buffers& buffers) {
  unsigned char* target = buffers.target.data();
  const unsigned char* source = buffers.source.data();
  switch (c.work) {
    case Work::kMemcpy:
      std::memcpy(target, source, static_cast<size_t>(SourceBytes(c)));
      return 0;
    case Work::kSum:
      return SumSource(source, c.box, c.from, c.to);
    case Work::kCopy:
      Copy(target, source, c.box, c.from, c.to);
      return 0;
    case Work::kCopyAndSum:
      return CopyAndSumTarget(target, source, c.box, c.from, c.to);
    case Work::kCopyAndSumBoth: {
      const BothSums sums = CopyAndSumBoth(target, source, source, c.box, c.from, c.to);
      return sums.source == sums.target ? sums.target : ~sums.target;
    }
    case Work::kKeyedSum: {
      KeyedSum sum;
      AddKeyed(sum, {}, source, c.box, c.from, c.to, 0);
      return sum.lane[0];
    }
    case Work::kQuantize:
      QuantizeInto(target, source, Matrix(c), c.from);
      return 0;
    case Work::kFourBit:
      QuantizeFourBit(target, target + Elements(c) / 2, source, c.box.extent[0], c.box.extent[1],
                      c.block_columns, c.from, c.four_bit, GlobalOf(c.four_bit));
      return 0;
    case Work::kDeltaEncode:
      return c.delta->Encode();
    case Work::kDeltaEncodeAndCopy:
      return c.delta->EncodeAndCopy(nullptr);
    case Work::kDeltaEncodeCopyAndSum: {
      uint64_t sum = 0;
      return c.delta->EncodeAndCopy(&sum);
    }
    case Work::kDeltaApply:
      return c.delta->Apply() ? 0 : 1;
    case Work::kDeltaApplyTo:
      return c.delta->ApplyTo() ? 0 : 1;
  }
  std::abort();
}

bool Check(const Case& c, Buffers& buffers) {
  if (c.work == Work::kKeyedSum) return true;  // tests/unit/kernels/keyed_sum_test.cc
  if (c.delta != nullptr) {
    Run(c, buffers);
    return c.delta->Right();
  }
  std::fill(buffers.target.begin(), buffers.target.end(), static_cast<unsigned char>(0xa5));
  uint64_t sum = Run(c, buffers);
  if (c.work == Work::kSum || c.work == Work::kCopyAndSum || c.work == Work::kCopyAndSumBoth) {
    if (sum != reference::SumSource(buffers.source.data(), c.box, c.from, c.to)) return false;
  }
  if (c.work == Work::kSum) return true;
  if (Quantizes(c)) {
    return QuantizedRight(buffers.target.data(), buffers.source.data(), Matrix(c), c.from);
  }
  if (c.work == Work::kFourBit) {
    return FourBitRight(buffers.target.data(), buffers.source.data(), Elements(c), c.block_columns,
                        c.four_bit, GlobalOf(c.four_bit));
  }
  std::fill(buffers.expected.begin(), buffers.expected.end(), static_cast<unsigned char>(0xa5));
  reference::Copy(buffers.expected.data(), buffers.source.data(), c.box, c.from, c.to);
  return buffers.target == buffers.expected;
}

/// Of the thread itself: while another one has its core, nothing is spent.
double ThreadSeconds() {
  timespec spent{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
}

double Seconds(const Case& c, Buffers& buffers) {
  const double start = ThreadSeconds();
  volatile uint64_t sum = Run(c, buffers);
  (void)sum;
  return ThreadSeconds() - start;
}

double Median(std::vector<double> values) {
  auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<Row> Measure(const std::vector<Case>& cases, Buffers& buffers, int rounds) {
  std::vector<Row> rows;
  for (const Case& c : cases) rows.push_back({c.name, SourceBytes(c), {}, 0});
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) {
      rows[i].seconds.push_back(Seconds(cases[i], buffers));
    }
  }
  for (Row& row : rows) {
    std::vector<double> ratios;
    for (size_t round = 0; round < row.seconds.size(); ++round) {
      ratios.push_back(row.seconds[round] / static_cast<double>(row.bytes) /
                       (rows[0].seconds[round] / static_cast<double>(rows[0].bytes)));
    }
    row.ratio = Median(ratios);
  }
  return rows;
}

std::string Machine() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  std::string model = "unknown CPU";
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) model = line.substr(line.find(':') + 2);
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " threads";
}

void Print(const std::vector<Row>& rows) {
  std::printf("%-38s %9s %8s %8s %8s %7s %9s\n", "case", "MiB", "median", "min", "max", "GB/s",
              "x memcpy");
  for (const Row& row : rows) {
    double median = Median(row.seconds);
    auto [min, max] = std::minmax_element(row.seconds.begin(), row.seconds.end());
    std::printf("%-38s %9.1f %8.4f %8.4f %8.4f %7.1f %9.3f\n", row.name.c_str(),
                static_cast<double>(row.bytes) / (1 << 20), median, *min, *max,
                static_cast<double>(row.bytes) / median * 1e-9, row.ratio);
  }
}

bool WriteJson(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "{\"machine\": \"" << Machine() << "\", \"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    auto [min, max] = std::minmax_element(row.seconds.begin(), row.seconds.end());
    out << (i == 0 ? "\n" : ",\n") << "  {\"name\": \"" << row.name
        << "\", \"bytes\": " << row.bytes << ", \"rounds\": " << row.seconds.size()
        << ", \"seconds_median\": " << Median(row.seconds) << ", \"seconds_min\": " << *min
        << ", \"seconds_max\": " << *max << ", \"ratio_to_memcpy\": " << row.ratio
        << ", \"checked\": true}";
  }
  out << "\n]}\n";
  return static_cast<bool>(out.flush());
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    std::string flag = argv[i];
    if (flag == "--json") {
      options->json = argv[i + 1];
    } else if (flag == "--only") {
      options->only = argv[i + 1];
    } else if (flag == "--mib") {
      options->mib = std::atoll(argv[i + 1]);
    } else if (flag == "--rounds") {
      options->rounds = std::atoi(argv[i + 1]);
    } else {
      return false;
    }
  }
  return options->mib > 0 && options->rounds > 0;
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: kernels_bench [--mib N] [--rounds N] [--only TEXT] [--json FILE]\n");
    return 2;
  }
  auto bytes = static_cast<size_t>(options.mib << 20);
  Buffers buffers{std::vector<unsigned char>(bytes), std::vector<unsigned char>(bytes),
                  std::vector<unsigned char>(bytes)};
  uint64_t state = 1;
  for (unsigned char& byte : buffers.source) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<unsigned char>(state >> 56);
  }
  // Every second byte makes normal numbers near 1 of the elements, whatever their float kind:
  // denormals cost more than weights do, and a block with a NaN costs less.
  for (size_t i = 1; i < bytes; i += 2) {
    buffers.source[i] = static_cast<unsigned char>((buffers.source[i] & 0x83) | 0x3c);
  }
  std::vector<Case> cases = Cases(options.mib << 20);
  AddDeltas(cases, buffers.source, options.only);
  cases.erase(
      std::remove_if(cases.begin() + 1, cases.end(),  // the memcpy stays
                     [&](const Case& c) { return c.name.find(options.only) == std::string::npos; }),
      cases.end());
  for (const Case& c : cases) {
    if (Check(c, buffers)) continue;
    std::fprintf(stderr, "%s: differs from the reference\n", c.name.c_str());
    return 1;
  }
  std::vector<Row> rows = Measure(cases, buffers, options.rounds);
  Print(rows);
  if (!options.json.empty() && !WriteJson(options.json, rows)) {
    std::fprintf(stderr, "cannot write %s\n", options.json.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace weightwire::kernels

int main(int argc, char** argv) { return weightwire::kernels::Main(argc, argv); }
