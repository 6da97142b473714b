"""A checkpoint manager for verl's FSDP2 engine that saves by weightwire: every rank its own shards, all of them or none, to be
loaded by any number of ranks.

verl's engine makes its manager in `_build_model_optimizer`; put this one in its place:

    engine.checkpoint_manager = WeightwireCheckpointManager(model=engine.module, optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler, processing_class=tokenizer, checkpoint_config=engine.checkpoint_config)

It takes verl's own options: save_contents and load_contents of model, hf_model, optimizer and extra, and async_save.
"""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future
from typing import Any, Optional

import torch
import torch.distributed as dist
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from weightwire.adapter import clean_name
from weightwire.checkpoint import Contents, Explicit, Extra, Model, Options, State
from weightwire.checkpoint.adam import adam
from weightwire.fsdp import read_sharded

_FOLDER = "weightwire"


class WeightwireCheckpointManager(BaseCheckpointManager):
    """verl's interface. CheckpointError when it is made: the configuration asks for what cannot work."""

    def __init__(self, model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], lr_scheduler: Any = None,
                 processing_class: Any = None, checkpoint_config: Any = None, timeout: float = 1800.0):
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        self._saving: Optional[Future] = None
        self._folder, self._keep = "", None  # of the save that goes on
        options = Options.read({"save_contents": list(self.checkpoint_save_contents),
                                "load_contents": list(self.checkpoint_load_contents),
                                "async_save": bool(checkpoint_config and checkpoint_config.get("async_save", False))})
        canonical, lives = read_sharded(model)
        layout = Explicit(canonical, [live.held for live in lives])
        trained = {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._state = State(options, Contents(
            Model(layout, lambda: {live.held.meta.name: live.tensor for live in read_sharded(model)[1]}, model.config,
                  changes={"use_cache": True}),
            adam(optimizer, trained, layout) if optimizer is not None else None,
            Extra(shared=lambda: lr_scheduler and lr_scheduler.state_dict(),
                  restore_shared=lambda state: lr_scheduler.load_state_dict(state) if lr_scheduler and state else None,
                  own=self.get_rng_state, restore_own=self.load_rng_state)),
            rank=self.rank, world_size=self.world_size, timeout=timeout)

    def save_checkpoint(self, local_path: Optional[str], hdfs_path: Optional[str] = None, global_step: int = 0,
                        max_ckpt_to_keep: Optional[int] = None) -> None:
        """Into <local_path>/weightwire. With async_save it is there when the next save begins, or `wait` returns."""
        if local_path is None:
            return
        self.wait()
        self.previous_global_step = global_step
        attempt = [uuid.uuid4().hex]
        dist.broadcast_object_list(attempt, src=0)
        self._folder, self._keep = local_path, max_ckpt_to_keep
        self._saving = self._state.save(os.path.join(local_path, _FOLDER), attempt=attempt[0])
        if self._saving.done():
            self.wait()
            dist.barrier()

    def load_checkpoint(self, local_path: Optional[str], hdfs_path: Optional[str] = None,
                        del_local_after_load: bool = False) -> None:
        if local_path is None:
            return
        loaded = self._state.load(os.path.join(local_path, _FOLDER))
        if self.rank == 0 and loaded.left:
            print(f"not restored: {loaded.left}", flush=True)
        dist.barrier()

    def wait(self) -> None:
        """Until a save that goes on in the background is done; raises what it ended with."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.result()
        if self.rank == 0:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(os.path.join(self._folder, "huggingface"))
            self.register_checkpoint(self._folder, self._keep)
