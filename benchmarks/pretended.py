"""A simulated GPU for Triton: launches take the usual path, and are recorded instead of run."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver


class Started(NamedTuple):
    """One launch of a compiled kernel, as the driver receives it.

    compiled: the kernel.
    grid: number of programs along each axis.
    stream: the CUDA stream.
    function: the loaded function.
    metadata: packed metadata of the kernel.
    arguments: arguments of the kernel.
    """
    compiled: Any
    grid: tuple[int, ...]
    stream: int
    function: object
    metadata: object
    arguments: tuple[Any, ...]


class Driver:
    """A Triton driver for any number of H100 GPUs.

    Set `device` and `streams` to choose the current device and its stream. `started` lists the launches in
    order.
    """

    def __init__(self) -> None:
        self.device, self.streams, self.started = 0, {0: 7, 1: 8}, list[Started]()
        self.target, self.utils = GPUTarget("cuda", 90, 32), self
        self.launcher_cls = self._launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.streams[device]

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *kernel: Any) -> tuple[object, object, int, int, int]:
        return object(), object(), 32, 0, 1024

    def launched(self, one: Started) -> None:
        self.started.append(one)

    def _launcher(self, src: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: object, packed: object, described: Any,
                   enter: Any, leave: Any, *arguments: Any) -> None:
            if enter is not None:
                enter(described)
            self.launched(Started(src, (x, y, z), stream, function, packed, arguments))
            if leave is not None:
                leave(described)
        return launch


@contextmanager
def pretended(fake: Any) -> Iterator[Any]:
    """Use ``fake`` as Triton's driver in the block, and compile nothing: kernels have no code."""
    functions = set[Any]()

    def compiled(src: Any, target: Any, options: dict[str, Any]) -> Any:
        functions.add(src.fn)
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.src, kernel.name = src, src.fn.__name__
        kernel.hash = src.hash()  # also finds the global values that the kernel uses
        kernel.metadata = SimpleNamespace(shared=0, num_warps=options["num_warps"], target=target,
                                          name=kernel.name)
        kernel.packed_metadata = object()
        kernel.kernel, kernel.metadata_group = b"", {}
        kernel.module = kernel.function = kernel._run = None
        return kernel
    before, compiler = driver._active, triton.compiler.compile
    driver.set_active(fake)
    triton.compiler.compile = compiled
    try:
        yield fake
    finally:
        driver._active, triton.compiler.compile = before, compiler
        for function in functions:
            function.device_caches.clear()
