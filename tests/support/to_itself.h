#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "server/transport/transport.h"

namespace weightwire::testing {

/// A session of `transport`, started as incarnation 5, with itself; null where there is none.
inline std::shared_ptr<transport::Endpoint> ToItself(transport::Transport& transport) {
  transport::Hello hello;
  hello.caller = hello.callee = Incarnation(5);
  std::promise<Result<std::shared_ptr<transport::Endpoint>>> connected;
  transport.Connect(transport.address(), hello, std::chrono::seconds(60),
                    [&](auto result) { connected.set_value(std::move(result)); });
  auto endpoint = connected.get_future().get();
  EXPECT_TRUE(endpoint.has_value()) << endpoint.error().ToString();
  return endpoint.value_or(nullptr);
}

}  // namespace weightwire::testing
