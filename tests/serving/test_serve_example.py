"""Tests of examples/serve.py, run as a user would run it."""
from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import torch

from flashlin import serving
from tests.test_example import ROOT, run_example


@pytest.mark.alternate
def test_every_request_gets_what_it_gets_alone() -> None:
    done = run_example("serve.py", "--device", "cpu", "--requests", "6", "--slots", "3", "--piece", "9")
    assert done.returncode == 0, done.stderr
    assert "3 at once in 3 slots" in done.stdout
    assert "6 of 6 are the same as alone" in done.stdout
    assert all(word in done.stdout for word in ("requests", "tokens", "steps", "speed", "one by one"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve", module)  # dataclasses look the module up there
    spec.loader.exec_module(module)
    return module


def called(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["serve.py", "--device", "cpu", *arguments])
    return int(example.main())


def test_json_is_the_only_line_on_stdout(example: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert called(example, monkeypatch, "--requests", "4", "--slots", "2", "--json") == 0
    said = capsys.readouterr().out
    found = json.loads(said)
    assert said.count("\n") == 1 and found["wrong"] == [] and found["at_once"] == 2
    assert found["most_requests_of_a_slot"] > 1 and found["steps"] < found["steps_alone"] == found["tokens"]
    assert found["different_tokens"] > 10, "a model with constant output checks nothing"


def test_help_teaches_and_a_wrong_number_is_one_line(example: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        called(example, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "continuous batching" in said and "Exit code" in said
    assert all(flag in said for flag in ("--device", "--requests", "--slots", "--piece", "--seed", "--json"))
    with pytest.raises(SystemExit):
        called(example, monkeypatch, "--slots", "0")
    assert "--slots: got 0, need 1 or more" in capsys.readouterr().err


def test_it_notices_a_wrong_answer(example: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """The example reports an error if a piece of a prompt does not continue from the piece before."""
    right = serving.prefill

    def forgetful(q: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        return right(q, *rest[:-1], torch.zeros_like(rest[-1]), **options)
    monkeypatch.setattr(serving, "prefill", forgetful)
    assert called(example, monkeypatch, "--requests", "3", "--piece", "5") == 1
    assert "got other tokens than alone" in capsys.readouterr().err
