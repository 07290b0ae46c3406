"""Pass tensors to Gluon kernels whose parameters are tensor descriptors (TMA on Hopper).

A caller starts such a kernel like any other kernel, with tensors. ``Described`` replaces these tensors by
descriptors when the kernel starts.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

# A function that describes one tensor of a kernel as a matrix. It gets all arguments of the kernel by name.
# It returns the columns of the matrix, and the rows and columns of the block that one TMA instruction moves.
# A fourth number gives the rows of the matrix, if they differ from the kernel's argument ``rows``.
Block = Callable[[Mapping[str, Any]], tuple[int, ...]]


def described(**blocks: Block) -> Callable[[Any], Described]:
    """Return a decorator for a jitted kernel some of whose parameters may be tensor descriptors (Gluon).

    blocks: the ``Block`` function of each such parameter, by the name of the parameter.

    A kernel may have a constexpr REGISTERS: the largest number of registers per thread, averaged over all
    warps of a program. If it is missing or 0, a program may use all registers.
    """
    return partial(Described, blocks)


class Address(int):
    """An address in GPU memory, with the method ``data_ptr`` that Triton's launcher calls on a tensor."""

    def data_ptr(self) -> int:
        """Return the address itself."""
        return self


class Lent(NamedTuple):
    """The fields of a TensorDescriptor that Triton's launcher reads.

    It replaces a TensorDescriptor in direct starts, because the constructor of a TensorDescriptor checks its
    arguments each time.
    """
    base: Any
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Described:
    """A jitted kernel that accepts tensors for its descriptor parameters, and the constexpr REGISTERS.

    The descriptors are made when the kernel is started or compiled. A descriptor requires a tensor whose
    address is a multiple of 16 bytes.
    """

    def __init__(self, blocks: Mapping[str, Block], kernel: Any) -> None:
        self.blocks, self.kernel = blocks, kernel
        self.places = [(at, name) for at, name in enumerate(kernel.arg_names) if name in blocks]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *values, **options: self._called(self.kernel[grid], values, options)

    def warmup(self, *values: Any, **options: Any) -> Any:
        """Compile the kernel for these arguments without starting it, as ``JITFunction.warmup`` does."""
        return self._called(self.kernel.warmup, values, options)

    def lent(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments for the compiled kernel, with a ``Lent`` for each descriptor parameter.

        values: the arguments of all parameters, in their order. A descriptor parameter has a tensor or an
        address.
        """
        given, lent = dict(zip(self.kernel.arg_names, values, strict=True)), [*values]
        for at, name in self.places:
            if values[at] is None:
                continue
            x, (columns, _, _, *rows) = values[at], self.blocks[name](given)
            lent[at] = Lent(Address(x) if type(x) is int else x, [*(rows or [given["rows"]]), columns],
                            [columns, 1])
        return lent

    def _called(self, call: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given, described = {**dict(zip(self.kernel.arg_names, values, strict=False)), **options}, [*values]
        for at, name in self.places:
            if values[at] is None:
                continue
            from triton.experimental.gluon import language as gl
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
            x, (columns, tall, wide, *rows) = values[at], self.blocks[name](given)
            dtype = getattr(gl, str(x.dtype).removeprefix("torch."))
            columns = max(columns, wide)  # a compilation may have invented sizes, narrower than the block
            layout = gl.NVMMASharedLayout.get_default_for([tall, wide], dtype)
            described[at] = TensorDescriptor(x, [*(rows or [given["rows"]]), columns], [columns, 1],
                                             [tall, wide], layout)
        if given.get("REGISTERS"):
            options["maxnreg"] = given["REGISTERS"]
        return call(*described, **options)
