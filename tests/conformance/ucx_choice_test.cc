// What the transport says of its devices and of GPU-direct, with the UCX that is there. How it
// chooses among RDMA devices is proved on made-up trees: tests/unit/transport/ucx_rails_test.cc.
#include <gmock/gmock.h>

#include "server/transport/ucx/ucx_transport.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using transport::GpuDirect;
using transport::UcxOptions;

class UcxChoice : public Conformance {
 protected:
  UcxChoice() : sink(rig) {
    options.tls = rig.kind().tls;
    options.metrics = &sink;
  }
  std::unique_ptr<Transport> Make() { return transport::MakeUcxTransport(options); }
  bool Shown(const std::string& what) {
    return rig.Read<bool>([&] { return sink.counts["ucx_devices " + what] == 1; });
  }

  CountingSink sink;
  UcxOptions options;
};

TEST_P(UcxChoice, ANamedDeviceAloneIsUsedAndShown) {
  options.devices = "lo";
  Side named(rig, Incarnation(7));
  named.transport = Make();
  ASSERT_EQ(named.transport->Start(&named.recorder, named.self), OkStatus());
  EXPECT_THAT(named.transport->choices(), HasSubstr("network devices lo: named by ucx_devices"));
  EXPECT_TRUE(Shown("lo setting"));
  EXPECT_FALSE(Shown("eth0 setting"));
  auto region = PatternRegion(100'000);
  const RegionKey key = named.transport->Export({{region, 0, region->size()}});
  auto reader = rig.MakeSide();
  auto endpoint = rig.Open(*reader, named);
  std::vector<std::byte> buffer(100'000);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(buffer, 0), -1);
}

TEST_P(UcxChoice, ADeviceThatUcxDoesNotHaveIsRefused) {
  options.devices = "mlx5_77:1,lo";
  const Status why = Make()->Viable();
  EXPECT_EQ(why.reason(), Reason::kConfigInvalid);
  EXPECT_THAT(why.message(), HasSubstr("ucx_devices names \"mlx5_77:1\", UCX has "));
  EXPECT_THAT(why.message(), HasSubstr("lo"));
}

TEST_P(UcxChoice, GpuDirectThatIsRequiredIsRefusedInWords) {
  options.gpu_direct = GpuDirect::kRequired;
  auto transport = Make();
  const Status why = transport->Viable();
  EXPECT_EQ(why.code(), Code::kFailedPrecondition);
  EXPECT_THAT(why.message(), HasSubstr("no GPU-direct: "));
  EXPECT_THAT(why.message(), HasSubstr("UCX has no RDMA device here"));  // tcp leaves it out
  EXPECT_THAT(why.message(), HasSubstr("this agent has no GPU memory for weights"));
  EXPECT_THAT(why.remedy(), HasSubstr("gpu_direct"));
  Side side(rig, Incarnation(7));
  EXPECT_EQ(transport->Start(&side.recorder, side.self), why);
}

// GPU memory that is lent is one fact of several: the others are still missing here.
TEST_P(UcxChoice, SlabsAloneAreNoGpuDirect) {
  options.gpu_direct = GpuDirect::kRequired;
  options.slab_gpus = {"GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"};
  const Status why = Make()->Viable();
  EXPECT_THAT(why.message(), HasSubstr("UCX has no RDMA device here"));
  EXPECT_THAT(why.message(), Not(HasSubstr("no GPU memory for weights")));
  options.gpu_direct = GpuDirect::kAuto;
  const auto transport = Make();
  EXPECT_EQ(transport->Viable(), OkStatus());
  EXPECT_FALSE(transport->capabilities().gets_device_memory);
  EXPECT_FALSE(transport->capabilities().flush_device_writes);
}

TEST_P(UcxChoice, GpuDirectIsExplainedUnlessItIsOff) {
  auto transport = Make();
  EXPECT_EQ(transport->Viable(), OkStatus());
  EXPECT_THAT(transport->choices(), HasSubstr("UCX's own choice: no RDMA device"));
  EXPECT_THAT(transport->choices(), HasSubstr("; no GPU-direct: "));
  EXPECT_TRUE(Shown("lo ucx"));
  options.gpu_direct = GpuDirect::kOff;
  EXPECT_THAT(Make()->choices(), Not(HasSubstr("GPU-direct")));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(UcxChoice);  // where the plug-in is not built
INSTANTIATE_TEST_SUITE_P(Transports, UcxChoice, ::testing::ValuesIn(UcxKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
