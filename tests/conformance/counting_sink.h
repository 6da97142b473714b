#pragma once

#include <map>
#include <string>
#include <vector>

#include "server/metrics/metrics.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {

/// Counts what the transport reports.
class CountingSink final : public metrics::Sink {
 public:
  explicit CountingSink(Rig& rig) : rig_(rig) {}
  void DeclareCounter(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareGauge(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                        std::vector<metrics::Labels>) override {}
  void Add(std::string_view counter, double amount, const metrics::Labels& labels) override {
    rig_.Update([&] { counts[Key(counter, labels)] += amount; });
  }
  void Set(std::string_view gauge, double value, const metrics::Labels& labels) override {
    rig_.Update([&] { counts[Key(gauge, labels)] = value; });
  }
  void Observe(std::string_view, double, const metrics::Labels&) override {}

  std::map<std::string, double> counts;

 private:
  static std::string Key(std::string_view name, const metrics::Labels& labels) {
    std::string key(name);
    for (const auto& [label, value] : labels) {
      if (label != "transport") key += " " + value;
    }
    return key;
  }
  Rig& rig_;
};

}  // namespace weightwire::conformance
