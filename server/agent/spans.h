#pragma once

#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/epoch/messages.h"
#include "server/transfer/transfer.h"

/// What a rank did for an epoch, as its reports tell it to people.
namespace weightwire::agent {

/// A span from `begin` to `end`, by this agent's clock.
epoch::Span SpanOf(const std::string& name, Nanos begin, Nanos end);

/// `whole` with the parts that the transfer engine told of it; of too many the longest ones.
std::vector<epoch::Span> WithParts(epoch::Span whole, std::vector<transfer::WorkSpan> parts);

}  // namespace weightwire::agent
