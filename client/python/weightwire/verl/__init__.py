"""The "weightwire" backend of verl's checkpoint engines: importing this module registers it.

actor_rollout_ref.rollout.checkpoint_engine: {backend: weightwire, custom_backend_module: weightwire.verl}

See docs/verl.md. Needs verl 0.9 and torch.
"""

from verl.workers.rollout import base as _base

from weightwire.verl.engine import WeightwireCheckpointEngine

# Read by verl when a rollout worker makes its adapter. A verl that keeps it in another way goes on with its own.
_rollouts = getattr(_base, "_ROLLOUT_REGISTRY", {})
if _rollouts.get(("vllm", "async")) == "verl.workers.rollout.vllm_rollout.ServerAdapter":
    _rollouts["vllm", "async"] = "weightwire.verl.vllm.ServerAdapter"

__all__ = ["WeightwireCheckpointEngine"]
