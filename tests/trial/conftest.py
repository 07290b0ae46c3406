"""Each test has a home of its own, and nothing remembered."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.guards import proven, verdicts
from flashlin.trial import canary


def _forget() -> None:
    for cached in (verdicts.local, verdicts._tell, proven._shipped, dispatch.plan):
        cached.cache_clear()
    for kept in (verdicts._unwritten, canary._done, canary._settled):
        kept.clear()
    machine._probed.pop(torch.device("cpu"), None)
    door.replace_starter(None)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path / "home"))
    _forget()
    yield tmp_path / "home"
    _forget()
