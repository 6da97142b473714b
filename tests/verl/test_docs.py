"""The config of docs/verl.md, composed by hydra with verl's own defaults."""

import pathlib
import re

from hydra import compose, initialize_config_dir
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass

DOC = pathlib.Path(__file__).resolve().parents[2] / "docs/verl.md"


def test_the_worked_config_gives_the_backend_with_its_arguments(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", DOC.read_text(), re.S)
    (tmp_path / "separate.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("separate")
    rollout = config.actor_rollout_ref.rollout
    assert (config.trainer.v1.trainer_mode, rollout.nnodes, rollout.n_gpus_per_node) == ("separate_async", 1, 8)
    checkpoint = omega_conf_to_dataclass(rollout.checkpoint_engine)
    engine = CheckpointEngineRegistry.new(checkpoint.backend, is_master=True, bucket_size=1,
                                          **checkpoint.engine_kwargs[checkpoint.backend])
    assert (engine.route, engine._coordinator, engine._deadline) == ("shards", "head:7411", 300)
    assert checkpoint.custom_backend_module == "weightwire.verl"
