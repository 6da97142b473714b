"""Fifty versions that reach a real vLLM as changes: a small model that AdamW trains, published in bf16 after every step."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from tests.engine import rig
from tests.engine.conftest import Stack
from weightwire import Client

VERSIONS = 50
COMPARED = (1, 25, 50)


class Trained:
    """float32 masters of a checkpoint, a step of AdamW at a time, and what they round to."""

    def __init__(self, folder: Path, rate: float):
        import transformers
        torch.manual_seed(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self._before: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        tokens = torch.randint(self.model.config.vocab_size, (4, 48))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, like: Path, out: Path) -> float:
        """A folder that an engine starts on; the share of bf16 elements that are others than in the folder before."""
        import safetensors.torch
        out.mkdir()
        for file in like.iterdir():
            if file.suffix != ".safetensors":
                os.symlink(file, out / file.name)
        now = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.model.state_dict().items()
               if not (name == "lm_head.weight" and self.model.config.tie_word_embeddings)}
        safetensors.torch.save_file(now, out / "model.safetensors", metadata={"format": "pt"})
        changed = sum(int((tensor.view(torch.int16) != self._before[name].view(torch.int16)).sum())
                      for name, tensor in now.items()) if self._before else 0
        self._before = now
        return changed / sum(tensor.numel() for tensor in now.values())


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_fifty_versions_of_changes_answer_as_engines_that_were_started_on_them(rate, checkpoint, tmp_path):
    start = checkpoint("qwen2", 1)
    trained, rows = Trained(start, rate), []
    # No memory is mapped, so that everything is sent: of one host, what "auto" would send whole.
    with contextlib.closing(Stack(tmp_path / "daemon", transports="[tcp]", delta="always")) as stack:
        engine = stack.add(rig.Engine(checkpoint("qwen2", 0)))
        trainer = stack.add(rig.Trainer(stack.agent, start))
        driver = stack.add(engine.driver(name="engine", agent=stack.agent))
        driver.init()
        folder = tmp_path / "now"
        for version in range(1, VERSIONS + 1):
            trained.step()
            folder = tmp_path / f"version-{version}"
            density = trained.save(start, folder)
            trainer.send(version, folder)
            serving = driver.step(60)
            assert (serving.version, serving.recovered) == (version, "")
            assert trainer.released()["version"] == version
            with Client(stack.daemon.grpc) as client:
                epoch = client.status().epoch_of(version)
            rows.append({"version": version, "density": density, "bytes": epoch.bytes, "bytes_kept": epoch.bytes_kept,
                         "sent": sum(epoch.bytes_by_transport.values()), "changed": epoch.delta_changed})
            if version in COMPARED:
                with contextlib.closing(rig.Engine(folder)) as started:
                    assert engine.answers() == started.answers(), f"version {version}"
    changes = rows[2:]  # of the first one there is no base, and what was there before was another model
    assert all(row["sent"] < row["bytes"] / 2 for row in changes), rows
    # Every change that numpy's sibling sees was sent as one, and nothing else.
    elements = rows[0]["bytes"] / 2
    for row in changes:
        assert row["changed"] == pytest.approx(row["density"] * elements, rel=0.02), row
    if out := os.environ.get("WEIGHTWIRE_DELTA_RUN"):
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / f"adamw-{rate:g}.json").write_text(json.dumps(rows, indent=1) + "\n")
