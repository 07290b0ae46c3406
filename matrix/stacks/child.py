"""One process: the answers of some models in some ways, under the packages that it was started with."""
from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple


class Job(NamedTuple):
    """models: names. ways: as ``matrix.stacks.ways.run`` has them. hidden: packages that shall not be found.
    weights: a file that an earlier process has written. reference: as a Stack's, if this process makes it.
    on_cuda: as a Stack's."""
    models: list[str]
    ways: list[str]
    patches: list[str]
    hidden: list[str]
    out: str
    reference: str = ""
    weights: str = ""
    on_cuda: bool = False


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for package in job.hidden:
        sys.modules[package] = None  # type: ignore[assignment]  # so it is "not installed"
    import torch

    torch.save(answers(job), job.out)


def answers(job: Job) -> dict[str, Any]:
    """By model ``ways``, the answers by way and quantity, and ``ops``, those of flashlin that ran in each; a
    model that is not in this version is left out. Way after way, so that what one leaves behind cannot get
    into another model's raw numbers."""
    import torch

    from matrix.stacks import models, ways
    weights = torch.load(job.weights, weights_only=True) if job.weights else {}
    if job.reference == "interpreter":
        begin_interpreter()
    found: dict[str, Any] = {name: {"ways": {}, "ops": {}} for name in job.models}
    for way in job.ways:
        for name in list(found):
            said, model = found[name]["ways"], models.named(name)
            if job.reference == "transformers":
                model = models.COUNTERPARTS[name]
            if job.on_cuda:
                model = model._replace(options={**model.options, **models.BEFORE_5_15.get(name, {})})
            if way == "plain" and not said["raw"]["logits"].raises:
                continue  # the program itself has taken plain torch
            try:
                said[way], found[name]["ops"][way] = ways.run(
                    model, way, job.patches, weights.get(name, {}).get("weights"),
                    ways.INTERPRETED if job.reference == "interpreter" else (), job.on_cuda)
            except models.NoSuchModel:
                del found[name]
    if job.reference == "transformers":
        found = {name: in_mamba_ssm(name, one) for name, one in found.items()}
    return {name: as_plain(one) for name, one in found.items()}


def in_mamba_ssm(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """What transformers' model gives, under mamba_ssm's names, and the weights of both."""
    from matrix.stacks import models

    def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {models.in_mamba_ssm(key): x for key, x in tensors.items()}

    said = {way: {quantity: one._replace(tensors=renamed(one.tensors), wants=renamed(one.wants))
                  for quantity, one in by_quantity.items()} for way, by_quantity in found["ways"].items()}
    return {**found, "ways": said,
            "weights": renamed(models.build(models.COUNTERPARTS[name]).state_dict())}


def as_plain(found: dict[str, Any]) -> dict[str, Any]:
    """As ``torch.load`` reads it: dicts, strings and tensors."""
    return {**found, "ways": {
        way: {quantity: {**one._asdict(), "tensors": dict(one.tensors), "wants": dict(one.wants)}
              for quantity, one in said.items()} for way, said in found["ways"].items()}}


def begin_interpreter() -> None:
    from matrix.stacks import interpreter
    interpreter.begin()
    for module in ("fla.layers", "fla.models"):
        importlib.import_module(module)
    interpreter.loops()


if __name__ == "__main__":
    main()
