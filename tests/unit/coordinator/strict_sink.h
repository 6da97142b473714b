#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "server/metrics/metrics.h"

namespace weightwire::coordinator::testing {

/// Keeps values by "name{label=value,…}" and fails the test on a family that was not declared, or
/// on labels outside of the declared ones.
class StrictSink final : public metrics::Sink {
 public:
  StrictSink() { metrics::DeclareAll(*this); }
  void DeclareCounter(std::string_view name, std::string_view,
                      std::vector<metrics::Labels> known) override {
    Declare(name, known);
  }
  void DeclareGauge(std::string_view name, std::string_view,
                    std::vector<metrics::Labels> known) override {
    Declare(name, known);
  }
  void DeclareHistogram(std::string_view name, std::string_view, std::vector<double>,
                        std::vector<metrics::Labels> known) override {
    Declare(name, known);
  }
  void Add(std::string_view name, double amount, const metrics::Labels& labels) override {
    values[Checked(name, labels)] += amount;
  }
  void Set(std::string_view name, double value, const metrics::Labels& labels) override {
    values[Checked(name, labels)] = value;
  }
  void Observe(std::string_view name, double, const metrics::Labels& labels) override {
    values[Checked(name, labels)] += 1;
  }
  double Value(const std::string& series) const {
    const auto found = values.find(series);
    return found == values.end() ? 0 : found->second;
  }

  std::map<std::string, double> values;

 private:
  static std::string SeriesOf(std::string_view name, const metrics::Labels& labels) {
    std::string text(name);
    for (size_t i = 0; i < labels.size(); ++i) {
      text += (i == 0 ? "{" : ",") + labels[i].first + "=" + labels[i].second;
    }
    return labels.empty() ? text : text + "}";
  }
  void Declare(std::string_view name, const std::vector<metrics::Labels>& known) {
    EXPECT_TRUE(families_.emplace(name).second) << name << " is declared twice";
    for (const auto& labels : known) series_.insert(SeriesOf(name, labels));
  }
  std::string Checked(std::string_view name, const metrics::Labels& labels) const {
    EXPECT_TRUE(families_.contains(std::string(name))) << name << " is not declared";
    const std::string series = SeriesOf(name, labels);
    EXPECT_TRUE(series_.contains(series)) << series << " is not declared";
    return series;
  }

  std::set<std::string> families_;
  std::set<std::string> series_;
};

}  // namespace weightwire::coordinator::testing
