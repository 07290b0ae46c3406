"""Targets: parsed from text, probed once per device, and pretended."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashlin.compat import target as machine
from flashlin.compat.target import (
    SHARED_PER_BLOCK,
    USUAL_CARD,
    Target,
    bundled_ptxas,
    parse,
    pretend,
    probe,
    ptxas_path,
    ptxas_version,
    shared_per_block,
)

H100 = Target("3.2.0", "12.4.99", "2.9.0", "cuda", (9, 0), "H100", 232448, 132)


@pytest.mark.parametrize("text",
                         ("triton=3.2.0,sm=90", "sm=sm90,triton=3.2.0", "triton=3.2.0,sm=sm_90,",
                          "triton=3.2.0,sm=90,backend=cuda"))
def test_a_named_target_is_the_usual_card(text: str) -> None:
    assert parse(text, torch_version="2.9.0") == H100


def test_every_fact_can_be_given() -> None:
    given = "triton=3.6.0,sm=75,ptxas=13.3,shared=1024,sms=14,name=T4g,torch=2.8.0"
    assert parse(given, torch_version="2.9.0") == Target("3.6.0", "13.3", "2.8.0", "cuda", (7, 5), "T4g",
                                                         1024, 14)


@pytest.mark.parametrize(("sm", "capability"), [("70", (7, 0)), ("103", (10, 3)), ("121", (12, 1))])
def test_the_last_digit_of_a_capability_is_the_minor_one(sm: str, capability: tuple[int, int]) -> None:
    found = parse(f"triton=3.6.0,sm={sm}")
    assert found.capability == capability and found.sm == f"sm{sm}" and found.shared == SHARED_PER_BLOCK[
        capability]


@pytest.mark.parametrize(("text", "backend"),
                         [("triton=3.6.0", "cpu"), ("", "cpu"), ("backend=interpreter", "interpreter"),
                          ("backend=hip,sm=90", "hip"), ("sm=90", "cuda")])
def test_a_backend_follows_from_sm_or_is_given(text: str, backend: str) -> None:
    found = parse(text)
    assert found.backend == backend and found.sm == ("sm90" if backend == "cuda" else backend)
    assert bool(found.ptxas) <= (backend == "cuda")


KEYS = "backend, name, ptxas, sm, sms, shared, torch, triton"


@pytest.mark.parametrize("text", ("triton", "triton=", "tritn=3.2.0", "triton=3.2.0,gpu=H100", "=3"))
def test_what_cannot_be_parsed_is_an_error_that_lists_the_keys(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    listed = ", ".join(sorted(KEYS.split(", ")))
    assert str(
        error.value) == f"target: got {text!r}, need key=value pairs out of {listed}, for example triton=3.2.0,sm=90"


@pytest.mark.parametrize(("text", "message"), [
    ("backend=cud", "target: got backend=cud, need cuda, hip, interpreter or cpu"),
    ("sm=ninety", "target: got sm=ninety, need a compute capability such as 90 or 103"),
    ("sm=9.0", "target: got sm=9.0, need a compute capability such as 90 or 103")])
def test_a_wrong_value_is_an_error_that_says_what_is_needed(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert str(error.value) == message


def test_a_target_is_shown_in_one_line() -> None:
    assert str(H100) == "H100 sm90, triton 3.2.0, ptxas 12.4.99, torch 2.9.0"
    assert str(H100._replace(triton="", ptxas="", torch="")) == "H100 sm90, triton none, torch none"
    assert str(parse("backend=cpu,triton=3.6.0,torch=2.9.0")) == "cpu, triton 3.6.0, torch 2.9.0"


def test_the_tables_agree_on_which_cards_there_are() -> None:
    assert set(USUAL_CARD) <= set(SHARED_PER_BLOCK)


@pytest.mark.parametrize(("capability", "size"),
                         [((7, 5), 65536), ((9, 0), 232448), ((8, 8), 101376), ((12, 2), 101376),
                          ((5, 0), 49152)])
def test_an_unknown_card_has_the_least_shared_memory_of_its_generation(capability: tuple[int, int],
                                                                       size: int) -> None:
    assert shared_per_block(capability) == size


@pytest.mark.parametrize(("triton", "capability", "version"), [
    ("3.2.0", (9, 0), "12.4.99"), ("3.3.1", (9, 0), "12.4.99"), ("3.3.1", (10, 0), "12.8.61"),
    ("3.6.0", (12, 0), "12.9.86"), ("3.8.0", (9, 0), "12.9.86"), ("3.9.0", (9, 0), "13.4.59"),
    ("3.9.0", (8, 9), "12.9.86"), ("3.9.0.dev1", (9, 0), "13.4.59"), ("9.9.9", (9, 0), ""), ("", (9, 0), "")])
def test_the_wheel_brings_its_ptxas(triton: str, capability: tuple[int, int], version: str) -> None:
    assert bundled_ptxas(triton, capability) == version


def test_the_environment_names_another_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/opt/ptxas-blackwell")
    assert ptxas_path("3.6.0", (9, 0)) == ptxas_path("3.9.0", (8, 0)) == "/opt/ptxas"
    assert ptxas_path("3.6.0", (10, 0)) == ptxas_path("3.9.0", (9, 0)) == "/opt/ptxas-blackwell"
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH")
    assert ptxas_path("3.6.0", (10, 0)) == "/opt/ptxas"


def test_a_ptxas_that_cannot_run_has_no_version() -> None:
    assert ptxas_version("") == ptxas_version("/nowhere/ptxas") == ""


# Probing

def test_cpu_tensors_are_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = probe(torch.device("cpu"))
    assert (found.backend, found.capability, found.torch) == ("cpu", (0, 0), torch.__version__)


def test_the_interpreter_runs_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(machine, "triton_state", lambda: ("3.6.0", ""))
    assert probe(torch.device("cpu")).backend == "interpreter"
    monkeypatch.setattr(machine, "_probed", {})
    monkeypatch.setattr(machine, "triton_state", lambda: ("", "not installed"))
    assert probe(torch.device("cpu")).backend == "cpu"


def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """An H100 and a T4 in one host; what is asked of which device is kept."""
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        major, minor, name, shared = ((9, 0, "NVIDIA H100", 232448), (7, 5, "Tesla T4", 0))[device.index]
        return SimpleNamespace(major=major, minor=minor, name=name, shared_memory_per_block_optin=shared,
                               multi_processor_count=40)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(machine, "ptxas_version", lambda path: "12.8.93")
    return asked


def test_each_device_is_asked_once_and_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards(monkeypatch)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(3):
        assert probe(second).capability == (7, 5) and probe(first).capability == (9, 0)
    assert asked == [second, first]
    assert probe(first) is probe(torch.device("cuda:0"))


def test_a_driver_that_hides_its_shared_memory_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    assert probe(torch.device("cuda", 1)).shared == 65536


def test_an_amd_card_is_hip(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    found = probe(torch.device("cuda", 0))
    assert (found.backend, found.ptxas, found.sm) == ("hip", "", "hip")


def test_pretending_is_for_every_device_and_can_end() -> None:
    here = probe(torch.device("cpu"))
    pretend(H100)
    assert probe(torch.device("cpu")) is probe(torch.device("cuda", 3)) is H100
    pretend(None)
    assert probe(torch.device("cpu")) is here
