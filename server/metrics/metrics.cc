#include "server/metrics/metrics.h"

namespace weightwire::metrics {
namespace {

class NullSink final : public Sink {
 public:
  void DeclareCounter(std::string_view, std::string_view, std::vector<Labels>) override {}
  void DeclareGauge(std::string_view, std::string_view, std::vector<Labels>) override {}
  void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                        std::vector<Labels>) override {}
  void Add(std::string_view, double, const Labels&) override {}
  void Set(std::string_view, double, const Labels&) override {}
  void Observe(std::string_view, double, const Labels&) override {}
};

}  // namespace

Sink& Null() {
  static NullSink sink;
  return sink;
}

}  // namespace weightwire::metrics
