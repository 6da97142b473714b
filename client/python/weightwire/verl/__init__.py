"""The "weightwire" backend of verl's checkpoint engines: importing this module registers it.

actor_rollout_ref.rollout.checkpoint_engine: {backend: weightwire, custom_backend_module: weightwire.verl}

See docs/verl.md. Needs verl 0.9 and torch.
"""

from weightwire.verl.engine import WeightwireCheckpointEngine

__all__ = ["WeightwireCheckpointEngine"]
