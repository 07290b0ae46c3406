"""Sequences that are split over several ranks: gloo processes on the torch path.

Outputs, states and gradients equal those of one device. If a rank fails, the others raise an error. All jobs
run in one set of processes.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flashlin
from flashlin import dispatch
from flashlin.guards.tensors import FLOATS
from flashlin.ops._common import context_parallel
from flashlin.ops._common.ranks import SIZES, Sizes
from tests.ranks import (
    Call,
    Job,
    computed,
    divided,
    equal_one,
    made,
    model_equals_one,
    of_rank,
    run_jobs,
    together,
)
from tests.share import WHOLE

OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda", "mamba_chunk_scan_combined",
       "chunk_rwkv7", "chunk_linear_attn", "chunk_delta_rule", "chunk_rwkv6", "chunk_dplr_delta_rule",
       "chunk_lightning_attn", "chunk_iplr_delta_rule", "chunk_retention", "chunk_gdn2",
       "chunk_comba", "chunk_gated_delta_product")
WINDOWS = ("causal_conv1d", "token_shift")
STATES = ("initial_state", "initial_states", "cache")
T = 48
# By name: number of ranks, number of heads, and edges of the sequences. Some settings have an empty sequence,
# also at the start of a rank, or a sequence that covers three or four ranks.
SETTINGS: dict[str, tuple[int, int, list[int] | None]] = {
    "four ranks, states": (4, 2, [0, 2, T - 1, T]),
    "two ranks, rows": (2, 3, None),
    "three ranks, packed": (3, 2, [0, 5, 16, 16, 20, T - 4, T]),
    "two ranks, heads": (2, 2, [0, 5, T // 2, T // 2, T - 3, T]),
    "four ranks, rows": (4, 3, None)}


def _fla_context(group: Any, edges: list[int], rows: int) -> SimpleNamespace:
    """Return the context that fla.ops.cp.build_cp_context returns on this rank.

    cu_seqlens: edges of the sequences on this rank, without empty sequences.
    pre_num_ranks: number of earlier ranks that have tokens of its first sequence.
    post_num_ranks: number of later ranks that have tokens of its last sequence.
    """
    rank, start = dist.get_rank(group), dist.get_rank(group) * rows
    mine = sorted({min(max(edge, start), start + rows) - start for edge in edges})
    began = max(edge for edge in edges if edge <= start)
    ends = min(edge for edge in edges if edge >= start + rows)
    return SimpleNamespace(group=group, cu_seqlens=torch.tensor(mine), cu_seqlens_cpu=torch.tensor(mine),
                           layout="contiguous", pre_num_ranks=rank - began // rows,
                           post_num_ranks=(ends - 1) // rows - rank, is_first_rank=rank == began // rows,
                           is_last_rank=rank == (ends - 1) // rows, pre_num_conv_tokens=start - began,
                           conv1d_kernel_size=4, pre_num_ranks_dev=None)


def _zigzag_context(group: Any, edges: list[int], rows: int) -> SimpleNamespace:
    """Return the context of fla on this rank in the layout zigzag.

    With R ranks, the tokens are divided into 2 R equal pieces. Rank r has piece r, followed by piece
    2 R - 1 - r.
    """
    rank, size, half = dist.get_rank(group), dist.get_world_size(group), rows // 2
    starts = [rank * half, (2 * size - 1 - rank) * half]
    mine = [at * half + edge for at, start in enumerate(starts) for edge in
            sorted({0, *(edge - start for edge in edges if start < edge < start + half)})]
    bounds = torch.tensor([*mine, rows])
    return SimpleNamespace(group=group, cu_seqlens=bounds, cu_seqlens_cpu=bounds, layout="zigzag",
                           part_len=half, pre_num_ranks=None, post_num_ranks=None, pre_num_ranks_dev=None,
                           is_first_by_part=tuple(start in edges for start in starts))


def _in_zigzag(x: torch.Tensor, group: Any) -> torch.Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = x.chunk(2 * size, 1)
    return torch.cat([parts[rank], parts[-1 - rank]], 1)


def _without_states(op: str, edges: list[int]) -> tuple[Call, dict[str, torch.Tensor]]:
    """Return a call without states and cu_seqlens, and its outputs and gradients on one device.

    A context passes the edges to the call.
    """
    call = made(op, 4, T, edges)
    call = call._replace(shared={name: x for name, x in call.shared.items() if name not in STATES}, state="")
    options = {name: x for name, x in call.options.items() if name != "cu_seqlens"}
    if op.startswith("mamba"):  # reads sequences from seq_idx, and cu_seqlens only for states
        of_token = torch.bucketize(torch.arange(T), torch.tensor(edges[1:-1]), right=True)
        call = call._replace(options={"seq_idx": of_token[None].int(), **options})
    return call._replace(options=options), computed(call)


def with_fla_context(op: str, group: Any) -> None:
    edges = [0, 5, 10, 11, T]
    call, right = _without_states(op, edges)
    mine = of_rank(call, group)
    context = _fla_context(group, edges, T // dist.get_world_size(group))
    found = together(computed(mine, cp_context=context), call, group)
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9)


def in_zigzag(op: str, edges: list[int], group: Any) -> None:
    call, right = _without_states(op, edges)
    mine = call._replace(tokens={name: _in_zigzag(x, group) for name, x in call.tokens.items()})
    found = computed(mine, cp_context=_zigzag_context(group, edges, T // dist.get_world_size(group)))
    for name, x in right.items():
        if name == "o" or name.removeprefix("d") in call.tokens:
            right_here = _in_zigzag(x, group)
        else:
            right_here = x
            dist.all_reduce(found[name], group=group)
        torch.testing.assert_close(found[name], right_here, rtol=1e-9, atol=1e-9)


def in_setting(op: str, setting: str, group: Any) -> None:
    _, H, edges = SETTINGS[setting]
    plans: list[Any] = []
    by_heads = setting.endswith("heads")
    with dispatch.watching(plans.append), divided("heads") if by_heads else nullcontext():
        equal_one(made(op, H, T, edges), group)
    over = {plan.problem.over for plan in plans if plan.asked.ranks > 1}
    assert op in WINDOWS or over == {"heads" if by_heads and "mamba" not in op else "tokens"}


def in_one_pass(op: str, group: Any) -> None:
    """Check that two ranks compute nothing twice, with and without final states."""
    call = made(op, 3, T, None)
    for asked in (call, call._replace(state="")):
        with (mock.patch.object(context_parallel._Chain, "_state_after", None),
              mock.patch.object(context_parallel._Chain, "_forward", autospec=True,
                                side_effect=context_parallel._Chain._forward) as forward):
            equal_one(asked, group)
        assert forward.call_count == 1


def groups_of_heads(group: Any) -> None:
    """Check four value heads with two heads of q and k, divided by heads and by tokens.

    Four ranks cannot divide two heads, so they always exchange states.
    """
    for way in ("heads", "tokens"):
        with divided(way):
            equal_one(made("chunk_gated_delta_rule", 4, T, [0, 9, T], G=2), group)


def alone(group: Any) -> None:
    """Check a group of one rank, and a context of fla whose group is None."""
    for op in ("chunk_kda", "causal_conv1d", "token_shift", "mamba_chunk_scan_combined"):
        equal_one(made(op, 3, T, [0, 5, 5, T]), group)
    call = made("chunk_kda", 3, T, [0, 5, T])
    packed = {name: x for name, x in call.options.items() if name == "cu_seqlens"}
    context = SimpleNamespace(group=None, cu_seqlens=packed["cu_seqlens"], pre_num_ranks=0, post_num_ranks=0)
    same = flashlin.chunk_kda(**call.tokens, cp_context=context)[0]
    assert torch.equal(flashlin.chunk_kda(**call.tokens, **packed)[0], same)


def twice_and_from_a_checkpoint(group: Any) -> None:
    """Check that a second backward and a recomputation by checkpoint give equal gradients."""
    call = of_rank(made("chunk_kda", 3, T, [0, 2, T]), group)
    q = call.tokens["q"].clone().requires_grad_()

    def run(q: torch.Tensor) -> torch.Tensor:
        o, _ = flashlin.chunk_kda(**{**call.tokens, "q": q}, **call.options, process_group=group)
        return o.square().sum()
    loss = run(q)
    once, = torch.autograd.grad(loss, q, retain_graph=True)
    again, = torch.autograd.grad(loss, q)
    from_checkpoint, = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, q, use_reentrant=False), q)
    assert torch.equal(once, again) and torch.equal(once, from_checkpoint)
    gradient, = torch.autograd.grad(run(q), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"chunk_kda: got a second differentiation.*over several ranks"):
        gradient.sum().backward()


def nothing_spreads(group: Any) -> None:
    """Check that a NaN stays in its sequence, which ends on rank 1."""
    call = made("chunk_gated_delta_rule", 3, T, [0, 5, 30, T])
    call.tokens["v"][:, 20] = float("nan")
    o = together({"o": computed(of_rank(call, group), process_group=group)["o"]}, call, group)["o"]
    bad = o.isnan().flatten(2).any(2)[0]
    assert bad[20:30].all() and not bad[:5].any() and not bad[30:].any()


def compiled(group: Any) -> None:
    call = of_rank(made("chunk_kda", 3, T, None), group)
    tokens = {name: x.float() for name, x in call.tokens.items()}

    def run(v: torch.Tensor) -> torch.Tensor:
        return flashlin.chunk_kda(**{**tokens, "v": v + 1}, process_group=group)[0] * 2
    assert torch.equal(torch.compile(run, backend="eager")(tokens["v"]), run(tokens["v"]))


def unequal(group: Any) -> None:
    """Check that ranks raise if their numbers of tokens differ.

    They raise in a first call, after a call with 8 tokens on each rank, and after calls with 8 and
    with 9 tokens on each rank.
    """
    def call(rows: int) -> None:
        flashlin.chunk_simple_gla(**made("chunk_simple_gla", 2, rows, None).tokens, process_group=group)
    for agreed in ((), (8,), (8, 9)):
        for rows in agreed:
            call(rows)
        with pytest.raises(ValueError, match=r"simple_gla: got \[8, 9\] tokens on ranks 0, 1, need the"):
            call(8 + dist.get_rank(group))
    call(8)


def unequal_edges(group: Any) -> None:
    """Check that ranks raise without debug mode if their cu_seqlens differ in length, or if one has none.

    They also raise after earlier calls with each of the lengths on all ranks.
    """
    rank = dist.get_rank(group)
    edges = [torch.tensor(some) for some in ([0, 5, T], [0, 5, 9, T])]
    calls = {op: of_rank(made(op, 2, T, [0, 5, T]), group) for op in ("chunk_kda", "token_shift")}

    def run(op: str, cu_seqlens: torch.Tensor | None) -> None:
        getattr(flashlin, op)(**calls[op].tokens, cu_seqlens=cu_seqlens, process_group=group)
    for op in calls:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"{op}: got cu_seqlens of \[3, 4\] values \(0: none\) on "
                                                 r"ranks 0, 1, need the same on each"):
                run(op, edges[rank])
            for some in edges:
                run(op, some)
        with pytest.raises(ValueError, match=rf"{op}: got cu_seqlens of \[3, 0\] values"):
            run(op, None if rank else edges[0])
    tokens = {name: x.to(torch.float16 if rank else torch.bfloat16)
              for name, x in calls["chunk_kda"].tokens.items()}
    with pytest.raises(ValueError, match=r"got dtypes \['torch.bfloat16', 'torch.float16'\] on ranks 0, 1"):
        flashlin.chunk_kda(**tokens, process_group=group)


def test_an_answer_that_comes_late_names_the_call_and_what_differs() -> None:
    """A late error names the call and the sizes that differ.

    On a GPU ranks compare known sizes without waiting for the result, so the error comes in a later call.
    """
    mine = Sizes("chunk_kda", "at x.py:1 in run", 1, (1, 8, 3, 0, 16))
    begins = "chunk_kda called at x.py:1 in run: got "
    for at, value, said in ((1, 9, "[9, 8] tokens"), (2, 4, "cu_seqlens of [4, 3] values (0: none)"),
                            (3, 1, f"dtypes ['{FLOATS[1]}', '{FLOATS[0]}']"),
                            (4, 32, "sizes [[1, 8, 3, 0, 32], [1, 8, 3, 0, 16]]")):
        assert mine.verdict(at, value) == f"{begins}{said} on ranks 0, 1, need the same on each"
    assert mine.verdict(2 * SIZES + 1, 9) == f"{begins}[8, 9] tokens on ranks 1, 2, need the same on each"
    assert not any(mine.verdict(*fine) for fine in ((0, 1), (-1, 0), (SIZES - 1, 0)))


def without_values(group: Any) -> None:
    """Check that meta tensors, fake tensors and DTensors raise an error that names the argument.

    The ranks exchange nothing in such a call.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds: dict[str, tuple[Any, str]] = {
        "meta": (lambda x: x.to("meta"), "a tensor on meta.*, need .* with values"),
        "fake": (FakeTensorMode().from_tensor, "a FakeTensor.*, need .* with values"),
        "DTensor": (lambda x: DTensor.from_local(x, mesh), "a DTensor, need a plain tensor")}
    edges, bounds = torch.tensor([0, 5, T]), torch.tensor([0, T // 2])
    context = SimpleNamespace(group=group, cu_seqlens=bounds, pre_num_ranks=0, post_num_ranks=0)
    for op in ("chunk_kda", "chunk_gated_delta_product", "causal_conv1d", "token_shift",
               "mamba_chunk_scan_combined"):
        call = of_rank(made(op, 2, T, [0, 5, T]), group)
        shared = {name: x for name, x in call.shared.items() if name not in STATES}
        options = {name: x for name, x in call.options.items() if name != "cu_seqlens"}
        for kind, text in kinds.values():
            given = {name: kind(x) for name, x in (call.tokens | shared).items()}
            for how in ({"process_group": group}, {"process_group": group, "cu_seqlens": kind(edges)},
                        {"cp_context": context}):
                with pytest.raises((ValueError, TypeError), match=rf"^(\w+: )+got {text}"):
                    getattr(flashlin, op)(**given, **options, **how)


def wrong(group: Any) -> None:
    tokens = of_rank(made("chunk_kda", 3, T, None), group).tokens
    edges = torch.tensor([0, T])
    context = _fla_context(group, [0, T], T // dist.get_world_size(group))
    spiral = SimpleNamespace(**{**vars(context), "layout": "spiral"})
    packed = {name: x[:1] for name, x in tokens.items()}
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "process_group: got int, need a group of torch.distributed",
         lambda: flashlin.chunk_kda(**tokens, process_group=3)),
        (ValueError, "chunk_kda: got a call inside a transform of torch.func or forward-mode AD, need one",
         lambda: torch.func.vmap(lambda q: flashlin.chunk_kda(**{**tokens, "q": q}, process_group=group)[0])(
             tokens["q"][None])),
        (TypeError, "cp_context: got int without group, need what fla.ops.cp.build_cp_context makes",
         lambda: flashlin.chunk_kda(**tokens, cp_context=3)),
        (ValueError, "process_group: got one together with cp_context, need none",
         lambda: flashlin.chunk_kda(**packed, cp_context=context, process_group=group)),
        (ValueError, "output_final_state: got one together with cp_context, need none",
         lambda: flashlin.chunk_kda(**packed, cp_context=context, output_final_state=True)),
        (ValueError, "cp_context: got layout 'spiral', need 'contiguous' or 'zigzag'",
         lambda: flashlin.chunk_kda(**packed, cp_context=spiral)),
        (ValueError, f"cu_seqlens: got a last value of {T // 2}, need T = 7",
         lambda: flashlin.chunk_kda(**{name: x[:, :7] for name, x in packed.items()}, cp_context=context)),
        (ValueError, "cu_seqlens: ", lambda: flashlin.chunk_kda(**packed, cu_seqlens=edges // 2,
                                                                process_group=group)),
        (ValueError, "beta: got shape [2, 7], need [B, T, HV]",
         lambda: flashlin.chunk_kda(**{**tokens, "beta": torch.zeros(2, 7)}, process_group=group)),
        (ValueError, "initial_state: got shape [1, 3, 8, 8], need",
         lambda: flashlin.chunk_kda(**tokens, initial_state=torch.zeros(1, 3, 8, 8), process_group=group)),
        (ValueError, "chunk_kda: got no tokens on this rank, need at least 1",
         lambda: flashlin.chunk_kda(**{name: x[:, :0] for name, x in tokens.items()}, process_group=group)),
        (ValueError, "causal_conv1d: got 2 tokens on each rank, need at least 3",
         lambda: flashlin.causal_conv1d(torch.ones(1, 2, 4), torch.ones(4, 4), process_group=group))]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text.replace("[", r"\[")):
            call()


def one_does_not_call(group: Any) -> None:
    """Check that rank 0 raises after the timeout of the group if rank 1 does not call the op.

    Rank 1 is still alive.
    """
    short = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    tokens = made("chunk_kda", 3, T, None).tokens
    began = time.monotonic()
    if dist.get_rank(group) == 0:
        with pytest.raises(RuntimeError, match="chunk_kda: rank 0 of 2 got no answer from the others"):
            flashlin.chunk_kda(**tokens, process_group=short)
        assert time.monotonic() - began < 20
    else:
        time.sleep(5)


def one_dies(group: Any) -> None:
    """Check that rank 0 raises in backward if rank 1 dies after forward.

    chunk_kda gathers states, and causal_conv1d exchanges tokens.
    """
    outputs = {}
    for op in ("chunk_kda", "causal_conv1d"):
        call = of_rank(made(op, 3, T, None), group)
        tokens = {name: x.requires_grad_() for name, x in call.tokens.items()}
        outputs[op], _ = getattr(flashlin, op)(**tokens, **call.shared, **call.options, process_group=group)
    if dist.get_rank(group) == 1:
        os._exit(1)
    began = time.monotonic()
    for op, o in outputs.items():
        with pytest.raises(RuntimeError, match=f"{op}: rank 0 of 2 got no answer from the others"):
            o.sum().backward()
    assert time.monotonic() - began < 20


def _jobs() -> dict[str, tuple[int, Job]]:
    jobs: dict[str, tuple[int, Job]] = {}
    for number, op in enumerate(OPS + WINDOWS):
        names = [*SETTINGS]
        first, *others = names
        chosen = names if WHOLE or op in WINDOWS else [first, others[number % len(others)]]
        for name in chosen:
            jobs[f"{op}: {name}"] = SETTINGS[name][0], partial(in_setting, op, name)
    for op in ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla"):
        jobs[f"{op}: in one pass"] = 2, partial(in_one_pass, op)
    for kind in ("gdn", "kda", "mamba2"):
        jobs[f"model {kind}"] = 2, partial(model_equals_one, kind)
    jobs["model gdn, by heads"] = 2, partial(model_equals_one, "gdn", H=4)
    for op in ("chunk_gated_delta_rule", "chunk_kda", "chunk_rwkv7", "causal_conv1d",
               "chunk_gated_delta_product", "mamba_chunk_scan_combined"):
        jobs[f"{op}: a context of fla"] = 3 if op == "chunk_kda" else 2, partial(with_fla_context, op)
    zigzags = {2: [0, 5, 24, 31, T], 3: [0, T], 4: [0, 1, 12, 40, T]}
    for size, op in ((2, "chunk_gated_delta_rule"), (3, "chunk_kda"), (4, "causal_conv1d"),
                     (3, "token_shift"), (2, "mamba_chunk_scan_combined"), (4, "chunk_gated_delta_product")):
        jobs[f"{op}: a zigzag of fla"] = size, partial(in_zigzag, op, zigzags[size])
    jobs.update({"groups of heads on 2": (2, groups_of_heads), "groups of heads on 4": (4, groups_of_heads),
                 "alone": (1, alone), "twice": (2, twice_and_from_a_checkpoint), "NaN": (3, nothing_spreads),
                 "compiled": (2, compiled), "unequal": (2, unequal),
                 "unequal edges": (2, unequal_edges), "without values": (2, without_values),
                 "wrong arguments": (2, wrong),
                 "one does not call": (2, one_does_not_call), "one dies": (2, one_dies)})
    return jobs


JOBS = _jobs()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_jobs(JOBS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.alternate
def test_over_ranks(name: str, said: dict[str, list[str]]) -> None:
    gone = ["", "the process was gone"] if name == "one dies" else []
    assert said[name] == gone or not any(said[name]), "\n".join(said[name])
