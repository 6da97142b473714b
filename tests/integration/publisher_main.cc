// A trainer of one rank in a process of its own, so that a test can kill it: publishes one version
// and waits for its release.
//
//   integration_publisher SOCKET VERSION SALT tiny|bigger
//
// Prints "published", then "released" or "given up: …"; exit code 0 when it was released.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

int main(int argc, char** argv) {
  using namespace weightwire;
  using namespace weightwire::integration;
  if (argc != 5) return 2;
  const uint64_t version = std::strtoull(argv[2], nullptr, 10);
  const oracle::DenseConfig config = std::string(argv[4]) == "bigger" ? BiggerQwen2() : TinyQwen2();
  Trainer trainer(argv[1], config, HuggingFaceWhole());
  trainer.Fill(std::strtoull(argv[3], nullptr, 10));
  trainer.Publish(version);
  std::printf("published\n");
  std::fflush(stdout);
  const Status released = trainer.AwaitReleases(version);
  std::printf("%s\n", released.ok() ? "released" : ("given up: " + released.ToString()).c_str());
  return released.ok() ? 0 : 1;
}
