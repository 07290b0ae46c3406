"""Tests of doctor's advice on simulated machines.

After a user follows the advice, doctor must report no worse grade and give no further advice.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import flashlin
from flashlin.diagnostics import environment, machine
from flashlin.diagnostics.machine import Dist
from flashlin.diagnostics.report import Advice, Report
from tests.machines import H200, installed
from tests.simulated import World

pytestmark = pytest.mark.usefixtures("default_settings", "gpu_surroundings", "proven")

VLLM = Dist("vllm", "0.8.5", needs=("torch==2.6.0",))
SITTING = Dist("transformers", "5.23.0", needs=("torch>=2.4",))
LIBRARY = "OSError: libcudart.so.12: cannot open shared object file"
BAD = "import fails: ImportError: undefined symbol"


INDEX = "https://download.pytorch.org/whl/"
UNSET = "unset CUDA_VISIBLE_DEVICES"
ELSEWHERE = environment.elsewhere()

# MACHINES has, by name: the machine, its grade, the advised command, the grade after it, words of the advice.
ALL = len({plan.op for plan in flashlin.doctor(target="H100,triton=3.6.0").plans})
EVERY = f"this makes all {ALL} ops run as Triton kernels"

MACHINES: dict[str, tuple[World, str, str, str, str]] = {
    # machines without advice
    "a laptop": (World(driver=""), "ok", "", "ok", ""),
    "a laptop without Triton": (World(driver="", triton=""), "ok", "", "ok", ""),
    "an H200 with 3.6.0": (World(("H200",)), "ok", "", "ok", ""),
    "an H100 with the newest": (World(("H100",), "2.15.0", "3.9.0"), "ok", "", "ok", ""),
    "two A100": (World(("A100", "A100"), "2.8.0", "3.4.0"), "ok", "", "ok", ""),
    "a torch nobody has looked at": (World(("H100",), "2.99.0", "3.9.0"), "ok", "", "ok", ""),
    "an MI300": (World(("MI300",), driver=""), "degraded", "", "degraded", ""),
    # Since 3.3, fp16 would need fp32 copies, so an upgrade that helps bf16 is no improvement.
    "a T4 with 3.2.0": (World(("T4",), "2.6.0", "3.2.0"), "degraded", "", "degraded", ""),
    "a T4 with 3.3.1": (World(("T4",), "2.7.1", "3.3.1"), "degraded", "", "degraded", ""),
    "an H100 and a T4": (World(("H100", "T4"), "2.6.0", "3.2.0"), "degraded", "", "degraded", ""),
    # Another torch is advised only if the advice can state the benefit for these GPUs.
    "four kinds of card": (
        World(("H100", "T4", "A100", "V100"), "2.6.0", "3.2.0"),
        "degraded",
        "",
        "degraded",
        "",
    ),
    # another pair of torch and Triton is better
    "an H100 with 3.2.0": (
        World(("H100",), "2.6.0", "3.2.0", others=(SITTING,)),
        "ok",
        'pip install "torch==2.8.0"',
        "ok",
        f"this makes 28 of {ALL} ops run with their usual number of warps",
    ),
    "a V100 with 3.2.0": (
        World(("V100",), "2.6.0", "3.2.0"),
        "degraded",
        'pip install "torch==2.7.1"',
        "degraded",
        f"this makes 37 of {ALL} ops run without fp32 copies",
    ),
    "a B300 with 3.5.1": (
        World(("B300",), "2.9.1", "3.5.1"),
        "degraded",
        'pip install "torch==2.10.0"',
        "ok",
        EVERY,
    ),
    "a torch without code for an RTX 5090": (
        World(("RTX 5090",), "2.7.0", "3.3.0"),
        "broken",
        'pip install "torch==2.8.0"',
        "ok",
        EVERY,
    ),
    "a torch without code for a B200": (
        World(("B200",), "2.6.0", "3.2.0"),
        "broken",
        'pip install "torch==2.9.1"',
        "ok",
        EVERY,
    ),
    "an H100 with another Triton": (
        World(("H100",), "2.8.0", "3.6.0"),
        "ok",
        'pip install "triton==3.4.0"',
        "ok",
        "torch 2.8.0 was made with Triton 3.4.0, not 3.6.0",
    ),
    "a T4 with another Triton": (
        World(("T4",), "2.6.0", "3.3.1"),
        "degraded",
        'pip install "torch==2.7.1"',
        "degraded",
        "torch 2.6.0 was made with Triton 3.2.0, not 3.3.1",
    ),
    # a Triton that is missing or cannot be imported
    "an H100 without Triton": (
        World(("H100",), triton=""),
        "degraded",
        'pip install "triton==3.6.0"',
        "ok",
        EVERY,
    ),
    "an H100 with a broken Triton": (
        World(("H100",), triton_error=BAD),
        "degraded",
        'pip install --force-reinstall --no-deps "triton==3.6.0"',
        "ok",
        EVERY,
    ),
    "an H100 with a broken 3.2.0": (
        World(("H100",), "2.6.0", "3.2.0", triton_error=BAD),
        "degraded",
        'pip install "torch==2.8.0"',
        "ok",
        EVERY,
    ),
    "a T4 with torch 2.6 alone": (
        World(("T4",), "2.6.0", ""),
        "degraded",
        'pip install "triton==3.2.0"',
        "degraded",
        f"this makes 65 of {ALL} ops run as Triton kernels",
    ),
    "a laptop with a broken Triton": (
        World(driver="", triton_error=BAD),
        "degraded",
        'pip install --force-reinstall --no-deps "triton==3.6.0"',
        "ok",
        "",
    ),
    "an H100 with Triton 2": (
        World(("H100",), "2.10.0", "2.3.1", triton_error="2.3.1 is older than 3.0"),
        "degraded",
        'pip install --force-reinstall --no-deps "triton==3.6.0"',
        "ok",
        EVERY,
    ),
    "an unknown torch with a broken Triton": (
        World(("H100",), "2.99.0", "3.9.0", triton_error=BAD),
        "degraded",
        'pip install --force-reinstall --no-deps "triton==3.9.0"',
        "ok",
        "",
    ),
    "two Tritons in one folder": (
        World(("H100",), beside=("pytorch-triton",)),
        "broken",
        'pip uninstall -y pytorch-triton triton && pip install --force-reinstall --no-deps "triton==3.6.0"',
        "ok",
        EVERY,
    ),
    # a torch that is missing or cannot be imported
    "an H100 without torch": (
        World(("H100",), "", ""),
        "broken",
        'pip install "torch==2.15.0"',
        "ok",
        EVERY,
    ),
    "a laptop without torch": (
        World(torch="", triton="", driver=""),
        "broken",
        'pip install "torch==2.15.0"',
        "ok",
        "",
    ),
    "a broken torch": (
        World(("H100",), torch_error="ImportError: undefined symbol"),
        "broken",
        'pip install --force-reinstall --no-deps "torch==2.10.0"',
        "ok",
        EVERY,
    ),
    "a broken build for CPUs": (
        World(torch="2.13.0+cpu", triton="3.7.1", driver="", torch_error="OSError: bad"),
        "broken",
        f'pip install --force-reinstall --no-deps "torch==2.13.0" --index-url {INDEX}cpu',
        "ok",
        "",
    ),
    "a torch without its libraries": (
        World(("H100",), torch_error=LIBRARY),
        "broken",
        'pip install --force-reinstall "torch==2.10.0"',
        "ok",
        EVERY,
    ),
    "a broken torch and no Triton": (
        World(("H200",), "2.13.0", "", torch_error="ImportError: undefined symbol"),
        "broken",
        'pip install --force-reinstall --no-deps "torch==2.13.0" && pip install "triton==3.7.1"',
        "ok",
        EVERY,
    ),
    "a broken torch with another Triton": (
        World(("B200",), "2.13.0", "3.5.1", torch_error="ImportError: undefined symbol"),
        "broken",
        'pip install --force-reinstall --no-deps "torch==2.13.0" && pip install "triton==3.7.1"',
        "ok",
        EVERY,
    ),
    "a broken torch and a broken Triton": (
        World(("H100",), torch_error="ImportError: undefined symbol", triton_error=BAD),
        "broken",
        'pip install --force-reinstall --no-deps "torch==2.10.0" && '
        'pip install --force-reinstall --no-deps "triton==3.6.0"',
        "ok",
        EVERY,
    ),
    "a broken build for CPUs beside an H100": (
        World(("H100",), "2.14.0+cpu", "3.8.0", torch_error="ImportError: undefined symbol"),
        "broken",
        f'pip install --force-reinstall "torch==2.14.0" --index-url {INDEX}cu130',
        "ok",
        EVERY,
    ),
    "a broken torch and a hidden H100": (
        World(
            ("H100",),
            torch_error="ImportError: undefined symbol",
            variables=(("CUDA_VISIBLE_DEVICES", ""),),
        ),
        "broken",
        f'{UNSET} && pip install --force-reinstall --no-deps "torch==2.10.0"',
        "ok",
        EVERY,
    ),
    "a hidden B200 of which torch knows nothing": (
        World(("B200",), "2.6.0", "3.2.0", variables=(("CUDA_VISIBLE_DEVICES", ""),)),
        "degraded",
        f'{UNSET} && pip install "torch==2.9.1"',
        "ok",
        EVERY,
    ),
    "a torch that is too old": (
        World(("H100",), "2.1.0", "2.1.0", torch_error="ImportError: torch 2.1.0 is old"),
        "broken",
        'pip install --force-reinstall "torch==2.8.0"',
        "ok",
        EVERY,
    ),
    # a GPU that torch does not see
    "a CPU build beside an H100": (
        World(("H100",), "2.13.0+cpu", "3.7.1"),
        "degraded",
        f'pip install --force-reinstall "torch==2.13.0" --index-url {INDEX}cu130',
        "ok",
        EVERY,
    ),
    "a CPU build alone beside an H100": (
        World(("H100",), "2.13.0+cpu", ""),
        "degraded",
        f'pip install --force-reinstall "torch==2.13.0" --index-url {INDEX}cu130',
        "ok",
        EVERY,
    ),
    "a CPU build beside an old driver": (
        World(("H100",), "2.13.0+cpu", "3.7.1", driver="535.104"),
        "degraded",
        f'pip install --force-reinstall "torch==2.10.0" --index-url {INDEX}cu128',
        "ok",
        EVERY,
    ),
    "a CPU build beside a V100": (
        World(("V100",), "2.13.0+cpu", "3.7.1"),
        "degraded",
        f'pip install --force-reinstall "torch==2.10.0" --index-url {INDEX}cu128',
        "degraded",
        EVERY,
    ),
    "a driver too old for torch": (
        World(("H100",), "2.11.0", "3.6.0", driver="535.104"),
        "degraded",
        'pip install "torch==2.10.0"',
        "ok",
        EVERY,
    ),
    "a driver too old for every torch": (
        World(("H100",), "2.13.0+cpu", "3.7.1", driver="470.57.02"),
        "degraded",
        "",
        "degraded",
        f"with torch 2.13.0, all {ALL} ops would run as Triton kernels; in its way: it needs driver 580 or "
        "newer",
    ),
    "a hidden H100": (
        World(("H100",), variables=(("CUDA_VISIBLE_DEVICES", ""),)),
        "degraded",
        UNSET,
        "ok",
        "",
    ),
    "a hidden H100 with 3.2.0": (
        World(("H100",), "2.6.0", "3.2.0", variables=(("CUDA_VISIBLE_DEVICES", "-1"),)),
        "degraded",
        f'{UNSET} && pip install "torch==2.8.0"',
        "ok",
        f"28 of {ALL}",
    ),
    "a CPU build and a hidden H100": (
        World(("H100",), "2.13.0+cpu", "3.7.1", variables=(("CUDA_VISIBLE_DEVICES", ""),)),
        "degraded",
        f'{UNSET} && pip install --force-reinstall "torch==2.13.0" --index-url {INDEX}cu130',
        "ok",
        EVERY,
    ),
    # environment variables
    "a cache that cannot be written": (
        World(("H100",), variables=(("TRITON_CACHE_DIR", "/dev/null/cache"),)),
        "broken",
        ELSEWHERE,
        "ok",
        "",
    ),
    "a ptxas that is not there": (
        World(("H100",), variables=(("TRITON_PTXAS_PATH", "/nowhere/ptxas"),)),
        "broken",
        "unset TRITON_PTXAS_PATH",
        "ok",
        "",
    ),
    "a setting that is none": (
        World(("H100",), variables=(("FLASHLIN_PATH", "cuda"),)),
        "broken",
        "unset FLASHLIN_PATH",
        "ok",
        "",
    ),
    "much at once": (
        World(
            ("H100",),
            "2.6.0",
            "3.2.0",
            triton_error=BAD,
            variables=(("FLASHLIN_PATH", "cuda"), ("TRITON_CACHE_DIR", "/dev/null/cache")),
        ),
        "broken",
        f'unset FLASHLIN_PATH && {ELSEWHERE} && pip install "torch==2.8.0"',
        "ok",
        EVERY,
    ),
    "a card that is closed": (
        World(("H200",), mode="Prohibited"),
        "broken",
        "sudo nvidia-smi -c DEFAULT",
        "ok",
        "",
    ),
    "two cards that are closed": (
        World(("H200", "H200"), mode="Prohibited"),
        "broken",
        "sudo nvidia-smi -c DEFAULT",
        "ok",
        "",
    ),
    "no compiler": (
        World(("H200",), variables=(("CC", "/nowhere/icx"),)),
        "broken",
        "unset CC",
        "ok",
        "",
    ),
    # another package requires the installed version
    "vLLM on a B200": (
        World(("B200",), "2.6.0", "3.2.0", others=(VLLM,)),
        "broken",
        "",
        "broken",
        f"with torch 2.9.1, all {ALL} ops would run as Triton kernels; in its way: vllm 0.8.5 needs "
        "torch==2.6.0",
    ),
    "vLLM on an H100": (
        World(("H100",), "2.6.0", "3.2.0", others=(VLLM,)),
        "ok",
        "",
        "ok",
        "in its way: vllm 0.8.5 needs torch==2.6.0",
    ),
    "vLLM and a broken Triton": (
        World(("H100",), "2.6.0", "3.2.0", triton_error=BAD, others=(VLLM,)),
        "degraded",
        'pip install --force-reinstall --no-deps "triton==3.2.0"',
        "ok",
        f"with torch 2.8.0, 28 of {ALL} ops would run with their usual number of warps; in its way: vllm",
    ),
    "uv": (
        World(("H100",), triton_error=BAD, installer="uv"),
        "degraded",
        'uv pip install --reinstall --no-deps "triton==3.6.0"',
        "ok",
        "",
    ),
    "conda": (
        World(("H100",), "2.6.0", "3.2.0", installer="conda"),
        "ok",
        'conda install "pytorch==2.8.0"',
        "ok",
        "",
    ),
    "an old Python": (
        World(("B300",), "2.8.0", "3.4.0", python=(3, 9)),
        "degraded",
        "",
        "degraded",
        "in its way: it needs Python 3.10 to 3.14",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.alternate
def test_one_advice_that_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, grade, command, then, words = MACHINES[name]
    found = world.doctor(monkeypatch)
    said = found.advice or Advice(command="", why="")
    assert (found.grade, said.command) == (grade, command) and words in said.why
    after = world.after(command).doctor(monkeypatch) if command else found
    assert after.grade == then and GRADES.index(then) <= GRADES.index(grade)
    assert after.advice is None or not after.advice.command, "the advice leads to more advice"
    assert cost(after) <= cost(found), "the machine is worse after the advice than before"


GRADES = ("ok", "degraded", "broken")
COSTS = ("kernels", "fewer warps", "batch in parts", "fp32 copies", "plain torch", "cannot run")


def cost(found: Report) -> int:
    """Return the summed cost of all planned ops; lower is closer to kernels on the unchanged tensors."""
    on_gpu = any(one.backend == "cuda" for one in found.devices)
    return sum(COSTS.index(plan.way) for plan in found.plans) if on_gpu else len(found.plans) * len(COSTS)


# --- the simulated machine's reaction to other commands, so that the tests can detect wrong advice ---


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a broken torch", 'pip install "torch>=2.4"'),
        ("an H100 with a broken Triton", 'pip install "triton==3.6.0"'),
        ("a CPU build beside an H100", 'pip install "torch==2.13.0"'),
        ("a torch without its libraries", 'pip install --force-reinstall --no-deps "torch==2.10.0"'),
        (
            "a CPU build beside an old driver",
            f'pip install --force-reinstall "torch==2.13.0" --index-url {INDEX}cu130',
        ),
    ],
)
def test_what_pip_finds_satisfied_mends_nothing(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, grade, *_ = MACHINES[name]
    left = world.after(command.replace(">=2.4", f"=={world.torch}")).doctor(monkeypatch)
    assert left.grade == grade and left.advice is not None and left.advice.command


def test_what_another_package_needs_is_not_broken() -> None:
    world, *_ = MACHINES["vLLM on a B200"]
    with pytest.raises(AssertionError, match="breaks vllm"):
        world.after('pip install "torch==2.9.1"')


def test_an_advice_that_another_pair_would_follow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # This command installs only the next Triton, which does not match torch 2.6. Doctor must advise again.
    world, *_ = MACHINES["a T4 with 3.2.0"]
    after = world.after('pip install "triton==3.3.1"').doctor(monkeypatch)
    assert after.advice is not None and after.advice.command


def test_a_named_machine_is_advised_by_its_triton() -> None:
    for target in ("triton=3.3.0,sm=120", "triton=3.3.0,sm=120,torch=2.7.0"):
        advice = flashlin.doctor(target=target).advice
        # Triton 3.3.1 would work, but the wheels of its torch, 2.7, contain no code for this GPU.
        assert advice is not None and advice.command == 'pip install "torch==2.8.0"'
        assert f"all {ALL}" not in advice.why and "ops run as Triton kernels" in advice.why


@pytest.mark.parametrize(
    "target", [H200, "triton=3.9.0,sm=100", "triton=3.3.1,sm=75", "MI300,triton=3.6.0", "cpu"]
)
@pytest.mark.alternate
def test_nothing_is_advised_where_nothing_helps(target: str) -> None:
    assert flashlin.doctor(target=target).advice is None


def test_what_pip_knows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "triton", "3.6.0")
    info = installed(tmp_path, "vllm", "0.8.5") / "vllm-0.8.5.dist-info"
    (info / "INSTALLER").write_text("uv\n")
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Dist: torch==2.6.0\nRequires-Dist: torchvision==0.21\nRequires-Dist: torch\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert sorted(machine.distributions()) == [
        Dist("triton", "3.6.0", str(tmp_path)),
        Dist("vllm", "0.8.5", str(tmp_path), "uv", ("torch==2.6.0",)),
    ]
