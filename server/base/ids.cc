#include "server/base/ids.h"

#include <cstdio>

namespace weightwire {

std::string PlanId::ToHex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return text;
}

}  // namespace weightwire
