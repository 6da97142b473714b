// Text and files from outside that describe layouts: parallel specs, config.json, recorded loaders,
// and plan files. What a spec or a plan is read as is read again the same from what it is written
// as.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "server/layout/families/config.h"
#include "server/layout/scheme.h"
#include "server/layout/trace.h"
#include "server/plan/plan_bytes.h"
#include "tests/fuzz/kinds.h"

namespace weightwire::layout {
namespace {

void OnSpec(std::string_view text) {
  const auto spec = ParseParallelSpec(text);
  if (!spec) return;
  const auto again = ParseParallelSpec(spec->ToString());
  WW_CHECK(again && again->ToString() == spec->ToString());
}

/// Whether deriving every rank's layout takes milliseconds: big models are not what is looked for.
bool Small(const ModelConfig& config) {
  return config.layers + config.mtp_layers <= 4 && config.experts <= 8 && config.vision.depth <= 2;
}
bool Small(const ParallelSpec& spec) {
  int64_t ranks = 1;
  for (const auto& [word, size] : spec.sizes) {
    if (size > 16 || (ranks *= size) > 16) return false;
  }
  return !spec.options.contains("replicas");
}

void OnScheme(std::string_view text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view json = text.substr(std::min(end + 1, text.size()));
  const auto config = ParseModelConfig(json);
  const auto spec = ParseParallelSpec(text.substr(0, end));
  if (!config || !Small(*config)) return;
  static_cast<void>(CanonicalFromConfig(json).has_value());
  if (!spec || !Small(*spec)) return;
  const auto layout = LayoutFromScheme(json, *spec);
  if (layout) WW_CHECK(Validate(*layout).ok());
}

void OnTrace(std::string_view json) {
  const auto trace = ParseTrace(json);
  if (!trace) return;
  const auto config = ParseModelConfig(trace->config_json);
  if (!config || !Small(*config)) return;
  const auto canonical = CanonicalFromConfig(trace->config_json);
  if (!canonical) return;
  for (const auto& rows : trace->ranks) {
    if (rows.size() > 200) continue;
    const auto layout = LayoutFromTrace(*canonical, rows);
    if (layout) WW_CHECK(ValidateRank(*canonical, *layout).ok());
  }
}

void OnPlan(std::string_view bytes) {
  const auto read = plan::FromBytes(bytes);
  if (read) WW_CHECK(plan::FromBytes(plan::ToBytes(*read)) == read);
}

}  // namespace
}  // namespace weightwire::layout

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weightwire::fuzz::LayoutKind;
  using namespace weightwire::layout;
  if (size == 0) return -1;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (static_cast<LayoutKind>(data[0])) {
    case LayoutKind::kSpec:
      OnSpec(text);
      return 0;
    case LayoutKind::kScheme:
      OnScheme(text);
      return 0;
    case LayoutKind::kTrace:
      OnTrace(text);
      return 0;
    case LayoutKind::kPlan:
      OnPlan(text);
      return 0;
    case LayoutKind::kEnd:
      break;
  }
  return -1;
}
