"""The trainer's command line, as other suites drive it."""

import json
import shutil
import subprocess

from conftest import ROOT

FIXTURES = ROOT / "tests/data/megatron"


def test_it_publishes_checkpoints_and_trained_versions(daemon, hf_engine, tmp_path):
    checkpoint = FIXTURES / "qwen2_tied" / "hf"
    trained = shutil.copytree(checkpoint, tmp_path / "trained")
    engine = hf_engine(checkpoint)
    trainer = subprocess.Popen([ROOT / "tests/trainers/run_trainer.sh", "--agent", daemon.agent_socket, "--checkpoint",
                                checkpoint, "--tp", "2", "--pp", "2"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(trainer.stdout.readline()) == {"ready": True}
        for version, command in enumerate([{"checkpoint": str(checkpoint)}, {"train": str(trained)}], 1):
            print(json.dumps({"publish": version, **command}), file=trainer.stdin, flush=True)
            said = json.loads(trainer.stdout.readline())
            assert said.get("version") == version and said["epoch"] > 0, said
            engine.expect(version, (checkpoint if version == 1 else trained) / "model.safetensors")
        assert (trained / "model.safetensors").read_bytes() != (checkpoint / "model.safetensors").read_bytes()
        print(json.dumps({"stop": True}), file=trainer.stdin, flush=True)
        assert trainer.wait(30) == 0
    finally:
        trainer.kill()
        trainer.wait()
