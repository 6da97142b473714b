"""Two agents that cut what is sent into slots of different sizes: the failure says which keys, on which side."""

import pytest

from conftest import BINARIES, EngineRanks, Trainer
from demo.fleet import Daemon
from test_fixtures import megatron_case
from weightwire.errors import WeightwireError


@pytest.mark.parametrize("key,value", [("slot_bytes", 4 << 20), ("segment_bytes_max", 512 << 10)])
def test_agents_that_cut_slots_of_different_sizes_are_told_which_keys_differ(daemon, groups, tmp_path, key, value):
    other = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "rollout"), "rollout", role="agent", coordinator=daemon.grpc,
                   transports="[tcp]", **{key: value})
    try:
        config, hf, spec, shards = megatron_case("megatron", "qwen2", "mcore-tp4", "tp4")
        groups.append(Trainer(daemon.agent_socket, config, spec, shards))
        groups.append(EngineRanks(other.agent_socket, "engine", config, "hf", [[meta for meta, _ in hf.values()]]))
        releases = [publisher.publish(1, deadline=6) for publisher in groups[0].publishers]
        with pytest.raises(WeightwireError) as failure:
            releases[0].wait_released(20)
        said = str(failure.value)
        assert "slot_bytes" in said and "segment_bytes_max" in said and str(value) in said and "source rank" in said, said
    finally:
        for group in groups[::-1]:
            group.close()
        groups.clear()
        assert other.stop() == 0
