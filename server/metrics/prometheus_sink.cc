#include "server/metrics/prometheus_sink.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "server/base/status.h"
#include "server/metrics/process.h"

namespace weightwire::metrics {
namespace {

std::map<std::string, std::string> MapOf(const Labels& labels) {
  return {labels.begin(), labels.end()};
}

struct HistogramFamily {
  prometheus::Family<prometheus::Histogram>* family;
  std::vector<double> bounds;
};

/// The entry of a declared family; ends the process for an undeclared one.
template <typename Families>
auto& Declared(Families& families, std::string_view name) {
  auto found = families.find(name);
  WW_CHECK(found != families.end());
  return found->second;
}

}  // namespace

struct PrometheusSink::Impl {
  prometheus::Registry registry;
  std::mutex mutex;  ///< of the maps; metrics themselves are thread-safe
  std::map<std::string, prometheus::Family<prometheus::Counter>*, std::less<>> counters;
  std::map<std::string, prometheus::Family<prometheus::Gauge>*, std::less<>> gauges;
  /// Series by gauge that Replace() has made.
  std::map<std::string, std::vector<prometheus::Gauge*>, std::less<>> replaced;
  std::map<std::string, HistogramFamily, std::less<>> histograms;
};

PrometheusSink::PrometheusSink() : impl_(std::make_unique<Impl>()) {}
PrometheusSink::~PrometheusSink() = default;

void PrometheusSink::DeclareCounter(std::string_view name, std::string_view help,
                                    std::vector<Labels> known) {
  std::lock_guard lock(impl_->mutex);
  auto& family = prometheus::BuildCounter()
                     .Name("weightwire_" + std::string(name))
                     .Help(std::string(help))
                     .Register(impl_->registry);
  impl_->counters[std::string(name)] = &family;
  for (const Labels& labels : known) family.Add(MapOf(labels));
}

void PrometheusSink::DeclareGauge(std::string_view name, std::string_view help,
                                  std::vector<Labels> known) {
  std::lock_guard lock(impl_->mutex);
  auto& family = prometheus::BuildGauge()
                     .Name("weightwire_" + std::string(name))
                     .Help(std::string(help))
                     .Register(impl_->registry);
  impl_->gauges[std::string(name)] = &family;
  for (const Labels& labels : known) family.Add(MapOf(labels));
}

void PrometheusSink::DeclareHistogram(std::string_view name, std::string_view help,
                                      std::vector<double> bounds, std::vector<Labels> known) {
  std::lock_guard lock(impl_->mutex);
  auto& family = prometheus::BuildHistogram()
                     .Name("weightwire_" + std::string(name))
                     .Help(std::string(help))
                     .Register(impl_->registry);
  for (const Labels& labels : known) family.Add(MapOf(labels), bounds);
  impl_->histograms[std::string(name)] = {&family, std::move(bounds)};
}

void PrometheusSink::Add(std::string_view counter, double amount, const Labels& labels) {
  std::lock_guard lock(impl_->mutex);
  Declared(impl_->counters, counter)->Add(MapOf(labels)).Increment(amount);
}

void PrometheusSink::Set(std::string_view gauge, double value, const Labels& labels) {
  std::lock_guard lock(impl_->mutex);
  Declared(impl_->gauges, gauge)->Add(MapOf(labels)).Set(value);
}

void PrometheusSink::Observe(std::string_view histogram, double value, const Labels& labels) {
  std::lock_guard lock(impl_->mutex);
  HistogramFamily& entry = Declared(impl_->histograms, histogram);
  entry.family->Add(MapOf(labels), entry.bounds).Observe(value);
}

void PrometheusSink::Replace(std::string_view gauge,
                             const std::vector<std::pair<Labels, double>>& series) {
  std::lock_guard lock(impl_->mutex);
  auto& family = *Declared(impl_->gauges, gauge);
  std::vector<prometheus::Gauge*>& made = impl_->replaced[std::string(gauge)];
  for (prometheus::Gauge* old : made) family.Remove(old);
  made.clear();
  for (const auto& [labels, value] : series) {
    made.push_back(&family.Add(MapOf(labels)));
    made.back()->Set(value);
  }
}

std::string PrometheusSink::Text() const {
  std::vector<prometheus::MetricFamily> families;
  {
    // Replace() is seen as a whole.
    std::lock_guard lock(impl_->mutex);
    families = impl_->registry.Collect();
  }
  auto process = ProcessFamilies();
  families.insert(families.end(), std::make_move_iterator(process.begin()),
                  std::make_move_iterator(process.end()));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace weightwire::metrics
