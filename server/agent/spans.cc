#include "server/agent/spans.h"

#include <algorithm>
#include <utility>

namespace weightwire::agent {
namespace {

int64_t Micros(Nanos time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

}  // namespace

epoch::Span SpanOf(const std::string& name, Nanos begin, Nanos end) {
  epoch::Span span;
  span.name = name;
  span.begin_us = Micros(begin);
  // The difference of rounded ends: a part that ends with its whole does so in microseconds, too.
  span.duration_us = Micros(end) - span.begin_us;
  return span;
}

std::vector<epoch::Span> WithParts(epoch::Span whole, std::vector<transfer::WorkSpan> parts) {
  constexpr size_t kPartsMax = epoch::kSpansMax - 1;
  if (parts.size() > kPartsMax) {
    std::ranges::stable_sort(parts, std::greater<>(),
                             [](const transfer::WorkSpan& part) { return part.end - part.begin; });
    parts.resize(kPartsMax);
  }
  std::vector<epoch::Span> spans{std::move(whole)};
  for (const transfer::WorkSpan& part : parts) {
    epoch::Span span = SpanOf(part.what, part.begin, part.end);
    span.bytes = part.bytes;
    span.source = part.source;
    span.transport = part.transport;
    spans.push_back(std::move(span));
  }
  return spans;
}

}  // namespace weightwire::agent
