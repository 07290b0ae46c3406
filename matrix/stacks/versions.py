"""The stacks: which packages stand together, in which versions."""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matrix.environments import stack_environment
from matrix.stacks.models import MODELS, Model

# What a program may find beside the packages that a stack names. It must not: fla alone turns the torch path
# of transformers' models into an error.
OPTIONAL = ("fla", "transformers", "mamba_ssm", "causal_conv1d", "kernels")
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "kimi_linear", "bailing_hybrid")


class Stack(NamedTuple):
    """versions: of packages. of: whose models. patches: the arguments of ``flashlin.patched``. reference:
    where the raw program's numbers come from, if it has no torch path: ``interpreter``, Triton's;
    ``without fla``; ``transformers``, which has the same models. only: some of the models. on_cuda: layers
    ask where their weights are, so that patched ones have to be told that they are on a GPU."""
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
BEFORE = "5.23.0"  # the last that hands a cache on as past_key_values
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
    # Its functions are those of the stacks below. New is what is asked of a program beside itself: tokens with
    # the cache and without
    *(Stack({"fla": version, "transformers": NEWEST}, "fla", ("fla",)) for version in ("0.6.0", "0.5.2")),
    *(Stack({"fla": version, "transformers": transformers}, "fla", ("fla",), "interpreter")
      for version, transformers in (("0.6.0", BEFORE), ("0.5.2", BEFORE), ("0.4.2", "4.57.6"))),
    Stack({"mamba_ssm": "2.3.2.post1", "transformers": BEFORE}, "mamba_ssm", ("mamba_ssm",), "transformers"),
)
