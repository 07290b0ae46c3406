"""Gluon kernels that read and write tensors by descriptors (TMA, on Hopper), handled like any other."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

# From a kernel's arguments by name: columns of a tensor, which is taken as a matrix, and rows and columns of
# the block that is moved at a time; rows of the matrix, if they are not the kernel's ``rows``.
Block = Callable[[Mapping[str, Any]], tuple[int, ...]]


def described(**blocks: Block) -> Callable[[Any], Described]:
    """Decorates ``@gluon.jit``: these parameters are descriptors. REGISTERS, a constexpr that a kernel may
    have, bounds the registers of a thread, as a mean over its warps; without it, or where it is 0, Gluon
    gives a program all there are."""
    return partial(Described, blocks)


class Address(int):
    """Memory, as a descriptor has it."""

    def data_ptr(self) -> int:
        return self


class Lent(NamedTuple):
    """What Triton's launcher takes of a TensorDescriptor, without what that checks each time."""
    base: Any
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Described:
    """A jitted function of Gluon's, to start and to compile with tensors where it has descriptors: those are
    made as it starts. Of a tensor whose memory does not begin at a multiple of 16 bytes there is none."""

    def __init__(self, blocks: Mapping[str, Block], kernel: Any) -> None:
        self.blocks, self.kernel = blocks, kernel
        self.places = [(at, name) for at, name in enumerate(kernel.arg_names) if name in blocks]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *values, **options: self._called(self.kernel[grid], values, options)

    def warmup(self, *values: Any, **options: Any) -> Any:
        return self._called(self.kernel.warmup, values, options)

    def lent(self, values: Sequence[Any]) -> list[Any]:
        """What its compiled kernel is started with; values: of all its parameters, in their order, tensors or
        addresses."""
        given, lent = dict(zip(self.kernel.arg_names, values, strict=True)), [*values]
        for at, name in self.places:
            x, (columns, _, _, *rows) = values[at], self.blocks[name](given)
            lent[at] = Lent(Address(x) if type(x) is int else x, [*(rows or [given["rows"]]), columns],
                            [columns, 1])
        return lent

    def _called(self, call: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
        given, described = {**dict(zip(self.kernel.arg_names, values, strict=False)), **options}, [*values]
        for at, name in self.places:
            x, (columns, tall, wide, *rows) = values[at], self.blocks[name](given)
            dtype = getattr(gl, str(x.dtype).removeprefix("torch."))
            columns = max(columns, wide)  # where sizes are made up, to compile
            layout = gl.NVMMASharedLayout.get_default_for([tall, wide], dtype)
            described[at] = TensorDescriptor(x, [*(rows or [given["rows"]]), columns], [columns, 1],
                                             [tall, wide], layout)
        if given.get("REGISTERS"):
            options["maxnreg"] = given["REGISTERS"]
        return call(*described, **options)
