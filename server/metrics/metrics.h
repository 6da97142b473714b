#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Metrics as the product sees them: names without the "weightwire_" prefix, base units, label
/// values from closed sets only (never a rank, tensor, address or epoch).
namespace weightwire::metrics {

using Labels = std::vector<std::pair<std::string, std::string>>;

/// Thread-safe. One implementation feeds Prometheus (prometheus_sink.h), one forgets (Null).
///
/// A family is declared once, at start, so that it is scraped as 0 before its first event; using an
/// undeclared family is a programmer's error and aborts.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void DeclareCounter(std::string_view name, std::string_view help,
                              std::vector<Labels> known = {{}}) = 0;
  virtual void DeclareGauge(std::string_view name, std::string_view help,
                            std::vector<Labels> known = {{}}) = 0;
  /// `bounds`: upper edges, ascending, without +Inf.
  virtual void DeclareHistogram(std::string_view name, std::string_view help,
                                std::vector<double> bounds, std::vector<Labels> known = {{}}) = 0;
  virtual void Add(std::string_view counter, double amount, const Labels& labels = {}) = 0;
  virtual void Set(std::string_view gauge, double value, const Labels& labels = {}) = 0;
  virtual void Observe(std::string_view histogram, double value, const Labels& labels = {}) = 0;
};

/// Accepts everything, keeps nothing.
Sink& Null();

/// Declares the catalogue of docs/metrics.md that this build feeds. Called once per process.
void DeclareAll(Sink& sink);

}  // namespace weightwire::metrics
