"""Parallel compilation of the kernels of a first run, on a simulated GPU.

The kernels of backward compile together with the kernels of forward.
"""
from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import flashlin
from benchmarks.calls import OPS, Op, Shape, inputs
from benchmarks.pretended import Driver, pretended
from flashlin.compat import launch
from flashlin.compat import target as machine
from flashlin.compat.target import Target
from flashlin.guards.plan_types import Launch
from flashlin.ops._common import compile_ahead, pipeline, replay
from tests.direct import needs_direct_starts

pytestmark = needs_direct_starts

# The calls of layers also run ops of their gates and norms, whose kernels are compiled when they are launched.
CHUNKED = [op for ops in OPS.values() for op in ops if op.name.startswith("chunk_") and not op.layer]
SMALL = Shape(2, 66, 2, 32)


class Card(Driver):
    """A simulated GPU that records compilations.

    compiled: names of all compiled kernels.
    by_main: names of the kernels that the main thread compiled, so that the call waited for them.
    loaded_by_main: names of the kernels whose launcher the main thread loaded.
    failing: name of a kernel whose compilation raises an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled, self.by_main, self.failing = list[str](), list[str](), ""
        self.loaded_by_main = list[str]()

    def _launcher(self, src: Any, metadata: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.loaded_by_main.append(src.fn.__name__)
        return super()._launcher(src, metadata)

    def compile(self, compiler: Callable[..., Any], src: Any, *rest: Any, **options: Any) -> Any:
        name = src.fn.__name__
        self.compiled.append(name)
        if threading.current_thread() is threading.main_thread():
            self.by_main.append(name)
        # Compile even if this kernel fails: the compiler records it, so its caches are cleared later.
        made = compiler(src, *rest, **options)
        if name == self.failing:
            raise RuntimeError("no registers left")
        return made

    @property
    def order(self) -> list[str]:
        return [one.compiled.fn.__name__ for one in self.started]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    for home, name, fresh in ((launch, "_kernels", {}), (replay, "_recipes", {}),
                              (compile_ahead, "_compiling", {}),
                              (compile_ahead, "_foreseen", set()), (compile_ahead, "cores", lambda: 4)):
        monkeypatch.setattr(home, name, fresh)
    fake = Card()
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90"))
    with pretended(fake), flashlin.settings(canary="off"):
        compiler = triton.compiler.compile
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.compiler, "compile",
                          lambda *given, **options: fake.compile(compiler, *given, **options))
            yield fake


def forward(op: Op, shape: Shape = SMALL, apart: bool = False) -> Callable[[], Any]:
    """Call the op and return a function that runs its backward.

    apart: True to give q an address that is not a multiple of 16.
    """
    given = inputs(op, shape, "cpu")
    if apart:
        q = given["q"]
        moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q.detach())
        given["q"] = moved.requires_grad_()
    made = getattr(flashlin, op.name)(**given)
    o = made[0] if isinstance(made, tuple) else made
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return lambda: torch.autograd.grad(o, leaves, torch.ones_like(o))


RETENTION = next(op for op in CHUNKED if op.name == "chunk_retention")


@pytest.mark.parametrize(("op", "shape", "apart"), [
    *[pytest.param(op, SMALL, False, id=op.name) for op in CHUNKED],
    pytest.param(RETENTION, SMALL, True, id="not aligned"),
    pytest.param(RETENTION, Shape(1, 576, 1, 64), False, id="backward as with a gate")])
def test_backward_compiles_nothing_that_was_not_foreseen(op: Op, shape: Shape, apart: bool,
                                                         card: Card) -> None:
    backward = forward(op, shape, apart)
    for thread in compile_ahead._compiling.values():
        thread.join()
    known, started = len(card.compiled), len(card.started)
    assert known and started
    backward()
    assert len(card.started) > started and len(card.compiled) == known
    assert not card.by_main and not card.loaded_by_main and not compile_ahead._compiling


def test_backward_of_raw_inputs_is_foreseen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of backward compile ahead, planned for the GPU of forward.

    Its ops plan for the device of their tensors, which is "meta" for tensors without memory.
    """
    probe = pipeline.probe

    def probed(device: torch.device) -> Target:
        assert device.type != "meta"
        return probe(device)
    monkeypatch.setattr(pipeline, "probe", probed)
    op = next(op for op in OPS["kda"] if op.layer)
    given = {name: x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x
             for name, x in inputs(op, Shape(1, 1024, 2, 64), "cpu").items()}
    o, _ = flashlin.chunk_kda(**given)
    for thread in compile_ahead._compiling.values():
        thread.join()
    known = len(card.compiled)
    torch.autograd.grad(o, [x for x in given.values() if isinstance(x, torch.Tensor)], torch.ones_like(o))
    assert "dplr_prepare_raw" in card.compiled and "dplr_overlapped_grads" in card.compiled[:known]
    assert card.compiled[known:] == []


@pytest.mark.parametrize("op", CHUNKED, ids=lambda op: op.name)
def test_nothing_compiles_again_for_another_batch_or_length(op: Op, card: Card) -> None:
    """A new batch size, length or number of heads compiles no kernel.

    Triton only specializes on a number of heads that is 1 or a multiple of 16.
    """
    forward(op)()
    known = len(card.compiled)
    for change in ({"B": 1}, {"B": 16, "T": 1}, {"T": 64}, {"T": 257}, {"B": 3, "T": 300}, {"H": 3}):
        forward(op, SMALL._replace(**change))()
        assert len(card.compiled) == known, change


@pytest.mark.parametrize("op", [op for op in CHUNKED if op.name in ("chunk_kda", "chunk_gated_delta_rule")],
                         ids=lambda op: op.name)
def test_nothing_compiles_again_for_other_sequences_in_a_row(op: Op, card: Card) -> None:
    given, known = inputs(op, Shape(1, 200, 2, 32), "cpu"), 0
    for bounds in ([0, 200], [0, 3, 200], [0, *range(1, 101), 200]):
        getattr(flashlin, op.name)(**given, cu_seqlens=torch.tensor(bounds))[0].sum().backward()
        known = known or len(card.compiled)
        assert len(card.compiled) == known, len(bounds)


def test_a_process_with_one_core_compiles_one_after_the_other(card: Card,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "cores", lambda: 1)
    forward(CHUNKED[0])()
    assert card.compiled and card.by_main == card.compiled


def test_a_process_that_ends_waits_for_no_kernel_that_has_not_begun() -> None:
    code = ("import threading, time\n"
            "from flashlin.ops._common import compile_ahead as ahead\n"
            "ahead.cores = lambda: 2\n"
            "queue = ahead.Queue(0)\n"
            "class Slow:\n"
            "    def compile(self, *given): print('one\\n', end='', flush=True), time.sleep(1)\n"
            "    class kernel: device_caches = [None]\n"
            "ahead.make_key = lambda: None\n"
            "for key in range(8): queue.compile(key, False, Slow(), 1, (), 1, 1)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0 and done.stdout == "one\n" * 2, done.stderr


def test_neither_sympy_nor_the_compiler_of_torch_is_imported() -> None:
    """Parallel compilation imports neither sympy nor torch._dynamo.

    Their import would take longer than the compilation of a kernel.
    """
    code = ("import sys, torch, triton, flashlin\n"
            "from benchmarks.pretended import Driver, pretended\n"
            "from flashlin.compat import target\n"
            "target.pretend(target.parse(f'triton={triton.__version__},sm=90'))\n"
            "x = [torch.randn(2, 66, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]\n"
            "g = torch.rand(2, 66, 2, requires_grad=True)\n"
            "from flashlin.ops._common import compile_ahead as ahead\n"
            "ahead.cores = lambda: 4\n"
            "with pretended(Driver()), flashlin.settings(canary='off'):\n"
            "    flashlin.chunk_gated_delta_rule(*x, g.log(), g)\n"
            "    flashlin.chunk_simple_gla(*x, g.log())\n"
            "assert ahead._foreseen and len(ahead._compiling) > 4, ahead._compiling\n"
            "assert not {'sympy', 'torch._dynamo'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr


# --- runs of small kernels that this file defines ---

@triton.jit
def first_toy(x, o, BT: tl.constexpr):
    tl.store(o, tl.load(x))


@triton.jit
def second_toy(x, o, BT: tl.constexpr):
    tl.store(o, tl.load(x))


def toy(kernel: Any, x: torch.Tensor, o: torch.Tensor) -> None:
    launch.start(Launch("toy", (1,), 1, 1, (("BT", 16),), 0, 0, frozenset()), kernel, 1, dict(x=x, o=o))


def test_starts_wait_until_torch_may_read_what_they_write(card: Card) -> None:
    x, seen = torch.arange(16.0), dict[str, int]()

    def starting(plan: Any) -> torch.Tensor:
        toy(first_toy, x, a := torch.empty(16))
        toy(second_toy, a, b := torch.zeros(4, 4).view(16)[:8])
        seen["put off"] = len(card.started)
        a.add_(1)
        seen["added"] = len(card.started)
        toy(second_toy, a, b)  # is compiled already, so it starts at once
        seen["known"] = len(card.started)
        return b
    compile_ahead.compile_together(starting, SimpleNamespace(), (), 0, None)
    assert seen == {"put off": 0, "added": 2, "known": 3}
    assert card.order == ["first_toy", "second_toy", "second_toy"] and not card.by_main


def test_gluon_is_imported_before_threads_compile() -> None:
    """Compilers and modules of kernels import it; two threads that import it at the same time can deadlock."""
    name = "triton.experimental.gluon.language"
    pytest.importorskip(name)
    done = subprocess.run([sys.executable, "-c", f"""if True:
        import sys
        from flashlin.ops._common.compile_ahead import Queue
        assert {name!r} not in sys.modules
        Queue(0)
        assert {name!r} in sys.modules"""], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_the_next_part_of_a_batch_waits_for_the_one_before(card: Card) -> None:
    """The next slice of a batch starts after the previous slice has started its kernels.

    Otherwise all slices would use their memory at the same time.
    """
    x, seen = torch.arange(16.0), list[int]()

    def starting(plan: Any) -> None:
        for _ in range(3):
            toy(first_toy, x, a := torch.empty(16))
            toy(second_toy, x, a)
            seen.append(len(card.started))
    compile_ahead.compile_together(starting, SimpleNamespace(), (), 0, None)
    assert seen == [0, 4, 6] and card.order == ["first_toy", "second_toy"] * 3


def test_what_does_not_compile_is_raised_where_it_starts(card: Card) -> None:
    card.failing, x = "second_toy", torch.arange(16.0)

    def starting(plan: Any) -> None:
        toy(first_toy, x, torch.empty(16))
        toy(second_toy, x, torch.empty(16))
    with pytest.raises(RuntimeError, match="no registers left"):
        compile_ahead.compile_together(starting, SimpleNamespace(), (), 0, None)
    assert card.order == ["first_toy"] and card.by_main == ["second_toy"]
    toy(first_toy, x, torch.empty(16))  # launches are no longer deferred
    assert card.order == ["first_toy"] * 2
