"""Tests of the launch table: its entries, their use by planning and doctor, agreement with the results."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flashlin import dispatch
from flashlin.compat.target import parse
from flashlin.diagnostics import typical_plans
from flashlin.guards import launch_table
from flashlin.guards.plan_types import Launch, Plan, Problem
from flashlin.policy import Policy
from flashlin.testing import record
from flashlin.testing.record import Recorded
from matrix import support
from matrix.results import (
    LAUNCHES,
    Cell,
    CellResult,
    Compiled,
    Figures,
    by_source,
    load_result,
    source_of_each,
)
from matrix.status import CellState, Outcome, Planned

LAUNCH = Launch("scan", (1,), 4, 2, (("BT", 64),), 0, 0, frozenset({"dot", "bf16"}))
TABLE = {LAUNCH.config: {"3.6.0": {"compiled": "sm80 sm90", "ran": "sm90"},
                         "3.3.0": {"failed": "sm90", "compiled": "sm80"},
                         "3.3.1": {"compiled": "sm90"}}}
PROBLEM = Problem("chunk_simple_gla", "simple_gla", "chunk", 2, 128, 4, 64, 64, 2, "bfloat16", options=("g",))


@pytest.mark.parametrize("place, level", [
    ("triton=3.6.0,sm=90", "ran"), ("triton=3.6.0,sm=80", "compiled"), ("triton=3.6.0,sm=75", "unknown"),
    ("triton=3.6.2,sm=90", "ran"), ("triton=3.7.1,sm=90", "unknown"), ("triton=3.3.1,sm=90", "compiled"),
    ("triton=3.3.0,sm=90", "failed"), ("triton=3.3.2,sm=90", "failed"),
    ("triton=3.6.0+git1234,sm=90", "unknown"), ("backend=cpu", "unknown")])
def test_trust_in_a_launch(place: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "table", lambda: TABLE)
    assert launch_table.trust(LAUNCH.config, parse(place)) == level
    assert launch_table.trust(LAUNCH._replace(num_warps=8).config, parse(place)) == "unknown"


def plan_on(text: str, policy: Policy = Policy()) -> Plan:
    return dispatch.plan(PROBLEM, parse(text), policy)


def test_what_failed_is_planned_otherwise(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> None:
    monkeypatch.setattr(launch_table, "table", dict)
    first = plan_on("triton=3.6.0,sm=90").launches[-1]
    bad = {first.config: {"3.6.0": {"failed": "sm90"}}}
    monkeypatch.setattr(launch_table, "table", lambda: bad)
    fresh()
    plan = plan_on("triton=3.6.0,sm=90")
    assert [reason.code
            for reason, _ in plan.steps] == ["launch-table"] and first.config not in {launch.config
                                                                          for launch in plan.launches}
    assert first.config in plan.steps[0][0].got
    assert first.config in {launch.config
                            for launch
                            in plan_on("triton=3.6.0,sm=80").launches}, "other GPUs are not affected"
    assert first.config in {launch.config
                            for launch in plan_on("triton=3.6.0,sm=90", Policy(policy="off")).launches}
    assert typical_plans.evidence([plan]) == "no record"


def test_sequences_stay_whole_where_a_kernel_for_parts_failed(monkeypatch: pytest.MonkeyPatch,
                                                              fresh: Callable[[], None]) -> None:
    monkeypatch.setattr(launch_table, "table", dict)
    long, on = PROBLEM._replace(B=1, N=1, T=32768, H=8, K=128, V=128), parse("triton=3.6.0,sm=90,sms=132")
    first = dispatch.plan(long, on)
    carrying = first.launch("carry_decayed")
    assert first.part and carrying.num_warps == 4
    bad = {carrying.config: {"3.6.0": {"failed": "sm90"}}}
    monkeypatch.setattr(launch_table, "table", lambda: bad)
    fresh()
    plan = dispatch.plan(long, on)
    assert not plan.part and plan.problem.max_warps == 8 and plan.path == "triton"
    assert [name for _, name in plan.steps] == ["other_tile"]


AMPERE, HOPPER = "triton=3.6.0,sm=80", "triton=3.6.0,sm=90"
TRAINING = PROBLEM._replace(K=128, V=128, needs_grad=True)
Launches = Callable[[str], dict[str, Launch]]


@pytest.fixture
def launches_where(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> Callable[..., Launches]:
    """Return a function of (slow, failed) that installs a launch table with these configurations.

    Its result is a function that plans for a target and returns the launches by kernel name. The table may
    change only launches: it must not add a step to the plan, because users would see the step.
    slow: metrics of slow configurations, as in ``launch_table.Slow``.
    failed: configurations that failed.
    """
    def known(slow: dict[str, tuple[int, ...]], failed: tuple[str, ...] = ()) -> Launches:
        cards = ("sm80", "sm90")
        table = {config: {"3.6.0": {"slow": dict.fromkeys(cards, figures)}}
                 for config, figures in slow.items()}
        table |= {config: {"3.6.0": {"failed": "sm80 sm90"}} for config in failed}
        monkeypatch.setattr(launch_table, "table", lambda: table)
        fresh()

        def planned(place: str) -> dict[str, Launch]:
            plan = dispatch.plan(TRAINING, parse(place), Policy(policy="strict"))
            assert plan.path == "triton" and not plan.steps
            return {launch.kernel: launch for launch in plan.launches}
        return planned
    return known


def how(launch: Launch) -> tuple[int, int, int]:
    return launch.block("BT"), launch.num_warps, launch.num_stages


def test_what_is_slow_has_other_warps_or_stages(launches_where: Callable[..., Launches]) -> None:
    before = launches_where({})(AMPERE)
    states, scan = before["simple_gla_states"], before["simple_gla_scan"]
    assert how(states) == how(scan) == (64, 4, 2)
    eight = states._replace(num_warps=8).config
    after = launches_where({states.config: (1200,)})(AMPERE)
    assert how(after["simple_gla_states"]) == (64, 8, 2) and after["simple_gla_scan"] == scan, "the scan must stay"
    after = launches_where({states.config: (1200,), eight: (1100,)})(AMPERE)
    assert how(after["simple_gla_states"]) == (64, 8, 1)
    after = launches_where({states.config: (1200,)}, failed=(eight,))(AMPERE)
    assert how(after["simple_gla_states"]) == (64, 8, 1), "a configuration that failed must not be planned"


def every_way(launch: Launch, spills: int) -> dict[str, tuple[int, ...]]:
    """Return spill metrics for a launch with 4 or 8 warps and 1 or 2 stages.

    Fewer warps spill less, and so do fewer stages.
    """
    return {launch._replace(num_warps=warps, num_stages=stages).config:
            (spills + 100 * warps + stages,) for warps in (4, 8) for stages in (1, 2)}


def slow_throughout(launches_where: Callable[..., Launches]) -> dict[str, tuple[int, ...]]:
    """Return spill metrics for every plan of simple_gla_states on an Ampere GPU.

    The chunk of 64 spills least among the planned chunk lengths.
    """
    slow: dict[str, tuple[int, ...]] = {}
    for BT, spills in ((64, 20000), (32, 30000), (16, 40000)):
        states = launches_where(slow)(AMPERE)["simple_gla_states"]
        assert how(states) == (BT, 4, 2)
        slow |= every_way(states, spills)
    return slow


def test_what_is_slow_in_every_way_is_the_least_slow_or_has_shorter_chunks(
        launches_where: Callable[..., Launches]) -> None:
    states = launches_where({})(AMPERE)["simple_gla_states"]
    after = launches_where(every_way(states, 1100))(AMPERE)
    assert how(after["simple_gla_states"]) == (64, 4, 1)
    after = launches_where(every_way(states, 4100))(AMPERE)
    assert {after[f"simple_gla_{name}"].block("BT") for name in ("scan", "states", "dv", "grads")} == {32}
    least = launches_where(slow_throughout(launches_where))(AMPERE)
    assert how(least["simple_gla_states"]) == (64, 4, 1)


def test_where_configurations_were_timed_only_what_ptxas_gave_up_is_slow(
        launches_where: Callable[..., Launches]) -> None:
    states = launches_where({})(HOPPER)["simple_gla_states"]
    assert launches_where({states.config: (30000,)})(HOPPER)["simple_gla_states"] == states
    assert launches_where({states.config: (900, 32)})(HOPPER)["simple_gla_states"].num_warps == 8


@pytest.mark.parametrize("registers, spills, slow", [
    (255, 1000, None), (255, 1001, "spills 1,001 bytes a thread"), (32, 0, None), (40, 8, None),
    (32, 8, "spills 8 bytes a thread, given 32 registers")])
def test_what_is_slow(registers: int, spills: int, slow: str | None) -> None:
    found = launch_table.slow_of(registers, spills)
    assert (str(found) if found else None) == slow


def test_doctor_tells_what_spills_most(launches_where: Callable[..., Launches]) -> None:
    launches_where(slow_throughout(launches_where))
    plan = dispatch.plan(TRAINING, parse(AMPERE))
    assert typical_plans.evidence([plan]) == (
        "no record, slow: simple_gla_states spills 20,401 bytes a thread")


def test_doctor_tells_the_least_that_is_known(monkeypatch: pytest.MonkeyPatch,
                                              fresh: Callable[[], None]) -> None:
    monkeypatch.setattr(launch_table, "table", dict)
    plan = plan_on("triton=3.6.0,sm=90")
    configs = [launch.config for launch in plan.launches]
    everything = {config: {"3.6.0": {"ran": "sm90"}} for config in configs}
    for table, told in ((everything, "ran"),
                        ({**everything, configs[-1]: {"3.6.0": {"compiled": "sm90"}}}, "compiled"),
                        ({**everything, configs[-1]: {}}, "no record")):
        monkeypatch.setattr(launch_table, "table", lambda table=table: table)
        fresh()
        assert typical_plans.evidence([plan]) == told


def found(**compiled: Compiled) -> CellState:
    """Return the state of a matrix cell with two launches of one configuration.

    compiled: compilation results by name, n1 for the first launch and n2 for the second.
    """
    outcomes = (Outcome(op="op", call="", card="sm90", path="triton",
                        launches=("gate_cumsum-1", "gate_cumsum-2")),)
    launches = {f"gate_cumsum-{n}": Recorded("flashlin.kernels.tile_ops", "gate_cumsum", (), (), 4, 1, 0, (),
                                             CONFIG) for n in (1, 2)}
    result = CellResult(cell=Cell(triton="3.6.0", kind="gate"))
    for name, one in compiled.items():
        result.enter(launches[f"gate_cumsum-{name[1:]}"], f"gate_cumsum-{name[1:]}", "sm90", one)
    return CellState(result, Planned(outcomes, {(name, "sm90"): one for name, one in launches.items()}))


def test_a_configuration_is_that_of_its_card(tmp_path: Path) -> None:
    """A configuration is recorded for the GPU that uses it, even if two GPUs share the compiled code.

    The GPU without bf16 uses the kernel with the configuration of a float32 call.
    """
    one = Recorded("flashlin.kernels.tile_ops", "gate_cumsum", (), (), 4, 1, 0, (), f"{CONFIG} bf16")
    on = {"sm75": one._replace(config=CONFIG), "sm80": one}
    result = CellResult(cell=Cell(triton="3.6.0", kind="gate"))
    for card, launch in on.items():
        result.enter(launch, "gate_cumsum-1", card, Compiled())
    planned = Planned(tuple(Outcome(op="op", call="", card=card, path="triton", launches=("gate_cumsum-1",))
                            for card in on),
                      {("gate_cumsum-1", card): launch for card, launch in on.items()})
    assert support.launch_facts([CellState(result, planned)], tmp_path) == {
        (launch.config, "3.6.0", "compiled", card) for card, launch in on.items()}


CONFIG = "gate_cumsum BT=64 warps=4 stages=1"
FINE, BAD = Compiled(), Compiled(status="abort")


@pytest.mark.parametrize("verdicts, levels", [
    ({"n1": FINE, "n2": FINE}, {"compiled": "sm90"}), ({"n1": FINE, "n2": BAD}, {"failed": "sm90"}),
    ({"n1": FINE}, None), ({"n1": BAD}, {"failed": "sm90"})])
def test_a_configuration_holds_where_every_use_of_it_compiles(verdicts: dict[str, Compiled],
                                                              levels: dict[str, list[str]] | None,
                                                               tmp_path: Path) -> None:
    made = json.loads(support.launch_table([found(**verdicts)], tmp_path))
    assert made.get(CONFIG, {}).get("3.6.0") == levels


def test_what_was_made_of_another_source_proves_nothing(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(n1=FINE, n2=BAD)
    whole.result.save(tmp_path)
    assert load_result(tmp_path, whole.result.cell).launches == whole.result.launches
    path = tmp_path / LAUNCHES
    path.write_text(path.read_text().replace(whole.result.kernels["gate_cumsum"],
                                             "flashlin.kernels.tile_ops:0123"))
    old = load_result(tmp_path, whole.result.cell)
    assert not old.launches and json.loads(support.launch_table([CellState(old, whole.planned)],
                                                                tmp_path)) == {}
    for gone in ("flashlin.kernels.gone:0123", ""):
        assert not record.is_current(gone, "gate_cumsum")
    gpu = {"triton": "3.6.0", "capability": [9, 0],
           "configs": by_source({CONFIG: record.source_hash("flashlin.kernels.tile_ops", "gate_cumsum"),
                                 "gate_cumsum BT=32": "flashlin.kernels.tile_ops:0123"})}
    (tmp_path / "gpu-x.json").write_text(json.dumps(gpu))
    assert json.loads(support.launch_table([], tmp_path)) == {CONFIG: {"3.6.0": {"ran": "sm90"}}}


def test_a_gpu_record_of_the_old_form_is_refused() -> None:
    kept = by_source({CONFIG: "a:1"})
    assert kept == {"a:1 gate_cumsum": ["BT=64 warps=4 stages=1"]} and source_of_each(kept) == {CONFIG: "a:1"}
    with pytest.raises(ValueError, match=r"configs: got the key 'a:1' of an older record, need a source"):
        source_of_each({"a:1": [CONFIG]})


def test_gpus_with_the_same_spills_share_an_entry_of_the_file(tmp_path: Path) -> None:
    whole, slow = found(), Compiled(slow=Figures(spills=2000, registers=255))
    launch = next(iter(whole.planned.places.values()))
    for card in ("sm80", "sm90"):
        whole.result.enter(launch, "gate_cumsum-1", card, slow)
    text = support.launch_table([whole], tmp_path)
    assert '"slow":{"sm80 sm90":[2000]}' in text
    (tmp_path / "table.json").write_text(text)
    [record] = launch_table.read(tmp_path / "table.json")[CONFIG].values()
    assert record["slow"] == {"sm80": [2000], "sm90": [2000]}
