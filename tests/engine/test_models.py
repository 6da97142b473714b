"""Two models of one trainer in two real engines: each answers with its own, from one epoch on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.engine.trainer_hf import config_of, read
from tests.engine import rig
from weightwire import Publisher
from weightwire.v1 import types_pb2

KINDS = {"actor": "qwen2", "draft": "qwen2-tied"}


def layout_of(model: str, folder) -> types_pb2.LayoutSubmission.Model:
    """A rank that holds the checkpoint as Hugging Face saves it."""
    scheme = types_pb2.LayoutSubmission.Scheme(config_json=json.dumps(config_of(folder)), topology=types_pb2.ParallelTopology(spec="hf"),
                                               observed=[meta.to_proto() for meta, _ in held(folder).values()])
    return types_pb2.LayoutSubmission.Model(name=model, rank=0, world_size=1, layout=types_pb2.LayoutSubmission(scheme=scheme))


def held(folder):
    tensors = read(folder)
    if config_of(folder).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return tensors


def test_each_engine_answers_with_its_own_model_from_one_epoch_on(checkpoint, fresh, stack):
    publisher = stack.add(Publisher(rank=0, world_size=1, agent=stack.agent))
    params = publisher.bind_boxes(types_pb2.LayoutSubmission(models=types_pb2.LayoutSubmission.Models(
        models=[layout_of(model, checkpoint(kind, 1)) for model, kind in KINDS.items()])))
    engines = {model: stack.add(rig.Engine(checkpoint(kind, 0))) for model, kind in KINDS.items()}
    drivers = {model: stack.add(engine.driver(name=f"{model}-a", agent=stack.agent, model_name=model)) for model, engine in engines.items()}
    for driver in drivers.values():
        assert driver.init()[0]["notes"] == []
    for version in (1, 2):
        for model, kind in KINDS.items():
            for name, (_, raw) in held(checkpoint(kind, version)).items():
                params[f"{model}::{name}"].reshape(-1).view(np.uint8)[:] = raw
        release = publisher.publish(version, deadline=120)
        with ThreadPoolExecutor() as pool:
            served = list(pool.map(lambda driver: driver.step(60), drivers.values()))
        release.wait_released(60)
        assert [(one.version, one.epoch) for one in served] == [(version, release.epoch)] * 2
        for model, kind in KINDS.items():
            assert engines[model].answers() == fresh(kind, 1, version), (model, version)
