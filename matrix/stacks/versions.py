"""List the stacks: sets of package versions that are tested together."""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matrix.environments import stack_environment
from matrix.stacks.models import MODELS, Model

# Optional packages that are hidden unless a stack names them. They change the behavior of models: with fla
# installed, the torch path of transformers models raises an error.
OPTIONAL = ("fla", "transformers", "mamba_ssm", "causal_conv1d", "kernels")
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "kimi_linear", "bailing_hybrid")


class Stack(NamedTuple):
    """One set of package versions, with the models to run under it.

    versions: package name -> version.
    of: package that defines the models.
    patches: arguments of ``flashlin.patched``.
    reference: source of the reference results if the raw program has no torch path: ``interpreter`` (the
        interpreter of Triton), ``without fla``, or ``transformers`` (its versions of the same models).
    only: names of the models to run; empty for all models of the package.
    on_cuda: True if layers check that their weights are on a GPU. Patched layers then skip this check.
    """
    versions: dict[str, str]
    of: str = "transformers"
    patches: tuple[str, ...] = ("transformers",)
    reference: str = ""
    only: tuple[str, ...] = ()
    on_cuda: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{package} {version}" for package, version in self.versions.items())

    @property
    def models(self) -> list[Model]:
        return [one for one in MODELS if one.package == self.of and (not self.only or one.name in self.only)]

    @property
    def file(self) -> str:
        return "stacks-" + "-".join(f"{package}-{version}" for package, version in self.versions.items())

    def hidden(self) -> list[str]:
        return [name for name in OPTIONAL if name not in self.versions]

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        return stack_environment(cache=cache, **self.versions)


NEWEST = "5.24.0"
BEFORE = "5.23.0"  # the last release that passes a cache on as past_key_values
STACKS: tuple[Stack, ...] = (
    Stack({"transformers": NEWEST}),
    Stack({"transformers": BEFORE}),
    Stack({"transformers": "5.19.0"}),
    Stack({"transformers": "5.19.0", "kernels": "0.17.2"}),
    Stack({"transformers": "5.15.1"}),
    *(Stack({"transformers": version}, on_cuda=True)
      for version in ("5.14.1", "5.13.0", "5.10.0", "5.8.0", "5.5.0", "5.0.0", "4.57.6")),
    Stack({"transformers": BEFORE, "fla": "0.6.0"}, patches=("fla", "transformers"),
          reference="without fla", only=DELTA),
    # The functions of fla are the same as in the stacks below. These stacks only compare a program with itself,
    # such as tokens with and without a cache.
    *(Stack({"fla": version, "transformers": NEWEST}, "fla", ("fla",)) for version in ("0.6.0", "0.5.2")),
    *(Stack({"fla": version, "transformers": transformers}, "fla", ("fla",), "interpreter")
      for version, transformers in (("0.6.0", BEFORE), ("0.5.2", BEFORE), ("0.4.2", "4.57.6"))),
    Stack({"mamba_ssm": "2.3.2.post1", "transformers": BEFORE}, "mamba_ssm", ("mamba_ssm",), "transformers"),
)
