"""Tests of the overlapping kernels: when they are planned, and that every kind compiles for Hopper.

tests/gpu/test_overlapped.py runs them.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import flashlin
from benchmarks.pretended import Driver, Started, pretended
from flashlin import dispatch
from flashlin.compat import launch
from flashlin.compat.descriptors import Lent, described
from flashlin.compat.target import parse, pretend
from flashlin.guards import launch_table
from flashlin.guards.plan_types import Launch
from flashlin.policy import Policy
from flashlin.testing.compile import Job, compile_launches
from flashlin.testing.record import Recorded, recording
from tests.direct import needs_direct_starts
from tests.overlapped import ALL, SHARED, kernel_of

TRIAL = Policy(canary="trial")
HOPPER = "triton=3.6.0,sm=90"


FAMILY = {"chunk_simple_gla": "simple_gla", "chunk_gated_delta_rule": "delta", "chunk_kda": "dplr"}
PLAIN = {op: f"{family}_scan" for op, family in FAMILY.items()}
SCANS = {op: f"{family}_overlapped" for op, family in FAMILY.items()}


@pytest.fixture(params=FAMILY)
def op(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def problem(op: str, **facts: Any) -> flashlin.Problem:
    given: dict[str, Any] = {"B": 2, "T": 1024, "H": 4, "K": 128, "V": 128, "N": 2, "dtype": "bfloat16",
                             "options": ("beta",) if op == "chunk_kda" else ("g",), **facts}
    return flashlin.Problem(op, FAMILY[op], "chunk", **given)


def planned(op: str, machine: str = HOPPER, policy: Policy = TRIAL, **facts: Any) -> str:
    """Return the configuration of the forward scan that is planned for an op."""
    [found] = [launch for launch in dispatch.plan(problem(op, **facts), parse(machine), policy).launches
               if launch.kernel in (SCANS[op], PLAIN[op])]
    return found.config


def test_shorter_chunks_of_delta_rules_have_no_overlapping_kernel() -> None:
    """These kernels read the inverses of chunks of 64 tokens."""
    short = problem("chunk_gated_delta_rule", needs_grad=True, avoid=frozenset({"chunks of 64"}))
    found = dispatch.plan(short, parse(HOPPER), TRIAL).launches
    assert {dict(launch.tile).get("BT", 32) for launch in found} == {32}
    assert not [launch.kernel for launch in found if "overlapped" in launch.kernel]


@pytest.mark.parametrize(("heads", "plain"), [(64, False), (4, True)])
def test_narrow_strips_restore_the_states_of_delta_rules(heads: int, plain: bool) -> None:
    """Elsewhere the overlapping kernel of the forward scan does."""
    found = dispatch.plan(problem("chunk_gated_delta_rule", needs_grad=True, H=heads),
                          parse(f"{HOPPER},sms=132"), TRIAL)
    assert found.has("delta_overlapped") and found.has("delta_overlapped_grads")
    assert found.has("delta_states") == plain


def test_it_is_taken_where_it_has_run(op: str, monkeypatch: pytest.MonkeyPatch,
                                      fresh: Callable[[], None]) -> None:
    config = planned(op)
    monkeypatch.setattr(launch_table, "table", lambda: {config: {"3.6.0": {"compiled": "sm90"}}})
    fresh()
    assert config.startswith(SCANS[op]) and planned(op, policy=Policy()).startswith(PLAIN[op])
    prepares = next(one.config for one in dispatch.plan(problem(op), parse(HOPPER), TRIAL).launches)
    ran = {one: {"3.6.0": {"ran": "sm90"}} for one in (config, prepares)}
    monkeypatch.setattr(launch_table, "table", lambda: ran)
    fresh()
    assert planned(op, policy=Policy()) == config
    assert planned(op, policy=Policy(), T=512).startswith(PLAIN[op]), "the host takes longer"
    assert planned(op, "triton=3.7.1,sm=90", Policy()).startswith(PLAIN[op]), "no recorded run there"


@pytest.mark.parametrize("machine, facts", [
    ("triton=3.5.1,sm=90", {}), ("triton=3.6.0,sm=80", {}), ("triton=3.6.0,sm=100", {}),
    (HOPPER, {"T": 1000}), (HOPPER, {"K": 96}), (HOPPER, {"V": 96}), (HOPPER, {"dtype": "float32"}),
    (HOPPER, {"varlen": True, "B": 1}), (HOPPER, {"max_warps": 2})])
def test_what_it_does_not_take(op: str, machine: str, facts: dict[str, Any]) -> None:
    takes = "varlen" in facts and op == "chunk_gated_delta_rule"
    assert planned(op, machine, **facts).startswith((SCANS if takes else PLAIN)[op])


def test_an_invariant_call_takes_one_scan_for_all_lengths(op: str) -> None:
    assert {planned(op, policy=TRIAL._replace(invariant=True), T=T).split()[0]
            for T in (128, 130)} == {PLAIN[op]}


def test_portable_settings_exclude_every_overlapping_kernel(monkeypatch: pytest.MonkeyPatch,
                                                            fresh: Callable[[], None]) -> None:
    """FLASHLIN_PORTABLE=1 replaces the overlapping kernels of all calls, forward and backward."""
    monkeypatch.setenv("FLASHLIN_PORTABLE", "1")
    fresh()
    found = {launch.kernel for name in ALL for launch in starts(name, "")}
    assert not [kernel for kernel in found if "overlapped" in kernel]
    assert {f"{family}_scan" for family in FAMILY.values()} <= found


@pytest.mark.alternate
def test_two_gated_programs_share_a_multiprocessor() -> None:
    """Two programs of an overlapping kernel with gates fit into one multiprocessor at once.

    Its registers and its shared memory suffice for both. Each program takes 1 KB more shared memory than it
    requests.
    """
    for name in ("a decay a token", "heads of 64", "groups, in float32", "groups, in float32, gradients"):
        [launch] = starts(name)
        [result] = compile_launches([Job(90, launch)])
        threads = 32 * 2 * launch.num_warps  # num_warps warps multiply, and as many others load
        assert 2 * result.registers * threads <= 65_536 and 2 * (result.shared + 1024) <= 233_472, result
    [alone] = starts("a decay a head")
    assert dict(alone.constants)["REGISTERS"] == 0


@pytest.mark.parametrize(("facts", "taken"), [
    ({}, True), ({"dtype": "float16"}, True), ({"K": 64}, False), ({"V": 128}, False), ({"T": 1000}, False),
    ({"varlen": True, "B": 1, "N": 2}, False), ({"dtype": "float32"}, False), ({"options": ("g",)}, False)])
def test_where_sums_over_heads_are_in_gluon(facts: dict[str, Any], taken: bool) -> None:
    given: dict[str, Any] = {"B": 2, "T": 1024, "H": 8, "K": 128, "V": 64, "N": 2, "dtype": "bfloat16",
                             "options": ("g", "gva", "v_first"), "needs_grad": True, **facts}
    problem = flashlin.Problem("mamba_chunk_scan_combined", "simple_gla", "chunk", **given)
    kernels = [one.kernel for one in dispatch.plan(problem, parse(HOPPER), TRIAL).launches]
    assert ("simple_gla_overlapped_shared" in kernels) == taken
    assert taken or kernels[-1] in ("simple_gla_shared", "simple_gla_grads")


def starts(name: str, kernel: str | None = None) -> list[Recorded]:
    """Return the launches of a call whose kernel name contains ``kernel``, or by default is ``kernel_of``."""
    own = kernel_of(name)
    machine = parse(f"triton={triton.__version__},sm=90")
    with flashlin.settings(canary="trial"), recording(machine) as launches:
        ALL[name](torch.device("cpu"))
    return [launch for launch in launches
            if (launch.kernel == own if kernel is None else kernel in launch.kernel)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.alternate
def test_every_kind_compiles_and_spills_next_to_nothing(name: str) -> None:
    """Every kind of overlapping kernel compiles with few spilled bytes per thread.

    Up to 80 bytes are allowed if two programs share a multiprocessor. Up to 240 bytes are allowed for sums
    over heads, where dq and dk stay in the 232 registers of a thread. Up to 16 bytes are allowed for chunks
    of 16 tokens. All other kernels must not spill.
    """
    [launch] = starts(name)
    [result] = compile_launches([Job(90, launch)])
    constants = dict(launch.constants)
    most = 240 if name == SHARED else 80 if constants.get("REGISTERS") else 16 * (constants["BT"] == 16)
    assert result.ok and result.spills <= most, result
    assert result.matrix == ("wgmma.mma_async",), result
    assert result.shared <= launch.shared <= parse(HOPPER).shared


@pytest.mark.alternate
@pytest.mark.parametrize("name", ["gated delta, heads of 64", "gated delta, float16, gradients", "delta"])
def test_six_programs_of_the_inverses_share_a_multiprocessor(name: str) -> None:
    """Six programs of the inverse kernel fit into the registers and the shared memory, and spill little."""
    [launch] = starts(name, "delta_overlapped_inverse")
    [result] = compile_launches([Job(90, launch)])
    assert result.ok and result.spills <= 48, result
    assert 6 * 128 * result.registers <= 65_536 and 6 * (result.shared + 1024) <= 233_472, result
    assert result.shared <= launch.shared


@pytest.mark.alternate
def test_kernels_of_short_chunks_compile() -> None:
    """The other kernels of short chunks compile: their preparation, and the scan that stores states.

    The preparation keeps its bound on registers, and spills up to 32 bytes.
    """
    name = "KDA, as in its layer, gradients"
    launches = [*starts(name, "dplr_prepare_raw"), starts(name, "dplr_overlapped")[1]]
    *prepared, states = compile_launches([Job(90, launch) for launch in launches])
    assert [result.registers <= 168 and result.spills <= 32 for result in prepared] == [True, True], prepared
    assert dict(launches[-1].arguments)["q_in"] is None and states.spills == 0, states


@needs_direct_starts
@pytest.mark.parametrize("name", ALL)
def test_later_starts_hand_over_what_the_first_one_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts pass the same arguments as the first one, apart from addresses.

    Numbers must be equal. Descriptors must give equal values to the function of Triton that encodes them.
    """
    from triton.backends.nvidia import driver
    kind = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [64, 64], "fp4_padded": False}
    addresses: list[int] = []

    def fill(address: int, *facts: Any) -> Any:
        addresses.append(address)
        return facts

    def handed(one: Started) -> list[Any]:
        return [tuple(driver.make_tensordesc_arg(x, kind)) if isinstance(x, (Lent, TensorDescriptor)) else x
                for x in one.arguments]
    monkeypatch.setattr(launch, "_kernels", {})
    pretend(parse(f"triton={triton.__version__},sm=90,sms=132"))
    with pretended(Driver()) as fake, flashlin.settings(canary="trial"), torch.no_grad():
        for _ in range(4):
            ALL[name](torch.device("cpu"))
        fake.fill_tma_descriptor = fake.fill_tma_descriptor_tiled = fill
        starts = [one for one in fake.started if one.compiled.fn.__name__ == kernel_of(name)]
        first, *later = map(handed, starts)
    kinds = [{type(x) for x in one.arguments} & {Lent, TensorDescriptor} for one in starts]
    assert kinds == [{TensorDescriptor}, {Lent}, {Lent}, {Lent}]
    assert len(addresses) in range(16, 37, 4) and all(address and address % 16 == 0 for address in addresses)
    numbers = [at for at, x in enumerate(first) if not isinstance(x, torch.Tensor)]
    assert [[one[at] for at in numbers] for one in later] == 3 * [[first[at] for at in numbers]]


class Jitted:
    """A jitted kernel that returns the arguments with which it is started."""
    arg_names = ("x", "y", "HV", "rows", "REGISTERS")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *values, **options: (values, options)


def test_arguments_that_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """``described`` keeps None, and passes the bound on registers to Triton's compiler."""
    x, start = torch.zeros(4, 2, 64, dtype=torch.bfloat16), described()(Jitted())[1,]
    kernel = described(x=lambda given: (given["HV"] * 64, 16, 64), y=lambda _: (64, 16, 64, 8))(Jitted())
    (made, *rest), options = kernel[1,](x, None, 2, 4, REGISTERS=168, num_warps=2)
    assert isinstance(made, TensorDescriptor) and (made.shape, made.strides) == ([4, 128], [128, 1])
    assert rest == [None, 2, 4] and options == {"REGISTERS": 168, "num_warps": 2, "maxnreg": 168}
    assert kernel[1,](None, x, 2, 4, 0)[0][1].shape == [8, 64]
    assert kernel.lent((512, None, 2, 4, 0)) == [Lent(512, [4, 128], [128, 1]), None, 2, 4, 0]
    # Releases without Gluon can start kernels without descriptors.
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert kernel[1,](None, None, 2, 4, 168) == ((None, None, 2, 4, 168), {"maxnreg": 168})
    assert start(x, x, 2, 4, 0) == ((x, x, 2, 4, 0), {})
    with pytest.raises(ImportError):
        kernel[1,](x, None, 2, 4, 0)


def test_kernels_get_tensors_that_begin_at_16_bytes() -> None:
    """Kernels receive tensors that start at a multiple of 16 bytes, in forward and backward.

    This holds even if inputs and incoming gradients are not aligned.
    """
    begins: list[int] = []

    def look(one: Launch, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        begins.extend(x.data_ptr() % 16 for x in arguments.values()
                      if isinstance(x, torch.Tensor) and x.numel())
    q, k, v, pull = (torch.zeros(2 * 64 * 2 * 16 + 1)[1:].view(2, 64, 2, 16).requires_grad_() for _ in "qkvo")
    assert q.data_ptr() % 16
    pretend(parse(f"triton={triton.__version__},sm=90,sms=132"))
    launch.replace_starter(look)
    for op in (flashlin.chunk_linear_attn, flashlin.chunk_delta_rule):
        beside = {"beta": torch.zeros(2, 64, 2)} if op is flashlin.chunk_delta_rule else {"normalize": False}
        torch.autograd.grad(op(q, k, v, **beside)[0], (q, k, v), pull)
    assert len(begins) > 40 and not any(begins)
