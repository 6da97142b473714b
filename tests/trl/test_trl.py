"""TRL's own AsyncGRPOTrainer gives its weights to an engine by weightwire.trl, and goes on when the engine has them.

Replaced: the loss (TRL's needs FlashAttention 3, CUDA only), the question for the GPU's speed, the rollout worker (by TRL's own protocol), the engine (a subscriber; vLLM's
driver is tested in tests/engine).
"""

import os
import pathlib
import queue
import threading

import numpy as np
import pytest
import torch
from datasets import Dataset
from demo.fleet import Daemon
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from weightwire import Client, DeadlineError, Subscriber, TensorMeta, boxes
from weightwire.trl import WeightTransfer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))
STEPS = 4


@pytest.fixture
def daemon(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    Qwen2ForCausalLM(Qwen2Config(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 vocab_size=97, tie_word_embeddings=False)).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


class Engine:
    """Takes every version as soon as it comes; `takes` holds it back."""

    def __init__(self, daemon, path: str):
        self.serving, self.takes, self._stop = {}, threading.Event(), threading.Event()
        self.takes.set()
        model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
        metas = {name: TensorMeta(name, "F32", tuple(p.shape)) for name, p in model.named_parameters()}
        self._subscriber = Subscriber(group="engine-a", rank=0, world_size=1, agent=daemon.agent_socket)
        self._subscriber.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self):
        while not self._stop.is_set():
            offer = self._subscriber.wait_offer(0.2) if self.takes.wait(0.2) else None
            if offer is not None:
                self.serving = {name: np.array(array) for name, array in self._subscriber.flip(offer).items()}
                self._subscriber.acknowledge(offer)

    def close(self):
        self._stop.set()
        self._thread.join()
        self._subscriber.close()


@pytest.fixture
def engine(daemon, model_path):
    made = Engine(daemon, model_path)
    yield made
    made.close()


class Worker:
    """TRL's RolloutWorkerProtocol: samples without end, and what the engine serves whenever TRL says that a version is live."""

    def __init__(self, engine):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.engine, self.live, self.trainer = engine, [], None

    def start(self):
        for number in range(200):
            self.rollout_buffer.put(RolloutSample(
                prompt=[], completion=[], input_ids=np.array([3, 4, 5, 6]), completion_mask=np.array([0, 0, 1, 1]),
                old_log_probs=np.zeros(4, np.float32), advantage=1.0, model_version=STEPS, group_id=number, metrics={}))

    def update_model_version(self, model_version):
        held = {name: p.detach().numpy().copy() for name, p in self.trainer.model.named_parameters()}
        self.live.append((model_version, held, dict(self.engine.serving)))

    def stop(self):
        pass

    def check_health(self, stale_after_s):
        pass


class Trainer(AsyncGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._step_forward_tokens += 1.0
        self._step_samples += 1.0
        return sum((parameter * parameter).sum() for parameter in model.parameters())


def trainer(path: str, tmp_path, engine, transfer) -> Trainer:
    worker = Worker(engine)
    made = Trainer(model=path, args=AsyncGRPOConfig(
        str(tmp_path / "out"), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        learning_rate=0.01, token_budget=0, report_to="none", dtype="float32", bf16=False, save_strategy="no", weight_sync_steps=1,
        max_staleness=100, gradient_checkpointing=False), train_dataset=Dataset.from_dict({"prompt": ["w3"] * 8}),
        rollout_worker=worker, weight_transfer=transfer)
    worker.trainer = made
    return made


def test_every_step_is_served_when_trl_goes_on(daemon, engine, model_path, tmp_path):
    transfer = WeightTransfer(["engine-a"], coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=60, bucket_bytes=1 << 16)
    made = trainer(model_path, tmp_path, engine, transfer)
    made.train()
    live = made.rollout_worker.live
    assert [number for number, _, _ in live] == list(range(1, STEPS + 2)) and transfer.version == STEPS + 1
    for _, held, served in live:
        assert held.keys() == served.keys() and all(np.array_equal(held[name], served[name].reshape(held[name].shape)) for name in held)
    first, last = live[0][1], live[-1][1]
    assert not any(np.array_equal(first[name], last[name]) for name in first if not name.endswith("bias"))
    with Client(daemon.grpc) as client:
        assert client.status().committed_version == STEPS + 1


def test_an_engine_that_does_not_take_a_version_ends_training_in_its_time(daemon, engine, model_path, tmp_path):
    transfer = WeightTransfer(["engine-a"], coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=8, bucket_bytes=1 << 16)
    engine.takes.clear()
    with pytest.raises(DeadlineError, match="engine-a"):
        trainer(model_path, tmp_path, engine, transfer).train()
    transfer.destroy()


def test_engines_that_never_come_are_named(daemon):
    transfer = WeightTransfer(["engine-b"], coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=1)
    with pytest.raises(TimeoutError, match="engine-b"):
        transfer.init_weight_transfer()
    transfer.destroy()
