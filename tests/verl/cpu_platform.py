"""A verl platform without an accelerator, by verl's own plug-in point (VERL_USE_EXTERNAL_MODULES): its FSDP engine
then runs on CPU over gloo. For tests only."""

import contextlib
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

_NOTHING = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(_NOTHING, _name, lambda *_: 0)
_NOTHING.get_rng_state, _NOTHING.set_rng_state = torch.get_rng_state, torch.set_rng_state
_NOTHING.mem_get_info = lambda *_: (0, 0)
_NOTHING.empty_cache = _NOTHING.ipc_collect = _NOTHING.manual_seed = _NOTHING.manual_seed_all = lambda *_: None


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _NOTHING

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


set_platform(PlatformCPU())
