#include "server/device/library.h"

#include <gtest/gtest.h>

#include "server/device/uuid.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::device {
namespace {

using weightwire::testing::FakeLibrary;

TEST(DeviceUuid, IsReadAndWrittenAsNvidiaSmiDoes) {
  const std::string text = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6";
  const auto uuid = ParseUuid(text);
  ASSERT_TRUE(uuid.has_value());
  EXPECT_EQ(uuid->bytes[0], 0x89);
  EXPECT_EQ(uuid->bytes[15], 0xf6);
  EXPECT_EQ(ToString(*uuid), text);
}

TEST(DeviceUuid, RefusesWhatIsNone) {
  for (const std::string text :
       {"", "0", "GPU-", "8932f937-d72c-4106-c12f-20bd9faed9f6",
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f61",
        "GPU-8932f937xd72c-4106-c12f-20bd9faed9f6", "GPU-8932f937-d72c-4106-c12f-20bd9faed9g6",
        "GPU-+932f937-d72c-4106-c12f-20bd9faed9f6"}) {
    const auto uuid = ParseUuid(text);
    ASSERT_FALSE(uuid.has_value()) << text;
    EXPECT_EQ(uuid.error().reason(), Reason::kInvalidRequest);
    EXPECT_FALSE(uuid.error().remedy().empty());
  }
}

TEST(DeviceLibrary, FindsDevicesByUuidWhateverTheirIndices) {
  const auto library = FakeLibrary();
  ASSERT_EQ(library->devices().size(), 2u);
  EXPECT_EQ(ToString(library->devices()[0]), "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01");
  EXPECT_EQ(library->IndexOf(library->devices()[1]), Result<int32_t>(1));
}

TEST(DeviceLibrary, NamesADeviceThatIsNotVisibleAndThoseThatAre) {
  const auto index = FakeLibrary()->IndexOf(Uuid{});
  ASSERT_FALSE(index.has_value());
  EXPECT_EQ(index.error().code(), Code::kFailedPrecondition);
  EXPECT_EQ(index.error().message(),
            "GPU-00000000-0000-0000-0000-000000000000 is not visible here; visible are "
            "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01, GPU-fafafafa-fafa-fafa-fafa-fafafafafa00");
}

TEST(DeviceLibrary, SaysWhatIsMissing) {
  const auto expect = [](const std::string& path, const std::string& part) {
    const auto library = Library::Load(path);
    ASSERT_FALSE(library.has_value()) << path;
    EXPECT_EQ(library.error().code(), Code::kUnavailable);
    EXPECT_NE(library.error().message().find(part), std::string::npos)
        << library.error().ToString();
    EXPECT_NE(library.error().remedy().find("gpu_library"), std::string::npos);
  };
  expect("/nowhere/libweightwire_cuda.so", "cannot open shared object file");
  expect("libc.so.6", "has no ww_cuda_abi_version");
}

}  // namespace
}  // namespace weightwire::device
