"""Writes tests/data/checkpoints/torch_dist-common_state anew: what torch_dist-optimizer holds, and iteration 1234, saved by
megatron-core 0.19, which has no common.pt but an object among the tensors.

python tests/trainers/common_state.py FOLDER, where FOLDER is an unpacked wheel of megatron_core 0.19.2 (it wants Python 3.12,
but for this part 3.11 does), in the environment `megatron` (tests/envs/make.sh). One process on the CPU.
"""

import pathlib
import shutil
import sys

STORED = pathlib.Path(__file__).resolve().parents[1] / "data/checkpoints"


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import torch
    import torch.distributed.checkpoint as dcp
    torch.cuda.synchronize = lambda *_: None  # mcore asks for it before it saves, GPU or not
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import __version__, dist_checkpointing
    assert __version__.startswith("0.19."), __version__
    source, target = STORED / "torch_dist-optimizer", STORED / "torch_dist-common_state"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    described = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in described.items() if hasattr(one, "size")}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(source), no_dist=True)
    state = {key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    dist_checkpointing.save({**state, **torch.load(source / "common.pt"), "iteration": 1234}, str(target))
    shutil.copy(source / "config.json", target)


if __name__ == "__main__":  # mcore's writers are processes of their own
    main()
