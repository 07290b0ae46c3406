"""Tests of platforms without Triton and CUDA: Windows, macOS and Intel GPUs.

All of flashlin can be imported there, its ops run in plain torch, and doctor reports it. The tests simulate
such a machine by removing the Python features that it lacks.
"""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat import target as machine
from flashlin.compat.target import probe
from tests.machines import CLEAN, ROOT

# A script that imports torch and the standard library before the simulation. They need the real platform.
BEFORE = """
import faulthandler, importlib, json, os, pathlib, pkgutil, shutil, signal, subprocess, sys, tempfile
import warnings
import concurrent.futures, multiprocessing, platform, sysconfig, pydantic.main, torch, torch.utils.checkpoint
from importlib import metadata
platform.platform(), sysconfig.get_config_vars()
warnings.simplefilter("error")
sys.modules["triton"] = None
for name in ("exists", "is_file", "is_dir", "read_text"):  # neither has /proc, nor ldconfig's folder
    def guarded(self, *rest, _real=getattr(pathlib.Path, name), _name=name, **more):
        if str(self).startswith(("/proc", "/sbin", "/usr/lib")):
            if _name == "read_text":
                raise FileNotFoundError(self)
            return False
        return _real(self, *rest, **more)
    setattr(pathlib.Path, name, guarded)
shutil.which = lambda *_, **__: None
"""
WINDOWS = """
sys.platform = "win32"
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "killpg", "setpgid", "setsid", "geteuid", "getuid", "statvfs", "WNOHANG", "WIFSIGNALED",
             "EX_TEMPFAIL", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "mkfifo", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGBUS", "SIGXCPU", "SIGXFSZ", "SIGPIPE", "alarm"):
    delattr(signal, name)
shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
"""
MACOS = """
sys.platform = "darwin"
for name in ("sched_getaffinity", "EX_TEMPFAIL"):
    delattr(os, name)
torch.backends.mps.is_available = lambda: True
torch.mps.device_count = lambda: 1
"""
# A script that imports every module, runs ops of each kind with gradients, runs doctor, and stores a local
# result.
WORK = """
import flashlin
no_triton = []
for _, name, _ in pkgutil.walk_packages(flashlin.__path__, "flashlin."):
    if name.startswith(("flashlin.__main__", "flashlin.layers", "flashlin.models",
                        "flashlin.integrations.inherited")):
        continue  # a program, packages whose import is an error, and what Python runs at its start
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "triton.experimental"):
            raise
        no_triton.append(name)
missing = [name for name in flashlin.__all__ if not hasattr(flashlin, name)]
x = torch.randn(1, 70, 2, 8, requires_grad=True)
g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
for o in (flashlin.chunk_simple_gla(x, x, x, g)[0], flashlin.chunk_gated_delta_rule(x, x, x, g, beta)[0],
          flashlin.fused_recurrent_gla(x, x, x, x.sigmoid().log())[0],
          flashlin.rms_norm(x, torch.ones(8), None),
          flashlin.causal_conv1d(x.flatten(2), torch.randn(16, 4))[0]):
    o.sum().backward()
assert x.grad.isfinite().all()
try:
    flashlin.embedding(torch.tensor([7]), torch.zeros(4, 2))
    raise SystemExit("no error of a token")
except ValueError as error:
    assert "7" in str(error)
from flashlin.guards import local_results
from flashlin.guards.local_results import Table, Verdict
from flashlin.compat.target import parse
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    local_results.keep(Table({"a": Verdict("ran", 1.0, "x")}, {}), parse("H100,triton=3.6.0"))
kept = "a" in local_results.local(parse("H100,triton=3.6.0")).kernels
found = flashlin.doctor()
print(json.dumps({"missing": missing, "no_triton": no_triton, "kept": kept,
                  "told": [str(one.message) for one in told], "verdict": found.verdict,
                  "paths": sorted({one.path for one in found.plans}),
                  "devices": [str(one) for one in found.devices],
                  "unsure": [f"{one.name}: {one.detail}" for one in found.checks if one.status != "ok"]}))
"""


def on(platform: str, home: object) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", BEFORE + platform + WORK], capture_output=True, text=True,
                         timeout=300, check=False, cwd=ROOT,
                         env={**CLEAN, "PYTHONPATH": str(ROOT), "FLASHLIN_HOME": str(home)})
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert not found["missing"] and found["paths"] == ["torch"] and not found["unsure"], found
    assert found["no_triton"] and all(name.startswith("flashlin.kernels.") for name in found["no_triton"])
    return found


def test_on_windows_ops_run_in_plain_torch(tmp_path: Path) -> None:
    found = on(WINDOWS, tmp_path)
    assert [one.partition(":")[0] for one in found["devices"]] == ["cpu"]
    # Without file locks, flashlin writes no file that another process might write at the same time.
    assert found["kept"] and "no file locks on this system" in found["told"][0]
    assert not list(tmp_path.glob("*.json"))


def test_on_macos_ops_run_in_plain_torch_and_doctor_sees_the_gpu(tmp_path: Path) -> None:
    found = on(MACOS, tmp_path)
    assert found["devices"] == [f"mps:0: Apple GPU mps, triton none, torch {torch.__version__}"]
    assert "no kernels run on your Apple GPU: backend: an Apple GPU" in found["verdict"]
    assert found["kept"] and not found["told"] and list(tmp_path.glob("*.json"))


ARC = "Intel(R) Arc(TM) B580 Graphics"


@pytest.fixture
def two_arcs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(name=ARC))


def test_on_a_gpu_of_intel_ops_run_in_plain_torch_and_say_so_once(two_arcs: None) -> None:
    found = probe(torch.device("xpu", 1))
    assert (found.backend, found.name, found.sm, found.capability) == ("xpu", ARC, "xpu", (0, 0))
    machine._probed[torch.device("cpu")] = found  # CPU tensors stand in for xpu tensors
    x = torch.randn(1, 70, 2, 8, requires_grad=True)
    with pytest.warns(UserWarning, match="an Intel GPU") as told:
        for _ in range(2):
            o, _ = flashlin.chunk_simple_gla(x, x, x, -torch.rand(1, 70, 2))
            o.sum().backward()
    assert len(told) == 1 and x.grad is not None and x.grad.isfinite().all()


def test_doctor_lists_gpus_of_intel(two_arcs: None) -> None:
    found = flashlin.doctor()
    assert [one.where for one in found.devices] == ["xpu:0, xpu:1"] and found.devices[0].name == ARC
    assert {one.path for one in found.plans} == {"torch"} and found.status == "degraded"
    assert f"no kernels run on your {ARC}: backend: an Intel GPU" in found.verdict


@pytest.mark.parametrize("backend", ["xpu", "mps"])
def test_explain_and_doctor_plan_for_them_elsewhere(backend: str) -> None:
    plan = flashlin.plan("chunk_gla", target=f"backend={backend},triton=3.6.0")
    assert plan.path == "torch" and plan.steps[-1][0].forced
    assert flashlin.doctor(target=f"backend={backend},triton=3.6.0", op="chunk_gla").status == "degraded"
