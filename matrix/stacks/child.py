"""One process: the answers of some models in some ways, under the packages that it was started with."""
from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from typing import Any, NamedTuple


class Job(NamedTuple):
    """models: names. ways: as ``matrix.stacks.ways.run`` has them. hidden: packages that shall not be found.
    weights: a file that an earlier process has written. reference: as a Stack's, if this process makes it."""
    models: list[str]
    ways: list[str]
    patches: list[str]
    hidden: list[str]
    out: str
    reference: str = ""
    weights: str = ""


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for package in job.hidden:
        sys.modules[package] = None  # type: ignore[assignment]  # so it is "not installed"
    import torch

    torch.save({name: answers(name, job) for name in job.models}, job.out)


def answers(name: str, job: Job) -> dict[str, Any]:
    """``ways``: the answers by way and quantity; ``ops``: of flashlin that ran where patched."""
    import torch

    from matrix.stacks import models, ways
    model, options = models.named(name), {}
    if job.reference == "interpreter":
        begin_interpreter()
    if job.reference == "transformers":
        model = models.COUNTERPARTS[name]
    elif job.weights:
        options["weights"] = torch.load(job.weights)[name]["weights"]
    found: dict[str, Any] = {"ways": {}, "ops": []}
    try:
        for way in job.ways:
            if way == "plain" and not found["ways"].get("raw", {}).get("logits", ways.Answer()).raises:
                continue  # the program itself has taken plain torch
            found["ways"][way], ops = ways.run(model, way, job.patches, **options)
            found["ops"] = ops if way == "patched" else found["ops"]
    except models.NoSuchModel:
        return {}
    except Exception:
        return {"broken": traceback.format_exc()[-2000:]}
    if job.reference == "transformers":
        found["weights"] = {models.in_mamba_ssm(key): x for key, x in models.build(model).state_dict().items()}
        found["ways"] = {way: {quantity: renamed(one) for quantity, one in said.items()}
                         for way, said in found["ways"].items()}
    return plain(found)


def renamed(answer: Any) -> Any:
    from matrix.stacks.models import in_mamba_ssm
    return answer._replace(**{key: {in_mamba_ssm(name): x for name, x in getattr(answer, key).items()}
                              for key in ("tensors", "wants")})


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """As ``torch.load`` reads it: dicts, strings and tensors."""
    return {**found, "ways": {way: {quantity: one._asdict() for quantity, one in said.items()}
                              for way, said in found["ways"].items()}}


_begun: list[str] = []


def begin_interpreter() -> None:
    from matrix.stacks import interpreter
    if not _begun:
        interpreter.begin()
        for module in ("fla.layers", "fla.models"):
            importlib.import_module(module)
        interpreter.loops()
        _begun.append("fla")


if __name__ == "__main__":
    main()
