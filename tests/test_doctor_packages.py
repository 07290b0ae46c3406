"""Tests of doctor's section on other packages (installed, broken, old, missing) and on models using them."""
from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashlin
from flashlin.__main__ import main
from flashlin.compat.known_flaws import KNOWN_FLAWS, MODELS, UNPATCHED
from flashlin.diagnostics import importing, packages
from flashlin.diagnostics.importing import Tried
from flashlin.diagnostics.layers import op_of, over_heads, spans, together
from flashlin.diagnostics.packages import PACKAGES, Section, section
from flashlin.diagnostics.report import Flaw, Layer, Report
from flashlin.integrations import patching, probing, transformers
from flashlin.integrations.bindings import Bindings, Replaced, named_like
from matrix.stacks import models as programs
from tests.machines import H200, installed, made, package, read, run

pytestmark = pytest.mark.usefixtures("default_settings")
NO_GPU = "triton=3.7.1,backend=cpu"
T4 = "triton=3.7.1,sm=75"

# An imitation of the wrapper of transformers around a model's own function. The names of its variables are
# those of transformers, because flashlin reads them.
DECORATED = """
    def decorated(own, implementation, func_name):
        applicable_params = ("x",)
        def wrapped(*args, **kwargs):
            return implementation(*args, **{name: value for name, value in kwargs.items()
                                            if name in applicable_params}), func_name
        wrapped.__wrapped__ = own
        return wrapped
    def own(x): pass
    def foreign(x): pass
"""


class World:
    """A simulated machine with a chosen set of installed packages.

    No package is imported. Only the modeling files of transformers that a test chooses count as imported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.broken = folder, dict[str, Tried]()
        self.patched = dict[str, patching.Patch]()

    def fresh(self) -> World:
        """Return this machine with no package installed and none imported."""
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        self.folder = self.folder.with_name(self.folder.name + "_")
        self.folder.mkdir()
        sys.path[:] = [str(self.folder)]
        return self

    def make(self, on: str = H200, broken: tuple[str, ...] = (), models: Mapping[str, Any] | None = None,
             patched: tuple[str, ...] = (), **versions: str) -> Section:
        self.broken = {name: Tried("ImportError: libcuda.so.1", 0.1) for name in broken}
        for name, version in versions.items():
            known = {kind: key for key, kinds in PACKAGES.items() for kind in kinds.distributions}
            pip = name.replace("_", "-")
            root = known.get(pip, name)
            if not (self.folder / root).exists():
                package(self.folder, root, "")
            for one in [pip] if pip in known else PACKAGES[root].distributions:
                installed(self.folder, one, version)
        for name, calls in (models or {}).items():
            self.model(name, calls)
        importlib.invalidate_caches()
        self.patched.clear()
        for name in patched:
            self.patched[name] = patching.Patch()
            self.patched[name].bindings.replaced += [Replaced("fla.ops", "f", "flashlin.f")] * 7
        found, _ = section(made(on), import_all=True)
        return found

    def model(self, name: str, calls: Mapping[str, str]) -> None:
        where = f"transformers.models.{name}.modeling_{name}"
        names: dict[str, Any] = {"__name__": where}
        lines = DECORATED.replace("\n    ", "\n").splitlines()
        for attribute, whose in calls.items():
            lines.append(f"{attribute} = decorated(own, {'own' if whose == 'torch' else 'foreign'}, "
                         f"{probing.CALLED.get(attribute, attribute)!r})")
            lines.append(f"foreign.__module__ = {f'{whose}.ops'!r}")
        exec("\n".join(lines), names)
        module = type(sys)(where)
        vars(module).update(names)
        sys.modules[where] = module


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    mine = World(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items()
                                         if name.partition(".")[0] not in PACKAGES})
    monkeypatch.setattr(packages, "tried", lambda modules: {name: mine.broken.get(name, Tried("", 0.1))
                                                            for name in modules})
    monkeypatch.setattr(patching, "_in_force", mine.patched)
    yield mine


# --- the table of flaws: each is reported where it exists, and not on similar machines ---

GDN_TORCH = {"qwen3_next": {"torch_chunk_gated_delta_rule": "torch"}}
KDA_FLA = {"kimi_linear": {"chunk_kimi_delta_attention": "fla"}}
GDN_FLA = {"qwen3_next": {"torch_chunk_gated_delta_rule": "fla"}}


def split(name: str, whose: str) -> dict[str, Any]:
    return {name: {"mamba2_split_conv1d_scan_combined": whose}}


def conv(name: str) -> dict[str, Any]:
    return {name: {"causal_conv1d_fn": "torch"}}


# For each flaw's id: a world that has the flaw, and similar worlds that do not have it.
WORLDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "fla-without-gpu": (dict(fla="0.6.0", on=NO_GPU),
                        [dict(fla="0.6.0"), dict(transformers="5.23.0", on=NO_GPU)]),
    "fla-gated-backward-hopper": (dict(fla="0.6.0"), [
        dict(fla="0.6.0", on="triton=3.7.1,sm=90"), dict(fla="0.6.0", on="triton=3.6.0,sm=80"), {}]),
    "decoding-in-torch": (dict(transformers="5.15.1", fla="0.6.0"), [
        dict(transformers="5.16.0", fla="0.6.0"), dict(transformers="5.14.1", fla="0.6.0"),
        dict(transformers="5.15.1"), dict(transformers="5.15.1", fla="0.6.0", on=NO_GPU)]),
    "fla-core-alone": (dict(transformers="5.16.0", fla_core="0.6.0"), [
        dict(transformers="5.16.0", fla="0.6.0"), dict(transformers="5.17.0", fla_core="0.6.0"),
        dict(transformers="5.14.1", fla_core="0.6.0"), dict(transformers="5.16.0"),
        dict(transformers="5.16.0", fla_core="0.6.0", on=NO_GPU)]),
    "broken-called-missing": (dict(transformers="5.23.0", mamba_ssm="2.3.2", broken=("mamba_ssm",), on=NO_GPU), [
        dict(transformers="5.23.0", mamba_ssm="2.3.2"), dict(transformers="5.23.0"),
        dict(transformers="5.14.1", mamba_ssm="2.3.2", broken=("mamba_ssm",))]),
    "hub-kernels-out-of-range": (dict(transformers="5.23.0", kernels="0.17.2"), [
        dict(transformers="5.23.0", kernels="0.18.2"), dict(transformers="5.22.2", kernels="0.17.2"),
        dict(transformers="5.23.0"), dict(transformers="5.23.0", kernels="0.17.2", on=NO_GPU)]),
    "mamba-ssm-removed-classes": (dict(transformers="5.0.0", mamba_ssm="2.2.6.post3", on=NO_GPU), [
        dict(transformers="5.0.0", mamba_ssm="2.3.0"), dict(transformers="4.57.6", mamba_ssm="2.2.4"),
        dict(transformers="5.0.0")]),
    "fla-cache-swallowed": (dict(transformers="5.24.0", fla="0.6.0"), [
        dict(transformers="5.23.0", fla="0.6.0"), dict(transformers="5.24.0")]),
    "fla-prompt-dropped": (dict(transformers="5.23.0", fla="0.5.2"), [
        dict(transformers="5.24.0", fla="0.5.2"), dict(transformers="5.0.0", fla="0.5.2"),
        dict(transformers="5.23.0", fla="0.6.0"), dict(transformers="5.23.0")]),
    "fla-beams": (dict(fla="0.5.2"), [dict(fla="0.6.0"), dict(transformers="5.23.0")]),
    "cuda-weights-only": (dict(transformers="5.14.1", models=split("mamba2", "torch")), [
        dict(transformers="5.15.0", models=split("mamba2", "torch")),
        dict(transformers="4.57.6", models=split("mamba2", "torch")),
        dict(transformers="5.14.1", models=GDN_TORCH)]),
    "rwkv7-input-overwritten": (dict(fla="0.6.0"), [
        dict(fla="0.1.2"), dict(fla="0.6.0", on=NO_GPU), dict(transformers="5.23.0")]),
    "fla-capture-failed": (dict(fla="0.6.0"), [
        dict(fla="0.6.0", on=NO_GPU), dict(transformers="5.23.0")]),
    "fla-mom-sees-ahead": (dict(fla="0.6.0"), [dict(transformers="5.23.0")]),
    "fla-mom-order": (dict(fla="0.6.0"), [dict(transformers="5.23.0")]),
    "fla-packed-models": (dict(fla="0.6.0"), [dict(transformers="5.23.0")]),
    "packing-ignored": (dict(transformers="5.19.0", models=GDN_TORCH), [
        dict(transformers="5.20.0", models=GDN_TORCH), dict(transformers="5.14.1", models=GDN_TORCH),
        dict(transformers="5.19.0", models=GDN_FLA), dict(transformers="5.19.0", models=conv("lfm2"))]),
    "kda-packing-dropped": (dict(transformers="5.23.0", models=KDA_FLA), [
        dict(transformers="5.23.0", models=GDN_FLA), dict(transformers="5.14.1", models=KDA_FLA)]),
    "position-ids-alone": (dict(transformers="5.23.0", models=GDN_FLA), [
        dict(transformers="5.23.0"), *(dict(transformers="5.23.0", models=conv(one))
                                       for one in ("mamba", "zamba", "inkling"))]),
    "mamba-without-seq-idx": (dict(transformers="5.23.0", models=conv("jamba")), [
        dict(transformers="5.23.0", models=split("mamba2", "torch"))]),
    "mamba2-drops-arguments": (dict(transformers="5.23.0", models=split("mamba2", "torch")), [
        dict(transformers="5.23.0", models=split("bamba", "torch"))]),
    "granite-packed-attention": (dict(transformers="5.23.0", models=split("granitemoehybrid", "torch")), [
        dict(transformers="5.23.0", models=split("bamba", "torch"))]),
    "own-mask-packed-attention": (dict(transformers="5.1.0", models=split("bamba", "torch")), [
        dict(transformers="5.2.0", models=split("bamba", "torch")),
        dict(transformers="5.1.0", models=split("mamba2", "torch"))]),
    "zamba-packed-convolution": (dict(transformers="5.23.0", models=conv("zamba")), [
        dict(transformers="5.23.0", models=conv("zamba2"))]),
    "packed-attention-beside-mask-or-cache": (dict(transformers="5.24.0", models=conv("jamba")), [
        dict(transformers="5.24.0", models=split("mamba2", "torch"))]),
    "indexed-packed-attention": (dict(transformers="5.24.0", models={"glm5_next": KDA_FLA["kimi_linear"]}), [
        dict(transformers="5.24.0", models=KDA_FLA)]),
    "recurrent-not-patched": (dict(transformers="5.24.0", models={"minimax": {}}), [
        dict(transformers="5.24.0", models={"mixtral": {}}), dict(transformers="5.24.0")]),
    "inkling-packed-convolution": (dict(transformers="5.23.0", models=conv("inkling")), [
        dict(transformers="5.24.0", models=conv("inkling2")), dict(transformers="5.23.0", models=conv("lfm3"))]),
    "fla-mom-cache": (dict(fla="0.6.0"), [dict(transformers="5.23.0")]),
    "mamba-continuation": (dict(transformers="5.23.0", models=conv("mamba")), [
        dict(transformers="5.23.0", models=split("mamba2", "torch"))]),
    "gdn-continuation": (dict(transformers="5.6.0", models=GDN_TORCH), [
        dict(transformers="5.7.0", models=GDN_TORCH), dict(transformers="5.6.0", models=KDA_FLA)]),
    "mamba2-continuation": (dict(transformers="5.12.0", models=split("bamba", "torch")), [
        dict(transformers="5.13.0", models=split("bamba", "torch")),
        dict(transformers="5.12.0", models=conv("mamba"))]),
    "lfm-continuation": (dict(transformers="5.14.1", models=conv("lfm2")), [
        dict(transformers="5.15.0", models=conv("lfm2")), dict(transformers="5.14.1", models=conv("inkling"))]),
    "bamba-positions": (dict(transformers="5.23.0", models=split("bamba", "torch")), [
        dict(transformers="5.23.0", models=split("granitemoehybrid", "torch"))]),
    "sum-over-wrong-chunks": (dict(transformers="5.14.1", models=split("zamba2", "torch")), [
        dict(transformers="5.15.0", models=split("zamba2", "torch")),
        dict(transformers="5.14.1", models=split("bamba", "torch"))]),
    "padding-at-batch-1": (dict(transformers="5.14.1", models=GDN_FLA), [
        dict(transformers="5.15.0", models=GDN_FLA), dict(transformers="5.14.1", models=conv("lfm2"))]),
    "split-left-padding": (dict(transformers="5.23.0", models=split("bamba", "mamba_ssm")), [
        dict(transformers="5.23.0", models=split("bamba", "torch")),
        dict(transformers="5.23.0", models={"bamba": {"mamba2_chunk_scan": "mamba_ssm"}})]),
    "falcon-h1-norm-order": (dict(transformers="5.23.0", models=split("falcon_h1", "mamba_ssm")), [
        dict(transformers="5.23.0", models=split("bamba", "mamba_ssm")),
        dict(transformers="5.23.0", models={"falcon_h1": {"mamba2_chunk_scan": "mamba_ssm"}}),
        dict(transformers="5.23.0", models=split("falcon_h1", "torch"))]),
    "mamba2-groups-in-split": (dict(transformers="5.19.0", models=split("mamba2", "mamba_ssm")), [
        dict(transformers="5.20.0", models=split("mamba2", "mamba_ssm")),
        dict(transformers="5.19.0", models=split("bamba", "mamba_ssm")),
        dict(transformers="5.19.0", models={"mamba2": {"mamba2_chunk_scan": "mamba_ssm"}}),
        dict(transformers="5.19.0", models=split("mamba2", "torch"))]),
}


def flaw(found: Section, name: str) -> Flaw | None:
    return next((one for one in found.flaws if one.id == name), None)


def test_every_flaw_has_its_worlds() -> None:
    assert [one.id for one in KNOWN_FLAWS] == list(WORLDS)
    assert all(without for _, without in WORLDS.values())


@pytest.mark.parametrize("name", WORLDS)
def test_a_flaw_is_told_where_it_is(name: str, world: World) -> None:
    found = world.make(**WORLDS[name][0])
    told, known = flaw(found, name), next(one for one in KNOWN_FLAWS if one.id == name)
    assert told is not None and told.where and told.remedy and told.source
    assert told.status == ("degraded" if known.always else "could not check")
    assert known.always or told.effect.startswith("if "), "the effect begins with its condition"


@pytest.mark.parametrize(("name", "beside"), [(name, beside) for name, (_, without) in WORLDS.items()
                                              for beside in without])
def test_and_not_right_beside_it(name: str, beside: dict[str, Any], world: World) -> None:
    assert flaw(world.make(**beside), name) is None


CONDITIONS = ("since", "fixed_in", "beside", "without", "broken", "card", "models", "kernels", "bound")


@pytest.mark.parametrize(("name", "condition"), [
    (one.id, condition) for one in KNOWN_FLAWS for condition in CONDITIONS
    if getattr(one, condition) != getattr(type(one), condition)])
def test_no_condition_of_a_flaw_can_be_left_out(name: str, condition: str, world: World,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    without = [replace(one, **{condition: getattr(type(one), condition)})
               for one in KNOWN_FLAWS if one.id == name]
    monkeypatch.setattr(packages, "KNOWN_FLAWS", tuple(without))
    assert any(world.fresh().make(**beside).flaws for beside in WORLDS[name][1])


@pytest.mark.parametrize("name", WORLDS)
def test_a_patch_in_force_takes_away_what_it_can(name: str, world: World) -> None:
    known = next(one for one in KNOWN_FLAWS if one.id == name)
    told = flaw(world.make(**WORLDS[name][0], patched=("fla", "transformers", "mamba_ssm")), name)
    assert told is not None and (told.status == "worked around") == bool(known.mended_by)


def test_what_a_patch_mends_from_a_release_on_it_does_not_before(world: World) -> None:
    found = world.make(transformers="5.14.1", models=split("bamba", "mamba_ssm"), patched=("transformers",))
    told = flaw(found, "split-left-padding")
    assert told is not None and told.status == "could not check"


# --- installed packages ---

def test_a_machine_without_any_of_them_says_nothing(world: World) -> None:
    assert world.make() == Section()
    text = Report(version="1", devices=(), checks=(), plans=(), issues=()).text()
    assert "ackage" not in text and "model" not in text


def test_installed_packages_with_their_versions_and_what_a_patch_would_change(world: World) -> None:
    found = {one.name: one for one in world.make(
        transformers="5.23.0", fla="0.6.0", causal_conv1d="1.7.0", kernels="0.17.2", broken=("causal_conv1d",),
        models={"qwen3_next": {"torch_chunk_gated_delta_rule": "fla", "causal_conv1d_fn": "torch"}}).packages}
    assert {name: (one.version, one.status) for name, one in found.items()} == {
        "transformers": ("5.23.0", "ok"), "fla": ("0.6.0", "ok"), "causal_conv1d": ("1.7.0", "degraded"),
        "kernels": ("0.17.2", "ok")}
    assert found["causal_conv1d"].imports == "cannot be imported: ImportError: libcuda.so.1"
    assert found["fla"].imports == "yes, in 0.1 s"
    assert found["transformers"].patch == (
        'flashlin.patch("transformers") would replace functions in 2 places of loaded modules')
    assert found["fla"].patch.endswith("in modules imported later") and not found["kernels"].patch


def test_unsloth_is_not_imported_and_its_copy_of_fla_is_told(world: World) -> None:
    copy = package(world.folder, "unsloth_zoo", "") / "unsloth_zoo" / "_vendored" / "fla" / "__init__.py"
    copy.parent.mkdir(parents=True)
    copy.touch()
    before = world.make(unsloth="2026.11.1", unsloth_zoo="2026.11.2", broken=("unsloth", "unsloth_zoo"))
    assert {one.name: (one.version, one.status, one.imports) for one in before.packages} == {
        "unsloth": ("2026.11.1", "ok", "not tried: it changes other packages when it is imported"),
        "unsloth_zoo": ("2026.11.2", "ok",
                        "not tried: it changes other packages when it is imported; has a copy "
                                           "of fla to load under that name")}
    fla = sys.modules["fla"] = type(sys)("fla")
    fla.__version__, fla.__file__ = "0.5.1", str(copy)  # type: ignore[attr-defined]
    after = world.make(transformers="5.23.0", models=GDN_FLA)
    assert {one.name: one.imports for one in after.packages}["fla"] == "loaded, the copy in unsloth_zoo"
    [one] = after.bindings
    assert (one.implementation, one.why) == ("fla", "the copy in unsloth_zoo")


def test_a_patch_in_force_is_told(world: World) -> None:
    (one,) = world.make(fla="0.6.0", patched=("fla",)).packages
    assert one.patch == "patched now, in 7 places"


def test_the_version_of_a_package_that_pip_does_not_know(world: World) -> None:
    package(world.folder, "mamba_ssm", '__version__ = "2.3.2"\nraise ImportError("not to be imported")')
    package(world.folder, "causal_conv1d", "")
    assert {one.name: one.version for one in world.make().packages} == {"mamba_ssm": "2.3.2",
                                                                        "causal_conv1d": "unknown"}


def test_files_that_are_gone_are_told(world: World) -> None:
    installed(world.folder, "kernels", "0.17.2")
    (one,) = world.make().packages
    assert one.status == "degraded" and "no such package is on the path" in one.imports


def test_modules_that_stand_for_a_package_are_told_from_it(world: World) -> None:
    sys.modules["mamba_ssm"] = type(sys)("mamba_ssm")
    sys.modules["mamba_ssm"].__version__ = "2.3.2"  # type: ignore[attr-defined]
    (one,) = world.make().packages
    assert (one.version, one.imports) == ("2.3.2", "no: stub modules of a patch replace it")


def test_without_torch_nothing_is_tried(world: World) -> None:
    installed(package(world.folder, "fla", ""), "fla-core", "0.6.0")
    found, imports = section(made(NO_GPU)._replace(torch=None), import_all=True)
    assert [one.imports for one in found.packages] == ["not tried without torch"] and not imports


def test_python_tries_only_what_a_loaded_file_misses(world: World) -> None:
    world.make(transformers="5.23.0", fla="0.6.0", mamba_ssm="2.3.2", models=GDN_TORCH)
    found, imports = section(made(H200), import_all=False)
    assert set(imports) == {"fla"}
    assert {one.name: one.imports[:9] for one in found.packages}["mamba_ssm"] == "not tried"


@pytest.mark.parametrize(("on", "whose", "status", "why"), [
    (H200, "torch", "degraded", "fla is not installed"), (NO_GPU, "torch", "ok", "fla is not installed"),
    (H200, "fla", "ok", ""), (NO_GPU, "fla", "degraded", "kernels of fla cannot start without a GPU")])
def test_what_a_loaded_file_is_bound_to(on: str, whose: str, status: str, why: str, world: World) -> None:
    (one,) = world.make(on=on, transformers="5.23.0",
                        models={"qwen3_next": {"torch_chunk_gated_delta_rule": whose}}).bindings
    assert one.where == "transformers.models.qwen3_next.modeling_qwen3_next"
    assert one.kernels == "chunk_gated_delta_rule"
    assert (one.implementation, one.status, one.why) == (whose, status, why)


def test_a_broken_import_is_the_reason_that_is_told(world: World) -> None:
    (one,) = world.make(transformers="5.23.0", fla="0.6.0", broken=("fla",), models=GDN_TORCH).bindings
    assert one.why == "fla cannot be imported: ImportError: libcuda.so.1"


# --- imports in child processes ---

@pytest.mark.alternate
def test_children_say_what_an_import_raises_and_how_one_ends_or_hangs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"fine": "print('noise')", "raising": "import selective_scan_cuda",
             "ending": "import os; os._exit(3)", "aborting": "import os; os.abort()",
             "hanging": "import time; time.sleep(600)"}
    for name, text in texts.items():
        package(tmp_path, name, text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importing.tried({name: name for name in texts if name != "hanging"})
    assert found["fine"].error == "" and found["fine"].seconds < 60
    assert found["raising"].error == "ModuleNotFoundError: No module named 'selective_scan_cuda'"
    assert found["ending"].error == "its import ended with exit code 3"
    assert found["aborting"].error.startswith("its import ended by SIGABRT")
    since = time.monotonic()
    hung = importing.tried({"hanging": "hanging", "fine": "fine"}, limit=10.0)
    assert time.monotonic() - since < 45
    assert hung["hanging"][::2] == ("its import gave no answer in 10 s and was ended", False)
    assert hung["fine"].known, "the result arrived while another child hung"


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="Windows has no nice")
def test_children_have_a_low_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "telling", "import os, pathlib\n"
            "group = pathlib.Path('/proc/self/autogroup')\n"
            "weight = (group.read_text().split() if group.exists() else []) or ['10']\n"
            "raise ImportError(f'nice {os.getpriority(os.PRIO_PROCESS, 0)} {weight[-1]}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    found = importing.tried(dict.fromkeys("abcd", "telling"))
    assert {one.error for one in found.values()} == {f"ImportError: nice {lowered} 10"}


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="Windows has no sessions")
def test_a_process_lowers_only_its_own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = iter([BlockingIOError(), PermissionError()])

    class Group:
        def write_text(self, text: str) -> None:
            written.append(text)
            raise next(refusing)
    written: list[str] = []
    monkeypatch.setattr(importing, "AUTOGROUP", Group())
    monkeypatch.setattr(os, "nice", lambda more: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid() + 1)
    importing.step_back()
    assert not written
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    importing.step_back()
    assert written == ["10", "10"], "again after Linux was busy, and not again after it refused"


def test_a_broken_extension_is_known_before_the_rest_of_its_package_is_imported(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "causal_conv1d", "import time; time.sleep(600)")
    package(tmp_path, "causal_conv1d_cuda", "raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    one = importing.tried({"causal_conv1d": "causal_conv1d"})["causal_conv1d"]
    assert one == Tried("ImportError: undefined symbol: _ZN3c10", one.seconds) and one.seconds < 60


def test_a_hang_could_not_be_checked(world: World) -> None:
    installed(package(world.folder, "kernels", ""), "kernels", "0.17.2")
    world.broken = {"kernels": Tried("its import gave no answer in 60 s and was ended", 60, known=False)}
    found, _ = section(made(NO_GPU), import_all=True)
    assert [(one.status, one.imports) for one in found.packages] == [
        ("could not check", "its import gave no answer in 60 s and was ended; "
                            "flashlin doctor --imports SECONDS waits longer")]


def test_the_command_line_tries_them_and_a_broken_one_fails_no_job(tmp_path: Path) -> None:
    for name, version, text in (
            ("fla", "0.6.0", "print('noise on stdout')"), ("transformers", "5.23.0", ""),
            ("mamba_ssm", "2.3.2", "import selective_scan_cuda"), ("causal_conv1d", "1.7.0", "1 / 0")):
        installed(package(tmp_path, name, text), *(PACKAGES[name].distributions[0], version))
    (tmp_path / "fla" / "ops").mkdir()
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("")
    (tmp_path / "transformers" / "modeling_utils.py").write_text("")
    done = run("doctor", "--json", path=(tmp_path,))
    found = read(done)
    assert done.returncode == 0 and found.ok
    assert found.verdict.startswith("degraded. Every op runs, but calls of other packages may run slowly or fail: ")
    said = {one.name: one.imports for one in found.packages}
    assert said["mamba_ssm"] == (
        "cannot be imported: ModuleNotFoundError: No module named 'selective_scan_cuda'; "
        'flashlin.patch("mamba_ssm") runs its functions without the extension')
    assert found.advice is not None and "MAMBA_FORCE_BUILD=TRUE pip install" in found.advice.command
    assert said["causal_conv1d"] == "cannot be imported: ZeroDivisionError: division by zero"
    assert said["fla"].startswith("yes, in ") and said["transformers"].startswith("yes, in ")
    assert flaw_ids(found) >= {"broken-called-missing"} and found.fails("degraded")
    assert "selective_scan_cuda" in found.text() and "<summary>Other packages" in found.markdown()


def test_the_command_line_does_not_wait_long_for_an_import(tmp_path: Path) -> None:
    installed(package(tmp_path, "fla", ""), "flash-linear-attention", "0.6.0")
    (tmp_path / "fla" / "ops").mkdir()
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("import time; time.sleep(100)")
    found = read(run("doctor", "--json", "--imports", "0.5", path=(tmp_path,)))
    [fla] = [one for one in found.packages if one.name == "fla"]
    assert fla.status == "could not check" and fla.imports == (
        "its import gave no answer in 0.5 s and was ended; flashlin doctor --imports SECONDS waits longer")


def flaw_ids(found: Report) -> set[str]:
    return {one.id for one in found.flaws}


def test_one_op_and_other_machines_have_no_packages(capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("asked")
    monkeypatch.setattr(packages, "version_of", never)
    assert main(["doctor", "--op", "chunk_gla", "--json"]) == 0
    for found in (Report.model_validate_json(capsys.readouterr().out),
                  flashlin.doctor(target=H200, op="chunk_gla")):
        assert not found.packages and "packages" not in {one.name for one in found.checks}


def test_what_cannot_be_asked_is_a_line_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("metadata cannot be read")
    monkeypatch.setattr(packages, "version_of", fails)
    found = flashlin.doctor()
    (one,) = [one for one in found.checks if one.name == "packages"]
    assert one.status == "could not check"
    assert one.detail == "could not check: OSError: metadata cannot be read"
    assert found.plans


# --- models ---

TINY = dict(vocab_size=50, hidden_size=32, num_hidden_layers=3)


@pytest.fixture(scope="module")
def qwen() -> Any:
    from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **TINY | dict(num_hidden_layers=5), linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=24, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, intermediate_size=32))


@pytest.fixture(scope="module")
def deltanet() -> Any:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**TINY | dict(num_hidden_layers=2), num_heads=2,
                                                        head_dim=16))


@pytest.fixture(scope="module")
def mamba2() -> Any:
    from transformers.models.mamba2 import Mamba2Config, Mamba2ForCausalLM
    return Mamba2ForCausalLM(Mamba2Config(**TINY, num_heads=4, head_dim=16, state_size=8, n_groups=1))


@pytest.fixture(scope="module")
def mamba() -> Any:
    from transformers.models.mamba import MambaConfig, MambaForCausalLM
    return MambaForCausalLM(MambaConfig(**TINY, state_size=8))


def layers(model: nn.Module, target: str | None = None) -> list[Layer]:
    return list(flashlin.doctor(model, target=target, op="chunk_gla").layers)


def calling(rows: list[Layer], kernel: str) -> Layer:
    (one,) = [row for row in rows if kernel in row.function and "causal" not in row.function]
    return one


def test_a_model_of_transformers_layer_by_layer(qwen: Any) -> None:
    rows = layers(qwen)
    assert {row.layers for row in rows} == {"model.layers.0-2,4.linear_attn"}
    assert {(row.kind, row.on) for row in rows} == {("Qwen3NextGatedDeltaNet", "cpu float32")}
    one = calling(rows, "torch_chunk_gated_delta_rule (chunk_gated_delta_rule)")
    assert (one.implementation, one.path) == ("fla", "torch (H=4 K=16 V=24)")
    assert one.verdict == "problem" and one.because == "kernels of fla cannot start without a GPU"
    conv = next(row for row in rows if row.function == "causal_conv1d_update")
    assert (conv.implementation, conv.path, conv.verdict) == ("torch", "torch (K=160 V=4)", "ok")
    assert conv.because == "the model's own torch function: causal_conv1d is not installed"


@pytest.mark.parametrize(("target", "training", "verdict"), [
    (H200, True, "problem"), (H200, False, "ok"), ("triton=3.7.1,sm=90", True, "ok"),
    ("triton=3.6.0,sm=80", True, "ok")])
def test_raw_fla_is_a_problem_only_where_its_backward_is_wrong(target: str, training: bool, verdict: str,
                                                               qwen: Any) -> None:
    one = calling(layers(qwen.train(training), target), "torch_chunk")
    assert one.verdict == verdict and ("hopper-gated-backward-640" in one.because) == (verdict == "problem")
    assert one.path == "triton (H=4 K=16 V=24)"


def test_the_dtype_of_the_weights_decides_the_plan(qwen: Any) -> None:
    assert calling(layers(qwen, T4), "torch_chunk").path == "triton (H=4 K=16 V=24)"
    half = calling(layers(qwen.bfloat16(), T4), "torch_chunk")
    assert (half.path, half.on) == ("triton via fp32 (H=4 K=16 V=24)", "cpu bfloat16")
    qwen.float()


def test_a_model_of_fla_layer_by_layer(deltanet: Any) -> None:
    rows = layers(deltanet)
    one = calling([row for row in rows if row.kind == "GatedDeltaNet"], "chunk_gated_delta_rule")
    assert (one.layers, one.path) == ("model.layers.0-1.attn", "torch (H=2 K=16 V=32)")
    assert one.verdict == "problem" and one.implementation == "fla"
    norm = next(row for row in rows if row.function == "rms_norm")
    assert norm.layers == "model.layers.0-1.attn_norm, model.layers.0-1.mlp_norm, model.norm"
    assert norm.path == "torch (H=1 K=32)"
    silent = next(row for row in rows if row.kind == "SwiGLULinear")
    assert (silent.path, silent.verdict) == ("", "could not check") and "flashlin has no op" in silent.because
    found = flashlin.doctor(deltanet, op="chunk_gla")
    assert not found.ok and "calls rms_norm: kernels of fla cannot start" in found.verdict
    assert "The model" in found.text() and "GatedDeltaNet" in found.markdown()


@pytest.mark.parametrize(("name", "kernel", "path"), [
    ("mamba2", "mamba_chunk_scan_combined", "torch (H=4 K=8 V=16)"),
    ("mamba2", "selective_state_update", "torch (H=4 K=8 V=16)"),
    ("mamba", "selective_scan_fn", "torch (H=1 K=8 V=64)"),
    ("mamba", "mamba_inner_fn", "torch (H=1 K=8 V=64)")])
def test_models_of_mamba(name: str, kernel: str, path: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    here = [row for row in layers(model) if kernel in row.function]
    assert [(row.implementation, row.path, row.verdict, row.layers) for row in here] == [
        ("torch", path, "ok", "backbone.layers.0-2.mixer")]
    (there,) = [row for row in layers(model, H200) if kernel in row.function]
    assert there.verdict == "degraded" and there.path.startswith("triton")


@pytest.mark.usefixtures("proven")
def test_flashlin_s_own_modules() -> None:
    model = nn.Sequential(flashlin.modules.RMSNorm(32), flashlin.ShortConvolution(32, 4, activation="silu"),
                          nn.Linear(32, 32))
    rows = layers(model, T4)
    assert {(row.layers, row.function, row.implementation, row.verdict) for row in rows} == {
        ("0", "_normed (rms_norm)", "flashlin", "ok"), ("1", "causal_conv1d", "flashlin", "ok"),
        ("1", "causal_conv1d_update", "flashlin", "ok")}
    half = layers(model.bfloat16(), "triton=3.2.0,sm=75")
    assert {row.verdict for row in half} == {"degraded"}
    assert all("bf16" in row.because and row.cost for row in half)


@pytest.mark.parametrize("name", sorted(patching.PATCHES))
@pytest.mark.alternate
def test_inside_a_patch_the_layers_call_flashlin_and_after_it_what_they_called(
        name: str, qwen: Any, deltanet: Any) -> None:
    models = {"transformers": qwen, "fla": deltanet}
    before = {kind: layers(model) for kind, model in models.items()}
    try:
        context = flashlin.patched(name)
        context.__enter__()
    except ImportError:
        pytest.skip(f"{name} is not installed")
    try:
        for kind, model in models.items():
            whose = {row.implementation for row in layers(model) if "gated_delta_rule" in row.function}
            assert whose == ({"flashlin"} if name == kind or (name, kind) == ("fla", "transformers") else {"fla"})
    finally:
        context.__exit__(None, None, None)
    assert {kind: layers(model) for kind, model in models.items()} == before


def test_a_stand_in_is_seen_where_it_is_bound(qwen: Any) -> None:
    modeling = sys.modules[type(qwen).__module__]
    before = probing.bound_in(modeling)

    def ours() -> None: ...
    mine = Bindings()
    mine.stands_for(ours, modeling.torch_chunk_gated_delta_rule)
    mine.put(modeling, "torch_chunk_gated_delta_rule", ours, "flashlin.chunk_gated_delta_rule")
    assert ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "flashlin", "") in probing.bound_in(
        modeling)
    assert calling(layers(qwen), "torch_chunk").implementation == "flashlin"
    assert calling(layers(qwen), "torch_chunk").verdict == "ok"
    mine.undo()
    assert probing.bound_in(modeling) == before


def test_a_function_of_flashlin_is_known_under_any_name(world: World) -> None:
    world.model("qwen3_next", {"torch_chunk_gated_delta_rule": "torch"})
    modeling: Any = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
    named = named_like(flashlin.chunk_gated_delta_rule, modeling.own, "fla.ops.x", "any")
    modeling.torch_chunk_gated_delta_rule = modeling.decorated(modeling.own, named, "chunk_gated_delta_rule")
    assert [one.implementation for one in probing.bound_in(modeling)] == ["flashlin"]
    named.__wrapped__ = modeling.own
    modeling.torch_chunk_gated_delta_rule = named
    assert probing.bound_in(modeling) == [
        ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "flashlin", "")]


# --- older releases of transformers ---

def test_kernels_of_a_module_that_keeps_them_in_a_module(world: World) -> None:
    world.model("qwen3_next", {"torch_chunk_gated_delta_rule": "torch"})
    modeling = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]

    def kind(func: Any) -> type:
        class Func:
            kernel_layer_name = "chunk_gated_delta_rule"

            def forward(self, *given: Any) -> Any:
                return func(*given)
        return Func
    one = kind(modeling.torch_chunk_gated_delta_rule)()
    modeling.torch_chunk_gated_delta_rule = one
    (found,) = probing.bound_in(modeling)
    assert found == ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "torch",
                     "fla is not installed")
    one.forward = lambda *given: None  # as kernelize of Hugging Face's kernels does
    assert probing.bound_in(modeling)[0].implementation == "hub kernels"


def older(fast: bool) -> nn.Module:
    """Return a Mamba layer as in transformers up to 5.14, with kernels as globals and two code paths."""
    names: dict[str, Any] = {"__name__": "transformers.models.old.modeling_old", "nn": nn, "torch": torch,
                             "is_fast_path_available": fast, "causal_conv1d_fn": None, "mamba_inner_fn": None}
    exec("def selective_scan_fn(): pass\nselective_scan_fn.__module__ = 'mamba_ssm.ops.x'\n"
         "class OldMixer(nn.Module):\n"
         "    def __init__(self):\n        super().__init__(); self.w = nn.Parameter(torch.ones(2)); mamba_inner_fn\n"
         "    def cuda_kernels_forward(self): return selective_scan_fn(), causal_conv1d_fn\n", names)
    module = type(sys)(names["__name__"])
    vars(module).update(names)
    sys.modules[module.__name__] = module
    made_here: nn.Module = module.OldMixer()
    return made_here


@pytest.mark.parametrize(("fast", "why"), [(True, "its weights are not on CUDA"),
                                           (False, "is_fast_path_available is False: not all of its functions were found")])
def test_the_two_ways_of_older_mamba_layers(fast: bool, why: str, world: World) -> None:
    layer = older(fast)
    assert [(one.kernel, one.implementation, one.why) for one in probing.called_by(layer)] == [
        ("causal_conv1d_fn", "torch", "causal_conv1d is not installed"), ("selective_scan_fn", "torch", why)]
    assert [one.implementation for one in probing.bound_in(sys.modules[type(layer).__module__])] == [
        "torch", "torch", "mamba_ssm"]


def test_a_decorated_method_that_does_not_say_what_it_wraps(world: World) -> None:
    def decorator(method: Any) -> Any:
        def wrapper(*given: Any) -> Any:
            return method(*given)
        return wrapper

    class Layer(nn.Module):
        @decorator
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return chunk_gated_delta_rule(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821
    globals()["chunk_gated_delta_rule"] = None
    try:
        assert [one[:3] for one in probing.called_by(Layer())] == [
            ("chunk_gated_delta_rule", "chunk_gated_delta_rule", "torch")]
    finally:
        del globals()["chunk_gated_delta_rule"]


@pytest.mark.parametrize(("looked", "why"), [(True, "its import failed"),
                                             (False, "the file requires a CUDA device")])
def test_why_a_file_has_its_torch_function(looked: bool, why: str, world: World) -> None:
    assert probing._why("chunk_kda", looked) == "fla is not installed"
    package(world.folder, "fla", "")
    importlib.invalidate_caches()
    assert why in probing._why("chunk_kda", looked)
    for name in ("fla", "fla.ops", "fla.ops.kda"):
        assert probing._why("chunk_kda", looked) != "fla.ops.kda has no chunk_kda"
        sys.modules[name] = type(sys)(name)
    assert probing._why("chunk_kda", looked) == "fla.ops.kda has no chunk_kda"
    sys.modules["fla.ops.kda"].chunk_kda = None  # type: ignore[attr-defined]
    assert "exists now" in probing._why("chunk_kda", looked)


def test_functions_that_a_layer_keeps(world: World) -> None:
    layer = nn.Module()
    for name, home in (("chunk_gated_delta_rule", "fla.ops"),
                       ("causal_conv1d_update", "transformers.models.x")):
        def function() -> None: ...
        function.__module__ = home
        setattr(layer, name, function)
    assert [(one.kernel, one.implementation) for one in probing.called_by(layer)] == [
        ("chunk_gated_delta_rule", "fla"), ("causal_conv1d_update", "torch")]


def test_the_names_of_kernels_are_those_of_the_installed_transformers(qwen: Any) -> None:
    from transformers.integrations import hub_kernels
    homes = {name: home.partition(".")[2] for name, home in transformers.HOMES.items()}
    asked = hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS
    assert {name: homes.get(name) for name in asked} == asked
    folder = Path(hub_kernels.__file__).parents[1] / "models"
    files = {path.parent.name: path.read_text(encoding="utf-8") for path in folder.glob("*/modeling_*.py")}
    wanted = re.compile(rf'use_kernel_func_from_hub_with_fallback\(\s*"({"|".join(transformers.HOMES)})"')
    assert {name for name, text in files.items() if wanted.search(text)} == set(MODELS)
    assert set(UNPATCHED) <= files.keys() - set(MODELS)


def test_the_table_of_programs_has_every_model_that_flaws_know() -> None:
    assert {one.name for one in programs.MODELS if one.package == "transformers"} == set(MODELS)
    assert {one.name for one in programs.UNPATCHED} == set(UNPATCHED)


# --- models with less information ---

def test_a_model_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"model: got str, need a torch.nn.Module"):
        flashlin.doctor("chunk_gla")  # type: ignore[arg-type]
    assert layers(nn.Linear(2, 2)) == []


def changed(what: str) -> nn.Module:
    layer = flashlin.ShortConvolution(32, 4, activation="silu")
    if what == "meta":
        return layer.to("meta")
    if what == "quantised":
        layer.weight = nn.Parameter(torch.zeros(32, 1, 4, dtype=torch.int8), requires_grad=False)
    if what == "two devices":
        layer.extra = nn.Parameter(torch.empty(2, device="meta"))
    if what == "no sizes":
        layer = flashlin.modules.RMSNorm(32, elementwise_affine=False)
        layer.extra = nn.Parameter(torch.ones(2))
    if what == "no weights":
        layer = flashlin.modules.L2Norm()
    return layer


@pytest.mark.parametrize(("what", "why"), [
    ("meta", "its weights are on the meta device"), ("quantised", "its weights are int8, quantised"),
    ("two devices", "its weights are on cpu, meta"), ("no sizes", "RMSNorm has no weight of one dimension"),
    ("no weights", "it has no weights to read a dtype")])
def test_what_cannot_be_read_is_said_and_not_guessed(what: str, why: str) -> None:
    rows = layers(changed(what))
    assert rows and all((row.path, row.verdict) == ("", "could not check") for row in rows)
    assert all(row.because.startswith(f"cannot be planned: {why}") for row in rows), rows


def test_offloaded_weights_are_planned_for_where_they_are_fetched_to() -> None:
    layer = changed("meta")
    layer._hf_hook = type("Hook", (), {"execution_device": torch.device("cpu")})()  # type: ignore[assignment]
    assert {(row.path, row.verdict) for row in layers(layer)} == {("torch (K=32 V=4)", "ok")}


def test_a_model_without_weights_yet_is_planned_for_a_machine_that_is_named() -> None:
    assert {row.path for row in layers(changed("meta"), H200)} == {"triton (K=32 V=4)"}


class Hostile(nn.Module):
    def __getattribute__(self, name: str) -> Any:
        if name == "parameters":
            raise RuntimeError("no such thing")
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> Any:
        return flashlin.ops.norm.l2norm(x)


def test_a_layer_that_raises_is_a_line() -> None:
    (one,) = layers(nn.Sequential(Hostile()))
    assert (one.layers, one.kind, one.verdict) == ("0", "Hostile", "could not check")
    assert one.because == "could not be read: RuntimeError: no such thing"


def wrapped(how: str, tmp_path: Path) -> nn.Module:
    model = nn.Sequential(flashlin.ShortConvolution(32, 4, activation="silu"))
    if how == "compiled":
        return torch.compile(model)  # type: ignore[return-value]
    if how == "data parallel":
        return nn.DataParallel(model)
    from torch import distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("how", ["compiled", "data parallel", "DDP", "FSDP2"])
def test_wrapped_models_are_what_they_wrap(how: str, tmp_path: Path) -> None:
    try:
        rows = layers(wrapped(how, tmp_path))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert {(row.layers, row.kind, row.function, row.path) for row in rows} == {
        ("0", "ShortConvolution", name, "torch (K=32 V=4)")
        for name in ("causal_conv1d", "causal_conv1d_update")}


def test_sizes_of_heads_are_said_or_follow_from_all_of_them() -> None:
    layer = nn.Module()
    layer.num_heads, layer.key_dim, layer.head_v_dim = 4, 64, 24  # type: ignore[assignment]
    assert over_heads(layer) == dict(H=4, K=16, V=24)


def test_the_two_updates_of_one_name_are_told_apart() -> None:
    assert op_of(nn.Module(), "causal_conv1d_update") == "mamba_causal_conv1d_update"
    assert op_of(changed(""), "causal_conv1d_update") == "causal_conv1d_update"


def test_names_of_layers_that_are_alike_are_joined() -> None:
    assert spans([4, 0, 1, 2]) == "0-2,4" and spans([3]) == "3"
    assert together([f"m.{n}.a" for n in (0, 1, 2, 10)] + ["m.norm", "m.1.b"]) == "m.0-2,10.a, m.norm, m.1.b"
