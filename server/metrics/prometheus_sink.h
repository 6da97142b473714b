#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/metrics/metrics.h"

namespace weightwire::metrics {

/// Keeps metrics for Prometheus, each name prefixed with "weightwire_", and adds those of the
/// process itself (process.h). Thread-safe.
class PrometheusSink final : public Sink {
 public:
  PrometheusSink();
  ~PrometheusSink() override;
  void DeclareCounter(std::string_view name, std::string_view help,
                      std::vector<Labels> known) override;
  void DeclareGauge(std::string_view name, std::string_view help,
                    std::vector<Labels> known) override;
  void DeclareHistogram(std::string_view name, std::string_view help, std::vector<double> bounds,
                        std::vector<Labels> known) override;
  void Add(std::string_view counter, double amount, const Labels& labels) override;
  void Set(std::string_view gauge, double value, const Labels& labels) override;
  void Observe(std::string_view histogram, double value, const Labels& labels) override;

  /// From now on the gauge has these series and no other: for label values that come and go. The
  /// caller bounds their number.
  void Replace(std::string_view gauge, const std::vector<std::pair<Labels, double>>& series);

  /// Everything now, in Prometheus' text format (0.0.4), with the families of the process.
  std::string Text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightwire::metrics
