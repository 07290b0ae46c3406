"""Simulated machines with GPUs, torch, Triton, driver, environment variables and packages.

A simulated machine also shows the effect of shell commands, so that tests can follow the advice of doctor.
"""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from flashlin import policy
from flashlin.compat import releases
from flashlin.compat.target import BEFORE_VOLTA, SHARED_PER_BLOCK, card_named, parse
from flashlin.compat.versions import release
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics.advice import _violated
from flashlin.diagnostics.driver import Driver, Seen
from flashlin.diagnostics.machine import Dist, Machine, attempt
from flashlin.diagnostics.packages import Section
from flashlin.diagnostics.report import Report

SITE = "/env/lib/python3.11/site-packages"
KNOWN = (*BEFORE_VOLTA, *SHARED_PER_BLOCK)


class World(NamedTuple):
    """One simulated machine.

    cards: names of its GPUs.
    torch: version as pip reports it; ``2.13.0+cpu`` for a build without CUDA, ``""`` if it is missing.
    triton: version; ``""`` if it is missing.
    torch_error, triton_error: error that the import raises; ``""`` for none.
    beside: names of other Triton distributions in the same folder.
    driver: version; ``""`` if there is no driver.
    others: further packages that require some version of torch or Triton.
    installer: program that installed torch: pip, uv or conda.
    variables: environment variables of the shell.
    python: major and minor version.
    mode: compute mode of the GPUs.
    """

    cards: tuple[str, ...] = ()
    torch: str = "2.10.0"
    triton: str = "3.6.0"
    torch_error: str = ""
    triton_error: str = ""
    beside: tuple[str, ...] = ()
    driver: str = "580.65.06"
    others: tuple[Dist, ...] = ()
    installer: str = "pip"
    variables: tuple[tuple[str, str], ...] = ()
    python: tuple[int, int] = (3, 11)
    mode: str = "Default"

    @property
    def cuda(self) -> str | None:
        return None if self.torch.endswith("+cpu") or not self.torch else releases.wheels(self.torch).cuda

    @property
    def seen(self) -> bool:
        """Return True if torch can use the GPUs."""
        return bool(
            self.cards
            and self.cuda
            and not self.torch_error
            and self.driver
            and int(self.driver.split(".")[0]) >= releases.oldest_driver(self.cuda)
            and "CUDA_VISIBLE_DEVICES" not in dict(self.variables)
        )

    def machine(self) -> Machine:
        amd = any(parse(card).backend == "hip" for card in self.cards)
        wheel = releases.wheels(self.torch)
        code = [
            f"sm_{major}{minor}" for major, minor in KNOWN if wheel.oldest <= (major, minor) <= wheel.newest
        ]
        module = SimpleNamespace(
            __version__=self.torch,
            version=SimpleNamespace(cuda=None if amd else self.cuda, hip="6.2" if amd else None),
            cuda=SimpleNamespace(get_arch_list=lambda: code),
        )
        usable = "" if self.triton_error else self.triton
        error = self.triton_error or ("" if self.triton else "not installed")
        there = not self.torch_error and bool(self.torch)
        targets = (
            {
                f"cuda:{index}": parse(f"{card},triton={usable or 'none'}", torch_version=self.torch)
                for index, card in enumerate(self.cards)
            }
            if self.seen or amd
            else {"cpu": parse(f"cpu,triton={usable or 'none'}", torch_version=self.torch)}
        )
        known = [card_named(card) for card in self.cards]
        cards = tuple(
            Seen(name, card.capability, 70_000, 80_000, self.mode)
            for name, card in filter(None, known)
            if card.backend == "cuda"
        )
        dists = [
            *(
                [
                    Dist(
                        "torch",
                        self.torch.partition("+")[0] if self.cuda else self.torch,
                        SITE,
                        self.installer,
                    )
                ]
                if self.torch
                else []
            ),
            *([Dist("triton", self.triton, SITE, self.installer)] if self.triton else []),
            *(Dist(name, "3.0.0", SITE) for name in self.beside),
            *self.others,
        ]
        settings, wrong = attempt(policy.from_environment, dict(self.variables))
        missing = "ModuleNotFoundError: No module named 'torch'"
        return Machine(
            module if there else None,
            "" if there else self.torch_error or missing,
            usable,
            error,
            targets if there else {},
            {},
            settings or policy.Policy(),
            wrong,
            Driver(self.driver if cards else "", cards if self.driver else ()),
            tuple(dists),
            self.python,
        )

    def after(self, command: str) -> World:
        """Return the machine after a shell command line.

        A requirement that is already satisfied changes nothing, as with pip. The method fails if the command
        breaks another package, or if the new Triton has no wheel for this Python.
        """
        world = self
        for step in filter(None, command.split(" && ")):
            world = world._step(shlex.split(step))
        for one in world.others:
            asks = [need for need in one.needs if _violated(need, releases.Pair(world.torch, world.triton))]
            assert not asks, f"{command} breaks {one.name}, which needs {asks}"
        made = next((one for one in releases.RELEASES if one.version == world.triton), None)
        if made is not None and command:
            first, _, last = made.python.partition(" to ")
            assert release(first)[:2] <= self.python <= release(last)[:2], (
                f"{command}: no wheel for this Python"
            )
        return world

    def _step(self, words: list[str]) -> World:
        if words[0] == "unset":
            return self._replace(variables=tuple(one for one in self.variables if one[0] != words[1]))
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            return self._replace(
                variables=(*(one for one in self.variables if one[0] != name), (name, value))
            )
        if words[:2] == ["sudo", "nvidia-smi"]:
            return self._replace(mode={"DEFAULT": "Default"}[words[-1]])
        if words[:3] == ["pip", "uninstall", "-y"]:
            return self._replace(triton="", triton_error="", beside=())
        assert (
            "install" in words and words[0] == {"pip": "pip", "uv": "uv", "conda": "conda"}[self.installer]
        ), words
        flags, index = (
            {word for word in words if word.startswith("--")},
            words[words.index("--index-url") + 1] if "--index-url" in words else "",
        )
        what = next(word for word in words[words.index("install") + 1 :] if word[0] in "tp" and "=" in word)
        name, version = re.split(r"[=~]=?", what, maxsplit=1)
        again = bool(flags & {"--force-reinstall", "--reinstall"})
        if name == "triton":
            return self._triton(version.removesuffix(".0") if "~=" in what else version, again)
        assert name in ("torch", "pytorch") and "~" not in what
        if self.torch.partition("+")[0] == version and not again:
            return self
        lacks = "cannot open shared object file" in self.torch_error and "--no-deps" in flags
        world = self._replace(
            torch=version + ("+cpu" if index.endswith("/cpu") else ""),
            torch_error=self.torch_error if lacks else "",
        )
        return world if "--no-deps" in flags else world._triton(releases.triton_for(version), False)

    def _triton(self, wanted: str, again: bool) -> World:
        if releases.is_that(self.triton, wanted) and not again:
            return self
        return self._replace(
            triton=releases.nearest(f"{wanted}.99" if wanted.count(".") == 1 else wanted).version,
            triton_error="",
        )

    def doctor(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Report:
        """Return the report of doctor on this machine."""
        with monkeypatch.context() as here:
            here.setattr(diagnosis, "examine", self.machine)
            here.setattr(diagnosis, "section", lambda machine, import_all, children: (Section(), {}))
            for name, value in self.variables:
                here.setenv(name, value)
            return diagnosis.doctor(**given)
