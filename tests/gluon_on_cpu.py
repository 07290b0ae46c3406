"""Run the Gluon kernels for Hopper on a CPU, to test results and synchronization without a GPU.

``running`` plans all calls in its block as on an H200, and runs the planned kernels on CPU tensors. Triton's
interpreter runs the kernels in plain Triton, so TRITON_INTERPRET=1 must be set. ``emulate`` runs a kernel in
Gluon as Python functions, with the functions below instead of Gluon's. Programs run one after the other. The
functions of ``warp_specialize`` run as threads.

On a GPU, asynchronous work (TMA and products) happens at any time between its start and the wait for it. Here
a random generator decides each time if it happens at its start or at the wait. Threads sleep at random times
before they wait and after they arrive at a barrier, some threads longer than others. So a missing wait, or a
slot that is overwritten too early, gives wrong results or no end for some seeds. Shared memory begins as NaN,
or as -1 for integers. These faults raise an error:

- A product is used before its wait, except as the accumulator of another product.
- Asynchronous work reads shared memory that a thread wrote without a fence.
- An address or a block is outside of its tensor.
- The block of a descriptor and the shared memory of a copy differ in size or dtype.
- A barrier is not complete after SECONDS, or a phase is not 0 or 1.
- A program ends before its loads, stores and products have ended.

Warps of a group, registers and layouts are not modelled, and ``barrier`` has no effect. Each product needs a
wait, because ``is_async`` is ignored.
"""
from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

import flashlin
from flashlin.compat import launch
from flashlin.compat.descriptors import Described
from flashlin.compat.target import parse, pretend
from flashlin.guards.plan_types import Launch

SECONDS = 30.0  # the longest wait for a barrier
_own = threading.local()  # program, random choices and unfinished work of this thread


class Program:
    """A program of a kernel, with what its threads share."""

    def __init__(self, number: int) -> None:
        self.number, self.failed = number, False
        self.barriers: list[Barrier] = []
        self.unfenced: dict[int, list[range]] = {}  # thread -> addresses of shared memory that it wrote

    def end(self) -> None:
        if any(bar.loads or bar.bytes for bar in self.barriers):
            raise RuntimeError("a program ended without waiting for its loads")


class Value(Tensor):
    """A tensor in registers. As in Gluon, ``x += y`` makes a new value, and other names keep the old one."""
    __iadd__, __isub__, __imul__ = Tensor.__add__, Tensor.__sub__, Tensor.__mul__
    __itruediv__ = Tensor.__truediv__

    def to(self, *values: Any, bitcast: bool = False) -> Tensor:
        return self.view(*values) if bitcast else super().to(*values)


def _value(x: Any) -> Tensor:
    return torch.as_tensor(x).as_subclass(Value)


def _memory(x: Tensor) -> Tensor:
    """Return the memory of x in one dimension. x is contiguous, or the end of each row of such a tensor."""
    if not x.is_contiguous() and not (len(x) and x[0].is_contiguous()):
        raise ValueError("a pointer to a tensor that is not contiguous")
    size = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.as_strided((size if x.numel() else 0,), (1,))


class Pointer:
    """A pointer to elements of a tensor, as ``gl.load`` and ``gl.store`` take it."""

    def __init__(self, x: Tensor, at: Any = 0) -> None:
        self.x, self.at, self.dtype = _memory(x), at, SimpleNamespace(element_ty=x.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.x, self.at + offset)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.x, self.at - offset)

    def places(self, mask: Any = None) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.at)
        inside = torch.as_tensor(True if mask is None else mask).expand(at.shape)
        if (inside & ((at < 0) | (at >= len(self.x)))).any():
            raise IndexError(f"an address outside of a tensor of {len(self.x)} elements")
        return at, inside


class Matrix:
    """A tensor descriptor: a tensor as a matrix, whose blocks TMA moves."""

    def __init__(self, x: Tensor, rows: int, columns: int, size: tuple[int, int]) -> None:
        self.x, self.dtype, self.layout = _memory(x)[:rows * columns].view(rows, columns), x.dtype, None
        self.size = size

    def block(self, at: Sequence[Any], other: Shared) -> Tensor:
        """Return the block at a row and column, for a copy from or to shared memory."""
        (row, column), (tall, wide) = (int(x) for x in at), self.size
        if row < 0 or column < 0 or row + tall > self.x.shape[0] or column + wide > self.x.shape[1]:
            raise IndexError(f"a block at {row}, {column} of a matrix of {[*self.x.shape]}")
        if (*other.x.shape,) != self.size or other.dtype != self.dtype:
            raise TypeError(f"a copy between a block of {self.size} in {self.dtype} and shared memory of "
                            f"{(*other.x.shape,)} in {other.dtype}")
        return self.x[row:row + tall, column:column + wide]


class Barrier:
    """A barrier in shared memory: a phase ends after all arrivals and all bytes that are expected."""

    def __init__(self) -> None:
        self.changed, self.phase, self.bytes = threading.Condition(), 0, 0
        self.count = self.missing = 0
        self.loads: list[Callable[[], int]] = []
        _own.program.barriers.append(self)

    def settle(self) -> None:
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase ^ 1, self.count
            self.changed.notify_all()

    def arrive(self, count: int, size: int = 0) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - count, self.bytes + size
            if self.missing < 0:
                raise RuntimeError("too many arrivals at a barrier")
            self.settle()
        _pause()

    def load(self) -> None:
        """Finish the loads that have started."""
        while self.loads:
            self.bytes -= self.loads.pop(0)()
            if self.bytes < 0:
                raise RuntimeError("a barrier that expects fewer bytes than are loaded")
            self.settle()

    def passed(self, phase: int) -> bool:
        if self.phase == phase:
            self.load()
        return self.phase != phase or _own.program.failed

    def wait(self, phase: int) -> None:
        _pause()
        if phase not in (0, 1):
            raise ValueError(f"phase: got {phase}, need 0 or 1")
        with self.changed:
            if not self.changed.wait_for(lambda: self.passed(phase), SECONDS):
                raise TimeoutError(f"a barrier is not complete after {SECONDS} seconds")
        if _own.program.failed:
            raise RuntimeError("another thread of the program has failed")


class Shared:
    """A part of shared memory."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype, self.layout, self.shape = x, x.dtype, None, [*x.shape]

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < len(self.x):
            raise IndexError(f"index {int(i)} of {len(self.x)}")
        return Shared(self.x[int(i)])

    def slice(self, begin: Any, length: int) -> Shared:
        if int(begin) < 0 or int(begin) + length > len(self.x):
            raise IndexError(f"rows {int(begin)} to {int(begin) + length} of {len(self.x)}")
        return Shared(self.x[int(begin):int(begin) + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.x.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.x.view(-1).view(dtype).view(*shape))

    reinterpret = _reinterpret  # its name since Triton 3.9

    def load(self, layout: Any = None) -> Tensor:
        return _value(self.x.clone())

    def store(self, value: Tensor) -> None:
        if value.shape != self.x.shape or value.dtype != self.dtype:
            raise TypeError(f"{[*value.shape]} in {value.dtype} stored as {[*self.x.shape]} in {self.dtype}")
        self.x.copy_(value)
        _own.program.unfenced.setdefault(threading.get_ident(), []).append(self.extent())

    def extent(self) -> range:
        """Return the addresses from the first to the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.x.shape, self.x.stride(), strict=True))
        return range(self.x.data_ptr(), self.x.data_ptr() + (last + 1) * self.x.element_size())

    def check_fences(self) -> None:
        """Raise RuntimeError if a thread has written this part without a later fence."""
        own = self.extent()
        written = [one for every in [*_own.program.unfenced.values()] for one in [*every]]
        if any(one.start < own.stop and own.start < one.stop for one in written):
            raise RuntimeError("asynchronous work reads shared memory that was written without a fence")


def fence() -> None:
    """Make what this thread has written to shared memory visible for asynchronous work."""
    _own.program.unfenced.pop(threading.get_ident(), None)


class Product:
    """A product that may still run. It has no operators, so calculations cannot use it before its wait."""

    def __init__(self, made: Callable[[], Tensor]) -> None:
        self.made = made
        self.value: Tensor | None = None

    def finish(self) -> None:
        if self.value is None:
            self.value = _value(self.made())


def _late() -> bool:
    return bool(_own.draw.random() < 0.5)


def _operand(x: Any) -> Callable[[], Tensor]:
    """Return a function that reads an operand: registers now, or shared memory when it is called."""
    if isinstance(x, Shared):
        x.check_fences()
        return lambda: x.x.float()
    registers = x.float()
    return lambda: registers


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    left, right = _operand(a), _operand(b)
    if (a.x if isinstance(a, Shared) else a).dtype != b.dtype:
        raise TypeError("a product of two dtypes")

    def made() -> Tensor:
        before = acc.value if isinstance(acc, Product) else acc
        found = left() @ right()
        if before.shape != found.shape:
            raise TypeError(f"{[*found.shape]} added to {[*before.shape]}")
        return before + found if use_acc else found
    product = Product(made)
    _own.products.append(product)
    if not _late():
        for one in _own.products:  # in their order
            one.finish()
    return product


def warpgroup_mma_wait(left: int, deps: Sequence[Product]) -> Any:
    while len(_own.products) > left:
        _own.products.pop(0).finish()
    if any(one in _own.products for one in deps):
        raise RuntimeError("the wait does not include all products that it returns")
    values = tuple(one.value if isinstance(one, Product) else one for one in deps)
    return values[0] if len(values) == 1 else values


def async_load(matrix: Matrix, at: Sequence[Any], bar: Barrier, to: Shared) -> None:
    block = matrix.block(at, to)

    def load() -> int:
        to.x.copy_(block)
        return to.x.numel() * to.x.element_size()
    with bar.changed:
        if bar.bytes <= 0:
            raise RuntimeError("a load that its barrier does not expect")
        bar.loads.append(load)
        if not _late():
            bar.load()
        bar.changed.notify_all()


def async_store(matrix: Matrix, at: Sequence[Any], source: Shared) -> None:
    block = matrix.block(at, source)
    source.check_fences()
    _own.stores.append(lambda: block.copy_(source.x))
    if not _late():
        _finish_stores(0)
        _own.stores.append(lambda: None)  # it still needs a wait


def _finish_stores(left: int) -> None:
    while len(_own.stores) > left:
        _own.stores.pop(0)()


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    at, inside = pointer.places(mask)
    if other is None:  # undefined on a GPU
        other = math.nan if pointer.x.is_floating_point() else -1
    return _value(torch.where(inside, pointer.x[at.clamp(0, len(pointer.x) - 1)], other).to(pointer.x.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, inside = pointer.places(mask)
    value = torch.as_tensor(value).expand(at.shape).to(pointer.x.dtype)
    pointer.x[at[inside]] = value[inside]


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        every = [Barrier() for _ in range(shape[0])]
        return every[0] if len(shape) == 1 else SimpleNamespace(index=lambda i: every[int(i)])
    empty = math.nan if dtype.is_floating_point else -1
    return Shared(torch.full([int(x) for x in shape], empty, dtype=dtype))


def _init(bar: Barrier, count: int) -> None:
    bar.count = bar.missing = count


def _scan(x: Any, axis: int, combine: Callable[..., Any], reverse: bool = False) -> Any:
    parts = x if isinstance(x, tuple) else (x,)
    rows = [tuple(one.select(axis, i) for one in parts) for i in range(parts[0].shape[axis])]
    found = []
    for row in reversed(rows) if reverse else rows:
        made = combine(*found[-1], *row) if found else row
        found.append(made if isinstance(made, tuple) else (made,))
    found = found[::-1] if reverse else found
    stacked = tuple(torch.stack(one, axis) for one in zip(*found, strict=True))
    return stacked if isinstance(x, tuple) else stacked[0]


def _specialize(functions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    """Run the functions as threads. Raises the first error."""
    errors: list[BaseException] = []
    program = _own.program

    def run(function: Callable[..., None], arguments: tuple[Any, ...], seed: float) -> None:
        _begin(program, seed)
        try:
            with torch.no_grad():  # a thread has its own setting
                function(*arguments)
            _end()
        except BaseException as error:
            errors.append(error)
            program.failed = True
            for bar in program.barriers:
                with bar.changed:
                    bar.changed.notify_all()
    threads = [threading.Thread(target=run, args=(*one, _own.draw.random())) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _pause() -> None:
    """Sleep at random. Threads differ in how long, so that one may fall some chunks behind the others."""
    if _own.draw.random() < 0.2:
        time.sleep(_own.pause)


def _begin(program: Program, seed: Any) -> None:
    _own.program, _own.draw = program, random.Random(seed)
    _own.pause = _own.draw.choice((0.001, 0.003, 0.03))
    _own.products, _own.stores = [], []


def _end() -> None:
    if _own.products or _own.stores:
        raise RuntimeError("a program ended without waiting for its products and stores")


GL = SimpleNamespace(
    float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
    join=lambda x, y: _value(torch.stack((x, y), -1)), split=lambda x: x.unbind(-1),
    program_id=lambda axis: _value(_own.program.number), static_range=range, load=_load, store=_store,
    arange=lambda begin, end, layout=None: _value(torch.arange(begin, end)),
    zeros=lambda shape, dtype, layout=None: _value(torch.zeros(shape, dtype=dtype)),
    zeros_like=torch.zeros_like, convert_layout=lambda x, layout: x.clone(),
    exp2=lambda x: torch.exp2(_value(x)), log2=lambda x: torch.log2(_value(x)),
    where=lambda condition, x, y: torch.where(_value(condition), x, y), sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
    maximum=lambda x, y: torch.maximum(_value(x), _value(y)),
    minimum=lambda x, y: torch.minimum(_value(x), _value(y)),
    associative_scan=_scan, allocate_shared_memory=_allocate, warp_specialize=_specialize,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
    **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                     "SwizzledSharedLayout"), lambda *_: None))
EMULATED: dict[str, Any] = dict(
    gl=GL, mma_v2=lambda a, b, acc: acc + a.float() @ b.float(), warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait, async_load=async_load,
    async_store=async_store, barrier=lambda: None, fence_async_shared=fence,
    tma=SimpleNamespace(store_wait=_finish_stores),
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: Barrier, init=_init, wait=lambda bar, phase: bar.wait(int(phase)),
        expect=lambda bar, size: bar.arrive(1, int(size)), arrive=lambda bar, count=1: bar.arrive(count)))


@contextmanager
def _in_python(home: str) -> Iterator[None]:
    """In ``home`` and modules of kernels, replace Gluon's functions by those of this file.

    Also replace jitted functions by their Python functions.
    """
    def plain(name: str, value: Any) -> Any:
        if isinstance(value, triton.language.constexpr):
            return value.value
        return EMULATED.get(name) or (
            value.fn if isinstance(value, (JITFunction, InterpretedFunction)) else value)
    with ExitStack() as changed:
        for name, module in [*sys.modules.items()]:
            if (name.startswith("flashlin.kernels") or name == home) and hasattr(module, "gluon"):
                changed.enter_context(mock.patch.dict(vars(module), {
                    key: plain(key, value) for key, value in vars(module).items()}))
        yield


def emulate(kernel: Any, programs: int, arguments: dict[str, Any], seed: int = 0) -> None:
    """Run all programs of a Gluon kernel, which writes to the given tensors.

    kernel: a jitted kernel, or one with tensor descriptors (``described``).
    arguments: all arguments by name, with the sizes of tiles. Tensors are on the CPU.
    seed: decides when asynchronous work happens.
    """
    given = {name: Pointer(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    if isinstance(kernel, Described):
        for name, block in kernel.blocks.items():
            if (x := arguments[name]) is not None:
                columns, tall, wide, *rows = block(arguments)
                given[name] = Matrix(x, *(rows or [arguments["rows"]]), columns, (tall, wide))
        kernel = kernel.kernel
    with _in_python(kernel.fn.__module__), torch.no_grad():
        for number in range(programs):
            program = Program(number)
            _begin(program, seed + number)
            kernel.fn(**given)
            _end()
            program.end()


# The interpreter keeps bf16 as bits. These methods of its builder calculate with the values instead.
BF16, binary_op = triton.language.bfloat16, InterpreterBuilder.binary_op


def _wide(x: Any) -> Any:
    return x if x.dtype.scalar != BF16 else TensorHandle(
        torch.from_numpy(x.data.view("int16")).view(torch.bfloat16).float().numpy(), triton.language.float32)


def _bf16(builder: Any, number: Any) -> Any:
    bits = torch.as_tensor(number).to(torch.bfloat16).reshape(np.shape(number) or (1,)).view(torch.int16)
    return TensorHandle(bits.numpy().view("uint16"), BF16)


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    return TensorHandle(_wide(a).data @ _wide(b).data + d.data, d.dtype.scalar)


def _binary(builder: Any, x: Any, y: Any, op: Any) -> Any:
    if x.dtype.scalar != BF16:
        return binary_op(builder, x, y, op)
    found = op(_wide(x).data, _wide(y).data)
    return TensorHandle(found, triton.language.int1) if found.dtype == bool else _bf16(builder, found)


@contextmanager
def running(machine: str = "H200,triton=3.6.0", seed: int = 0) -> Iterator[list[str]]:
    """Plan calls as on ``machine``, and run their kernels on the CPU.

    Yields a list that receives the names of the kernels. seed: as for ``emulate``.
    """
    names: list[str] = []

    def start(one: Launch, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        names.append(one.kernel)
        every = {**arguments, **dict(one.tile)}
        plain = kernel.kernel if isinstance(kernel, Described) else kernel
        if not isinstance(every[kernel.arg_names[0]], Tensor):
            raise TypeError(f"the first argument of {one.kernel} is no tensor, so its device is unknown")
        if isinstance(plain, GluonJITFunction):
            emulate(kernel, programs, every, seed)
        else:
            plain[programs,](**every)
    try:
        pretend(parse(machine))
        launch.replace_starter(start)
        with flashlin.settings(canary="trial"), mock.patch.multiple(
                InterpreterBuilder, create=True, create_dot=_dot, get_bf16=_bf16, binary_op=_binary):
            yield names
    finally:
        launch.replace_starter(None)
        pretend(None)
