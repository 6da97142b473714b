// What nccl does beyond the contract.
#include "tests/conformance/fake_nccl_transport.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"
