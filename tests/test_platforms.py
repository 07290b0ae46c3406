"""Where there is no Triton and no CUDA: Windows, macOS, Intel's GPUs. All of flashlin can be imported there, its
ops run in plain torch, and doctor says so. Such a machine is pretended: what Python lacks there is taken away."""
from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat import target as machine
from flashlin.compat.target import parse
from tests.machines import CLEAN, ROOT

# torch and the standard library are loaded first: they look at the real platform.
BEFORE = """
import faulthandler, importlib, json, os, pathlib, pkgutil, shutil, signal, subprocess, sys, tempfile, warnings
import concurrent.futures, multiprocessing, platform, sysconfig, pydantic.main, torch, torch.utils.checkpoint
from importlib import metadata
platform.platform(), sysconfig.get_config_vars()
warnings.simplefilter("error")
sys.modules["triton"] = None
real = pathlib.Path.exists
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
"""
MACOS = """
sys.platform = "darwin"
for name in ("sched_getaffinity", "EX_TEMPFAIL"):
    delattr(os, name)
torch.backends.mps.is_available = lambda: True
torch.backends.mps.device_count = lambda: 1
"""
# Every module, then ops of each kind with gradients, doctor, and what verdicts are kept by.
WORK = """
import flashlin
no_triton = []
for _, name, _ in pkgutil.walk_packages(flashlin.__path__, "flashlin."):
    if name == "flashlin.__main__" or name.startswith(("flashlin.layers", "flashlin.models", "flashlin.integrations.inherited")):
        continue  # a program, packages whose import is an error, and what Python runs at its start
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        no_triton.append(name)
missing = [name for name in flashlin.__all__ if not hasattr(flashlin, name)]
x = torch.randn(1, 70, 2, 8, requires_grad=True)
g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
for o in (flashlin.chunk_simple_gla(x, x, x, g)[0], flashlin.chunk_gated_delta_rule(x, x, x, g, beta)[0],
          flashlin.fused_recurrent_gla(x, x, x, x.sigmoid().log())[0], flashlin.rms_norm(x, torch.ones(8), None),
          flashlin.causal_conv1d(x.flatten(2), torch.randn(16, 4))[0]):
    o.sum().backward()
assert x.grad.isfinite().all()
try:
    flashlin.embedding(torch.tensor([7]), torch.zeros(4, 2))
    raise SystemExit("no error of a token")
except ValueError as error:
    assert "7" in str(error)
from flashlin.guards import verdicts
from flashlin.guards.verdicts import Table, Verdict
from flashlin.compat.target import parse
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    verdicts.keep(Table({"a": Verdict("ran", 1.0, "x")}, {}), parse("H100,triton=3.6.0"))
kept = "a" in verdicts.local(parse("H100,triton=3.6.0")).kernels
found = flashlin.doctor()
print(json.dumps({"missing": missing, "no_triton": no_triton, "kept": kept, "told": [str(one.message) for one in told],
                  "status": found.status, "verdict": found.verdict, "ways": sorted({one.path for one in found.plans}),
                  "devices": [one.where for one in found.devices],
                  "checks": [f"{one.name}: {one.status}: {one.detail}" for one in found.checks]}))
"""


def on(platform: str, tmp_path: object) -> dict[str, object]:
    ran = subprocess.run([sys.executable, "-c", BEFORE + platform + WORK], capture_output=True, text=True,
                         timeout=300, check=False, cwd=ROOT,
                         env={**CLEAN, "PYTHONPATH": str(ROOT), "FLASHLIN_HOME": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])  # type: ignore[no-any-return]
