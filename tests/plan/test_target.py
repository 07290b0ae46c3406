"""Tests of targets: they are parsed from text, probed once for each device, or simulated."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import flashlin
from flashlin.compat import target as machine
from flashlin.compat.releases import RELEASES
from flashlin.compat.target import (
    CARDS,
    SHARED_PER_BLOCK,
    USUAL_AMD,
    USUAL_CARD,
    Target,
    bundled_ptxas,
    card_named,
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
                          "triton=3.2.0,sm=90,backend=cuda", "H100,triton=3.2.0", "h100, triton = 3.2.0",
                          "sm90,triton=3.2.0", "NVIDIA H100 80GB HBM3,triton=3.2.0", "card=h100,triton=3.2.0",
                          "H100,sm=90,triton=3.2.0"))
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
                         [("cpu,triton=3.6.0", "cpu"), ("backend=cpu", "cpu"),
                          ("backend=interpreter", "interpreter"), ("backend=hip,sm=94", "hip"),
                          ("sm=90", "cuda"), ("h200", "cuda")])
def test_a_backend_follows_from_the_card_or_is_given(text: str, backend: str) -> None:
    found = parse(text)
    assert found.backend == backend and found.sm == ("sm90" if backend == "cuda" else backend)
    assert bool(found.ptxas) <= (backend == "cuda")


@pytest.mark.parametrize(("text", "name", "arch"), [
    ("MI300X", "MI300X", "gfx942"), ("AMD Instinct MI210", "MI210", "gfx90a"), ("gfx942", "MI300X", "gfx942"),
    ("gfx1201,triton=3.6.0", "RX 9070", "gfx1201"), ("card=gfx1036", "AMD GPU", "gfx1036")])
def test_a_card_of_amd_has_an_architecture_in_place_of_a_capability(text: str, name: str, arch: str) -> None:
    found = parse(text)
    assert (found.backend, found.name, found.arch, found.sm) == ("hip", name, arch, arch)
    assert found.capability == (0, 0) and found.shared == 65536 and found.stages == 2 and not found.ptxas


@pytest.mark.parametrize(("name", "card"), [
    ("rtx4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"), ("l40s", "L40S"),
    ("NVIDIA L40S", "L40S"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla V100-SXM2-16GB", "V100"),
    ("AMD Instinct MI300X", "MI300X"), ("NVIDIA H200", "H200"), ("NVIDIA GB200", "GB200"),
    ("NVIDIA RTX A6000", "RTX A6000"), ("4090", "RTX 4090"), ("a6000", "RTX A6000"), ("14090", None),
    ("NVIDIA A10G", "A10G"), ("GTX 1050", None), ("H1000", None), ("RTX 5070", "RTX 5070"), ("rtx-5070ti",
    "RTX 5070 Ti"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"), ("rtx 2080", "RTX 2080"), ("RTX2080TI",
    "RTX 2080 Ti"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("Quadro RTX 6000", "Quadro RTX 6000"),
    ("rtx 6000", None),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"), ("dgx spark", "DGX Spark"),
    ("DGX-Spark", "DGX Spark"), ("Jetson AGX Orin", "Orin"), ("Jetson Thor", "Thor"), ("Tesla P100-PCIE-16GB",
    "P100"),
    ("gtx1080ti", "GTX 1080 Ti"), ("1080 Ti", "GTX 1080 Ti"), ("NVIDIA A30", "A30"), ("h-100", "H100"),
    ("A 100", "A100"),
    ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100"), ("RTX 3060 Laptop GPU",
    "RTX 3060")])
def test_cards_are_known_as_people_and_drivers_write_them(name: str, card: str | None) -> None:
    found = card_named(name)
    assert (found and found[0]) == card


@pytest.mark.parametrize(("sm", "names"), [
    ("sm60", "P100"), ("sm61", "P40, GTX 1080, GTX 1080 Ti"), ("sm70", "V100, Titan V"),
    ("sm75", "T4, RTX 2060, RTX 2070, RTX 2080, RTX 2080 Ti, Quadro RTX 6000, Titan RTX"),
    ("sm80", "A100, A30, A800"), ("sm86", "RTX 3060, RTX 3070, RTX 3080, RTX 3090, A10, A40, RTX A6000"),
    ("sm87", "Orin"), ("sm89", "RTX 4060, RTX 4070, RTX 4080, RTX 4090, L4, L40, L40S, RTX 6000 Ada"),
    ("sm90", "H100, H200, H20, H800, GH200"), ("sm100", "B200, GB200"), ("sm103", "B300, GB300"),
    ("sm110", "Thor"), ("sm120", "RTX 5060, RTX 5070, RTX 5080, RTX 5090, RTX PRO 6000"),
    ("sm121", "GB10, DGX Spark")])
def test_a_card_has_the_capability_that_nvidia_lists(sm: str, names: str) -> None:
    assert {parse(f"{name},triton=3.6.0").sm for name in names.split(", ")} == {sm}


def test_multiprocessors_are_cores_over_those_of_one() -> None:
    cores = {"P100": 3584, "RTX 2070": 2304, "RTX 3070": 5888, "RTX 4070": 5888, "RTX 6000 Ada": 18176, "L4": 7424,
             "RTX 5070": 6144, "RTX 5080": 10752, "RTX PRO 6000": 24064, "DGX Spark": 6144, "Titan RTX": 4608}
    each = {"P100": 64, "RTX 2070": 64, "Titan RTX": 64}
    assert {name: CARDS[name].sms * each.get(name, 128) for name in cores} == cores


def test_the_usual_cards_are_among_the_known_ones() -> None:
    assert all(CARDS[name].capability == capability and CARDS[name].sms == sms
               for capability, (name, sms) in USUAL_CARD.items())
    assert all(CARDS[name].arch == arch and CARDS[name].sms == units
               for arch, (name, units) in USUAL_AMD.items())


@pytest.mark.parametrize(("text", "triton"), [
    ("t4,torch=2.6", "3.2.0"), ("t4,torch=2.7.1+cu126", "3.3.1"), ("t4,torch=2.14", "3.8.0"),
    ("t4,torch=2.6,triton=3.3.1", "3.3.1"), ("t4,torch=2.6,triton=3.3", "3.3.1"),
    ("t4,torch=2.6,triton=3.3.0", "3.3.0"), ("t4,torch=2.6 triton==3.2", "3.2.0"),
    ("t4,torch=2.6,triton=9.9", "9.9"), ("t4,torch=2.6,triton=2.1", "2.1"), ("t4,torch=2.6,triton=none", "")])
def test_a_torch_brings_the_triton_that_it_was_made_with(text: str, triton: str) -> None:
    assert parse(text).triton == triton and parse(text).torch == text.split("torch=")[1].replace(" ", ",").split(",")[0]


@pytest.mark.parametrize(("text", "built_for"), [
    ("A100,torch=2.13.0+cpu", "CPUs"), ("A100,torch=2.13.0+cpu.cxx11.abi", "CPUs"),
    ("MI300X,torch=2.13+cpu", "CPUs"),
    ("A100,torch=2.13.0+CPU", "CPUs"), ("backend=xpu,torch=2.13+cpu", "CPUs"),
    ("A100,torch=2.13.0+rocm6.4", "AMD GPUs"),
    ("A100,torch=2.13.0+xpu", "Intel GPUs"), ("MI300X,torch=2.13.0+cu130", "NVIDIA GPUs"),
    ("A100,torch=2.13.0+cu130", ""), ("A100,torch=2.13.0", ""), ("A100", ""),
    ("MI300X,torch=2.13.0+rocm6.4", ""),
    ("A100,triton=3.2,torch=2.6.0a0+ecf3bae40a.nv25.01", ""), ("A100,triton=3.2,torch=2.6.0+gitcu1", ""),
    ("backend=xpu,torch=2.13.0+xpu", ""), ("cpu,torch=2.13.0+cu130", ""), ("cpu,torch=2.13.0+rocm6.4", "")])
def test_a_torch_of_another_build_launches_nothing(text: str, built_for: str) -> None:
    target = parse(text)
    assert target.other_build == built_for
    plan = flashlin.plan("chunk_gla", target=target)
    if built_for:
        assert (plan.path, plan.launches) == ("torch", ())
        why = "an Intel GPU" if target.backend == "xpu" else f"torch {target.torch}, a build for {built_for}"
        assert why in str(plan)
    else:
        assert (plan.path == "triton") == (target.backend == "cuda")


@pytest.mark.parametrize(("text", "message"), [
    ("triton=", "got 'triton=', need key=value pairs out of card, sm, triton, torch, ptxas, shared, sms, "
                "name, backend, or the name of a card; for example H100,triton=3.2.0"),
    ("tritn=3.2.0,sm=90", "for example H100,triton=3.2.0; did you mean triton?"),
    ("=3", "need key=value pairs"),
    ("sm=90,gpu=H100", "got 'gpu=H100', need key=value"),
    ("triton", "got the card 'triton', need one of V100, T4, A100, "),
    ("90,triton=3.2", "or as sm=90; did you mean sm=90?"),
    ("H1000", "as sm=90; did you mean H100?"), ("H10", "did you mean H100 or H100 PCIe?"),
    ("rtx 6000", "did you mean RTX 6000 Ada or Quadro RTX 6000?"),
    ("RTX 5095", "did you mean RTX 5090 or RTX 5050?"),
    ("h100,3.2.0",
    "got the version 3.2.0 without a name, need triton=3.2.0 or torch=3.2.0; for example H100,triton=3.2.0"),
    ("h100 v3.2", "got the version 3.2 without a name, need triton=3.2"), ("h100 with Triton 3.2.0",
    "need triton=3.2.0 or"),
    ("2.6", "got the version 2.6 without a name"), ("h100,torch=2.3",
    "got torch=2.3, whose Triton is not known here, need "
                                         "also triton=...; known are torch 2.4.0 to 2.15.0"),
    ("triton=3.2.0", "got 'triton=3.2.0', need a card: its name, or sm=90"),
    ("", "got '', need a card"), ("sm=90,sm=80", "got sm twice, 90 and 80, need it once"),
    ("H100,A100", "got card twice, H100 and A100, need it once"),
    ("H100,sm=80", "got H100 and sm=80, need one of them: H100 is sm=90"),
    ("MI300,sm=90", "need one of them: MI300 is gfx942 of AMD"),
    ("sm=942", "got sm=942, need the compute capability of an NVIDIA card, such as "),
    ("sm=95", "such as 75, 80 or 90; did you mean 90?"),
    ("sm=ninety", "got sm=ninety, need the compute capability"),
    ("sm=9.0", "or 90; did you mean 90?"),
    ("H100,triton=latest", "got triton=latest, need a version "),
    ("H100,torch=stable", f"got torch=stable, need a version such as {RELEASES[-1].torch[-1]}"),
    ("H100,sms=many", "got sms=many, need a whole number"),
    # str.isdigit() is True for these characters, but int() raises an error.
    ("H100,sms=²", "got sms=², need a whole number above 0"),
    ("H100,shared=²", "got shared=², need a whole"),
    ("sm=²", "got sm=², need the compute capability"), ("sm=²,backend=xpu", "got sm=², need the compute"),
    ("sm=²,backend=hip", "got sm=², need the compute"), ("gfx²42", "got the card 'gfx²42'"),
    ("gfx٩42", "got the card 'gfx٩42'"), ("H100,sms=0", "got sms=0, need a whole number above 0"),
    ("H100,sms=" + "9" * 5000, "need a whole number above 0"),
    ("H100,triton=" + "9" * 5000, "need a version such as"),
    ("backend=cud", "got backend=cud, need one of 6 known names; did you mean cuda?")])
def test_what_cannot_be_parsed_is_an_error_that_says_what_is_needed(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert str(error.value).startswith("target: got ") and message in str(error.value)


def test_a_target_is_shown_in_one_line() -> None:
    assert str(H100) == "H100 sm90, triton 3.2.0, ptxas 12.4.99, torch 2.9.0"
    assert str(H100._replace(triton="", ptxas="", torch="")) == "H100 sm90, triton none"
    assert str(parse("backend=cpu,triton=3.6.0,torch=2.9.0")) == "cpu, triton 3.6.0, torch 2.9.0"


@pytest.mark.parametrize(("triton", "said"), [
    ("3.99", "3.99 (not known here: planned as 3.9.0)"), ("4.0.0",
    "4.0.0 (not known here: planned as 3.9.0)"),
    ("3.6.7", "3.6.7 (not known here: planned as 3.6.0)"), ("3.9.1+git12",
    "3.9.1+git12 (not known here: planned as 3.9.0)"),
    ("3.9.0.dev12", "3.9.0.dev12"), ("3.6.0+git12", "3.6.0+git12"), ("2.1.0", "2.1.0"), ("3.7.0", "3.7.0")])
def test_a_release_that_is_not_known_says_as_which_it_is_planned(triton: str, said: str) -> None:
    assert f"triton {said}" in str(parse(f"H100,triton={triton},ptxas=12.8")).split(", ")


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


@pytest.mark.parametrize(("triton", "capability", "taken"), [
    ("3.2.0", (10, 0), "PTXAS"), ("3.3.1", (9, 0), "PTXAS"), ("3.3.1", (10, 0), ""),
    ("3.4.0", (10, 0), "PTXAS"),
    ("3.5.1", (10, 0), "PTXAS"), ("3.6.0", (9, 0), "PTXAS"), ("3.6.0", (10, 0), "PTXAS_BLACKWELL"),
    ("3.9.0", (8, 0), "PTXAS"), ("3.9.0", (9, 0), "PTXAS_BLACKWELL")])
def test_the_environment_names_another_ptxas_of_the_one_that_is_called(
        triton: str, capability: tuple[int, int], taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # According to backends/nvidia/compiler.py and knobs.py of each release.
    for name in ("PTXAS", "PTXAS_BLACKWELL"):
        monkeypatch.setenv(f"TRITON_{name}_PATH", f"/opt/{name}")
    found = ptxas_path(triton, capability)
    assert found == f"/opt/{taken}" if taken else not found.startswith("/opt/")
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH")
    assert (ptxas_path(triton, capability) == "/opt/PTXAS") == (taken == "PTXAS")


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
    machine._probed.clear()
    monkeypatch.setattr(machine, "triton_state", lambda: ("", "not installed"))
    assert probe(torch.device("cpu")).backend == "cpu"


def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Simulate a machine with an H100 and a T4, and return a list that receives each probed device."""
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
    assert (found.backend, found.ptxas, found.sm, found.capability) == ("hip", "", "hip", (0, 0))
    card = SimpleNamespace(name="AMD Instinct MI210", multi_processor_count=104,
                           gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert probe(torch.device("cuda", 1)) == parse("MI210,triton=3.7.1")._replace(
        name=card.name, torch=torch.__version__, triton=machine.triton_state()[0])


def test_pretending_is_for_every_device_and_can_end() -> None:
    here = probe(torch.device("cpu"))
    pretend(H100)
    assert probe(torch.device("cpu")) is probe(torch.device("cuda", 3)) is H100
    pretend(None)
    assert probe(torch.device("cpu")) == here
