"""Checkpoints as participants with a layout: a checkpoint in one format and layout from one in another, by a plan.

>>> from weightwire import checkpoint
>>> checkpoint.convert("Qwen2.5-7B", "mcore", "torch_dist", verify=True)
>>> checkpoint.convert("iter_0000100", "hf", "hf", config="config.json")

docs/checkpoints.md has formats, bounds and guarantees. No torch, but where `megatron` and `torch_dist` are written.
"""

from weightwire.checkpoint.compaction import compact
from weightwire.checkpoint.contents import Contents, Extra, Model, Optimizer
from weightwire.checkpoint.conversion import convert
from weightwire.checkpoint.formats import Opened
from weightwire.checkpoint.layouts import Explicit
from weightwire.checkpoint.live import push, save, start_engines
from weightwire.checkpoint.loading import Report, Trial, load, try_load
from weightwire.checkpoint.options import Options
from weightwire.checkpoint.restore import Loaded
from weightwire.checkpoint.sharded import save_rank, save_rank_later
from weightwire.checkpoint.sources import check, open_checkpoint
from weightwire.checkpoint.state import State
from weightwire.checkpoint.stored import CheckpointError, Stored

__all__ = ["CheckpointError", "Contents", "Explicit", "Extra", "Loaded", "Model", "Opened", "Optimizer", "Options", "Report",
           "State", "Stored", "Trial", "check", "compact", "convert", "load", "open_checkpoint", "push", "save", "save_rank", "save_rank_later",
           "start_engines", "try_load"]
