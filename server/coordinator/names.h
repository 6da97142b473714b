#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace weightwire::coordinator {

/// Names that do not change any more: copies share them, for a large fleet's are in every epoch
/// that is remembered.
class Names {
 public:
  using value_type = std::string;
  using const_iterator = std::vector<std::string>::const_iterator;
  using iterator = const_iterator;

  Names() : names_(Nobody()) {}
  Names(std::vector<std::string> names)  // NOLINT(google-explicit-constructor): a list is one
      : names_(std::make_shared<const std::vector<std::string>>(std::move(names))) {}

  const_iterator begin() const { return names_->begin(); }
  const_iterator end() const { return names_->end(); }
  size_t size() const { return names_->size(); }
  bool empty() const { return names_->empty(); }
  const std::string& front() const { return names_->front(); }
  const std::string& operator[](size_t i) const { return (*names_)[i]; }
  /// Who shares them has the same.
  const void* id() const { return names_.get(); }
  /// Without looking at them where they are shared.
  friend bool operator==(const Names& a, const Names& b) {
    return a.names_ == b.names_ || std::ranges::equal(*a.names_, *b.names_);
  }

 private:
  static std::shared_ptr<const std::vector<std::string>> Nobody() {
    static const auto kNobody = std::make_shared<const std::vector<std::string>>();
    return kNobody;
  }

  std::shared_ptr<const std::vector<std::string>> names_;
};

}  // namespace weightwire::coordinator
