"""A card that is not there, for Triton: its launch runs as on a GPU, and what it would start is noted."""
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
    """What a compiled kernel was started with."""
    compiled: Any
    grid: tuple[int, ...]
    stream: int
    function: object
    metadata: object
    arguments: tuple[Any, ...]


class Driver:
    """An H100 of any number, current and with a current stream as they are set. started: in order."""

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
    """Triton launches on this driver, and compiles nothing: each compiled kernel is one without code."""
    functions = set[Any]()

    def compiled(src: Any, target: Any, options: dict[str, Any]) -> Any:
        functions.add(src.fn)
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.src, kernel.name = src, src.fn.__name__
        kernel.hash = src.hash()  # which finds global values
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
