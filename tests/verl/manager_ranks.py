"""What a rank of the checkpoint manager's test does: a real FSDP2 model under verl's interface."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/examples/verl_checkpoint"))

import torch
import torch.distributed as dist
import transformers
from manager import WeightwireCheckpointManager
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.trainer.config import CheckpointConfig

CONFIG = dict(vocab_size=37, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
              num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)


class Job:
    def __init__(self, seed: int, contents: list[str], async_save: bool = False):
        torch.manual_seed(seed)
        self.model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**CONFIG, use_cache=False))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.manager = WeightwireCheckpointManager(self.model, self.optimizer, self.schedule, checkpoint_config=CheckpointConfig(
            save_contents=contents, load_contents=["model", "optimizer", "extra"], async_save=async_save))

    def step(self) -> None:
        tokens = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(int(self.schedule.last_epoch)))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def whole(self) -> dict:
        """Weights and moments, gathered by torch itself."""
        made = {}
        for name, parameter in self.model.named_parameters():
            made[name] = parameter.full_tensor().detach().clone()
            for group, tensor in self.optimizer.state[parameter].items():
                made[f"{group}/{name}"] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        return made


def run(rank: int, world_size: int, folder: str, what: str, async_save: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{what}.store", rank=rank, world_size=world_size)
    job = Job(1 if what == "save" else 2, ["model", "hf_model", "optimizer", "extra"], async_save)
    if what == "save":
        for step in (1, 2):
            job.step()
            if step == 1:
                job.manager.save_checkpoint(f"{folder}/global_step_0/actor", global_step=0, max_ckpt_to_keep=1)
        job.manager.save_checkpoint(f"{folder}/global_step_1/actor", global_step=1, max_ckpt_to_keep=1)
        draw = torch.rand(3)
    else:
        job.manager.load_checkpoint(f"{folder}/global_step_1/actor")
        draw = torch.rand(3)
    held = job.whole()
    job.step()  # goes on while the save may still be written
    after = job.whole()
    job.manager.wait()
    assert job.model.config.use_cache is False
    if rank == 0:
        save_file({"draw": draw, "lr": torch.tensor(job.schedule.get_last_lr()), **{f"held/{n}": t for n, t in held.items()},
                   **{f"after/{n}": t for n, t in after.items()}}, f"{folder}/{what}{world_size}.safetensors")
    dist.barrier()
    dist.destroy_process_group()
