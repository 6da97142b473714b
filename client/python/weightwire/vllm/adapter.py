"""LoRA adapters: a new version takes the place of the one before in the engine's memory; nothing is merged.

Adapters are small, so the driver's process holds them whole, as one rank of layout `hf:lora=…`, and gives them to the
engine in PEFT's form through memory-backed files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence, cast

import numpy as np

from weightwire import errors
from weightwire.memory import Arrays, TensorMeta
from weightwire.subscriber import Subscriber
from weightwire.vllm import checkpoint
from weightwire.vllm.driver import Serving
from weightwire.vllm.ports import AsyncPort, LlmPort, port_of
from weightwire.vllm.replace import Deadlines


@dataclass(frozen=True)
class Adapter:
    """name, number: as in vLLM's LoRARequest; rank, alpha: as in PEFT; targets: "q_proj", "v_proj", …"""

    name: str
    number: int
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def spec(self) -> str:
        """weightwire's layout of this adapter, whole."""
        words = "|".join(target.removesuffix("_proj") for target in self.targets)
        return f"hf:lora={self.rank},targets={words}"

    def tensors(self, base: Sequence[TensorMeta]) -> list[TensorMeta]:
        """The adapter's tensors for the model whose checkpoint holds `base`."""
        found = []
        for meta in base:
            module, _, last = meta.name.rpartition(".")
            if last == "weight" and module.rpartition(".")[2] in self.targets:
                rows, columns = meta.shape
                found.append(TensorMeta(f"base_model.model.{module}.lora_A.weight", meta.dtype, (self.rank, columns)))
                found.append(TensorMeta(f"base_model.model.{module}.lora_B.weight", meta.dtype, (rows, self.rank)))
        return found

    def save(self, folder: Path, tensors: Sequence[TensorMeta], arrays: Mapping[str, np.ndarray]) -> None:
        """As PEFT saves it."""
        header, end = {}, 0
        for meta in tensors:
            header[meta.name] = {"dtype": meta.dtype, "shape": meta.shape, "data_offsets": [end, end + meta.nbytes]}
            end += meta.nbytes
        text = json.dumps(header).encode()
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for meta in tensors:
                file.write(arrays[meta.name].tobytes())
        (folder / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": list(self.targets),
            "bias": "none"}))


class AdapterDriver:
    """Leader of one engine for the versions of one adapter: pause → load in place → reset prefix cache → resume →
    acknowledge. `step` as EngineDriver's; `request` is what requests for the adapter carry.

    engine: a `vllm.LLM` or an `AsyncLLM` (construct the driver on its event loop) with `enable_lora=True`
    model:  folder of the base model
    """

    def __init__(self, engine: Any, *, name: str, model: str, adapter: Adapter, agent: str | None = None,
                 job: str = "", pause: str = "abort", deadlines: Deadlines = Deadlines()):
        port = port_of(engine)
        if not isinstance(port, (LlmPort, AsyncPort)):
            raise errors.RefusedError("adapters cannot be loaded over HTTP yet", code="UNIMPLEMENTED",
                                      remedy="run the driver in the engine's process")
        self._port, self._adapter, self._pause, self._deadlines = port, adapter, pause, deadlines
        folder = checkpoint.folder_of(model)
        self._tensors = adapter.tensors(checkpoint.tensors(folder))
        self._files = Path(tempfile.mkdtemp(prefix="weightwire-adapter-", dir="/dev/shm"))
        self._subscriber = Subscriber(group=name, rank=0, world_size=1, job=job, agent=agent)
        self._subscriber.bind(checkpoint.config_of(checkpoint.config_text(folder)), adapter.spec, self._tensors)
        self.serving: Serving | None = None
        #: The LoRARequest of the version that is served; None before the first.
        self.request: Any = None

    def step(self, timeout: float) -> Serving | None:
        """Waits for the next committed version and loads it; None after `timeout` seconds without one. When it raises,
        the engine has the adapter's version before: vLLM reads the new one before it drops that."""
        offer = self._subscriber.wait_offer(timeout)
        if offer is None:
            return None
        from vllm.lora.request import LoRARequest
        t, begun = self._deadlines, time.monotonic()
        folder = self._files / str(offer.epoch)
        folder.mkdir(exist_ok=True)
        self._adapter.save(folder, self._tensors, cast(Arrays, self._subscriber.stage(offer)))
        request = LoRARequest(self._adapter.name, self._adapter.number, str(folder))
        paused = time.monotonic()
        self._port.pause(self._pause, t.pause)
        try:
            self._port.load_adapter(LoRARequest(self._adapter.name, self._adapter.number, str(folder),
                                                load_inplace=True), t.update)
            if not self._port.reset_prefix_cache(self._pause == "keep", t.reset):
                raise errors.NotReadyError("the prefix cache was not emptied: requests hold blocks of it",
                                           code="FAILED_PRECONDITION")
        finally:
            self._port.resume(t.resume)
        before, self.request = self.request, request
        self.serving = Serving(offer.version, offer.epoch, time.monotonic() - paused, lineage=offer.lineage)
        self._subscriber.acknowledge(offer, time.monotonic() - begun)
        if before is not None and before.lora_path != request.lora_path:
            shutil.rmtree(before.lora_path, ignore_errors=True)
        return self.serving

    def close(self) -> None:
        """Leaves the job. The engine keeps the adapter."""
        self._subscriber.close()
        shutil.rmtree(self._files, ignore_errors=True)

    def __enter__(self) -> "AdapterDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
