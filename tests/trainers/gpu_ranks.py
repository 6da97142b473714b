"""What ranks of test_gpu.py do: each has a fake GPU of its own."""

import torch
import torch.distributed as dist

import weightwire.fsdp
from gpu_standin import GPUS, FakeTorchCuda


def fsdp_on_gpus(rank: int, world_size: int, agent: str, folder: str) -> None:
    cuda = FakeTorchCuda().install()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    module = fully_shard(torch.nn.Linear(24, 13), mesh=init_device_mesh("cpu", (world_size,)))
    cuda.move_all(module, rank)
    with weightwire.fsdp.Publisher(module, agent=agent) as publisher:
        assert publisher.device == GPUS[rank]
        for version in (1, 2):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.to_local().add_(version)
            whole = {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}
            if rank == 0:
                torch.save(whole, f"{folder}/{version}.tmp")
                import os
                os.rename(f"{folder}/{version}.tmp", f"{folder}/{version}.pt")
            dist.barrier()
            launches, host = cuda.count("launches"), cuda.count("host_bytes")
            release = publisher.publish(version)
            assert (cuda.count("launches"), cuda.count("host_bytes")) == (launches + 1, host)
            release.wait_released(60)
