"""Child process: run some models in several ways, under the package versions of its environment."""
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
    """The arguments of one child process.

    models: names of the models.
    ways: ways to run each model, as in ``matrix.stacks.ways.run``.
    patches: arguments of ``flashlin.patched``.
    hidden: packages that must appear as not installed.
    out: path of the result file.
    reference: the reference of the stack, if this process computes the reference results.
    weights: file with weights that an earlier process has written, or an empty string.
    on_cuda: the field of the stack with the same name.
    """
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
    """Return the answers of each model, by model name.

    Each model has ``ways`` (answers by way and quantity) and ``ops`` (the flashlin ops that ran, by way). A
    model that the installed version lacks is omitted. The outer loop runs over the ways, so that a patched run
    cannot affect the raw results of another model.
    """
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
                continue  # the raw program already ran plain torch
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
    """Return the results of a transformers model under the names of mamba_ssm, with its weights."""
    from matrix.stacks import models

    def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {models.in_mamba_ssm(key): x for key, x in tensors.items()}

    said = {way: {quantity: one._replace(tensors=renamed(one.tensors), wants=renamed(one.wants))
                  for quantity, one in by_quantity.items()} for way, by_quantity in found["ways"].items()}
    return {**found, "ways": said,
            "weights": renamed(models.build(models.COUNTERPARTS[name]).state_dict())}


def as_plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results as dicts, strings and tensors only, which ``torch.load`` can read safely."""
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
