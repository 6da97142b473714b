#pragma once

#include <memory>
#include <string>

#include "server/metrics/metrics.h"

namespace weightwire::metrics {

/// Keeps metrics for Prometheus, each name prefixed with "weightwire_". Thread-safe.
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

  /// Everything now, in Prometheus' text format (0.0.4).
  std::string Text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightwire::metrics
