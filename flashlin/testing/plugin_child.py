"""The child process of the pytest plugin: it imports, compiles or interprets under one Triton release.

Outcomes are written to a file, one JSON line each.

Kernels are compiled with the actual arguments of their launches, in forks of this process. So a kernel need
not be described to another process. It may be defined inside a function, and its constexprs may have any
type. Code that a module selects by the Triton release is also tested.
"""
from __future__ import annotations

import copy
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from typing import Any

import torch
from packaging.version import Version

from flashlin.compat.target import parse, pretend
from flashlin.shielding import autotune as tuning
from flashlin.testing.compare import poisoned
from flashlin.testing.compile import Driver, compiled_by, compiled_in_forks, warm
from flashlin.testing.plugin import Order, Outcome
from flashlin.testing.record import Recorded, specialised

NONE_LAUNCHED = ("the function launches no Triton kernel when its tensors are on the CPU, so nothing would "
                 "be tested")
BFLOAT16 = "Triton's interpreter computes bfloat16 wrongly in every release, so numbers are not compared"
PLAIN = (bool, int, float, str, type(None))
# The recorded launches. Key: id of the kernel, and a description of what the JIT would compile. Value: a
# function that compiles it.
Launches = dict[tuple[int, Recorded], Callable[[], Any]]


class CpuDriver(Driver):
    """A driver with the methods that modules need when they are imported.

    Triton 3.2 and 3.3 need a benchmark function for every ``triton.autotune``.
    """

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmark function that measures 0 for every call."""
        return lambda call, quantiles=(), **options: [0.0] * len(quantiles)

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")


def main() -> None:
    """Run the order in ``sys.argv[1]`` and append its outcomes to the file ``sys.argv[2]``."""
    order = Order(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit normally, so that its forks are also ended
    signal.alarm(math.ceil(order.timeout))  # no Python handler, so that the signal also ends compiled code
    with open(sys.argv[2], "a", buffering=1) as answers:
        for outcome in (interpret if "interpret" in order.layers else import_and_compile)(order):
            print(json.dumps(outcome), file=answers)


def import_and_compile(order: Order) -> Iterator[Outcome]:
    """Yield the outcomes of the import and of the compilation of each kernel for each target."""
    told = partial(Outcome, order.triton)
    yield told("import", "began")
    launches: Launches = {}
    try:
        record_into(launches)
        function = load(order, configurations=None)
    except BaseException as error:  # pytest's skip is not an Exception
        yield told("import", "exception", in_short(error))
        return
    if "import" in order.layers:
        yield told("import", "ok")
    if "compile" not in order.layers:
        return
    yield told("compile", "began")
    works, places = [], []
    for sm in order.sm:
        launches.clear()
        set_driver(sm)
        # Our own ops and shielded kernels plan for that GPU.
        pretend(parse(f"triton={order.triton},sm={sm}"))
        signal.alarm(math.ceil(order.timeout))
        try:
            function()
            if not launches:
                raise RuntimeError(NONE_LAUNCHED)
        except BaseException as error:
            yield told("compile", "exception", in_short(error), sm)
        works += [partial(compiled_by, warmup, sm) for warmup in launches.values()]
        places += [(sm, str(launch)) for _, launch in launches]
    signal.alarm(0)  # each fork has its own timeout
    warm()
    for number, result in compiled_in_forks(works, order.at_once, order.timeout):
        cause = f"after {order.timeout:g} s" if result.status == "timeout" else result.message
        yield told("compile", result.status, ": ".join(filter(None, [cause, result.cause])), *places[number])


def interpret(order: Order) -> Iterator[Outcome]:
    """Yield the outcome of a run of the function in Triton's interpreter."""
    from triton.runtime import interpreter
    launched, halves = list[str](), set[str]()
    start, storage = interpreter.GridExecutor.__call__, interpreter._get_np_dtype

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(executor.fn.__name__)
        halves.update(str(value.dtype)
                      for value in (*args, *kwargs.values())
                      if getattr(value, "dtype", None) is torch.bfloat16)
        # Triton 3.2 passes options of a configuration that the kernel does not have.
        return start(executor, *args,
                     **{name: value for name, value in kwargs.items() if name in executor.arg_names})

    def watched(dtype: Any) -> Any:
        halves.update({str(dtype)} if "bf16" in str(dtype) else ())
        return storage(dtype)
    interpreter.GridExecutor.__call__, interpreter._get_np_dtype = counted, watched
    status = "exception"
    try:
        function = load(order, configurations=1)
        with poisoned():
            answer = function()
        if not launched:
            raise RuntimeError(NONE_LAUNCHED)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"{order.function} returned {type(answer).__name__}, need a tuple of the result "
                            "and the correct result, or layers=('import', 'compile')")
        status = "wrong"
        torch.testing.assert_close(*answer, rtol=order.rtol, atol=order.atol, check_dtype=False)
        status, cause = "ok", ""
    except BaseException as error:
        cause = str(error) if status == "wrong" else in_short(error)
    if halves:
        status, cause = "skipped", BFLOAT16
    yield Outcome(order.triton, "interpret", status, cause)


def set_driver(sm: int) -> None:
    """Make Triton compile for this compute capability."""
    from triton.runtime import driver
    driver.set_active(CpuDriver(sm))


def load(order: Order, configurations: int | None) -> Callable[[], Any]:
    """Return the user's function, after autotuning is replaced.

    Autotuners run their first `configurations` configurations (None for all) instead of timing them.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    if Version(triton.__version__).base_version != Version(order.triton).base_version:
        raise RuntimeError(f"Triton {triton.__version__} is imported from {triton.__file__}, need "
                           f"{order.triton}")
    set_driver(order.sm[0])

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        pruned = tuner.configs if len(tuner.configs) == 1 else list(tuner.prune_configs(kwargs))
        for config in pruned[:configurations]:
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    Autotuner.run = tuning.run = run
    try:
        module = import_module(order.module)
    except ModuleNotFoundError as error:
        if not f"{order.module}.".startswith(f"{error.name}."):
            raise
        # pytest --import-mode=importlib does not add the folder of the module to sys.path.
        spec = spec_from_file_location(order.module, order.file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[order.module] = module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Callable[[], Any] = attrgetter(order.function)(module)
    return function


def record_into(launches: Launches) -> None:
    """Replace launches by recording, for the rest of this process.

    Each kernel that the JIT would compile is recorded once.
    """
    from triton.runtime.jit import JITFunction
    compile_as_it_is = JITFunction.run

    def keep(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # A hook of a configuration may set the block shape of a tensor descriptor, and the next configuration
        # changes it again. So copy it.
        args, options = tuple(map(snapshot, args)), {name: snapshot(value) for name, value in options.items()}
        launches.setdefault((id(kernel), in_words(kernel, args, options)),
                            partial(compile_as_it_is, kernel, *args, grid=(1,), warmup=True, **options))
    JITFunction.run = keep


def snapshot(value: Any) -> Any:
    """Return a copy of a tensor descriptor, and any other value unchanged."""
    return copy.copy(value) if hasattr(value, "block_shape") else value


def in_words(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Recorded:
    """Return the description of a launch: the types of its arguments, its constants and its options.

    Two launches with the same description share one compiled kernel.
    """
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    warps, stages = named.pop("num_warps", None) or 4, named.pop("num_stages", None) or 3
    run_time = {parameter.name: not getattr(parameter, "do_not_specialize", False)
                for parameter in kernel.params if not parameter.is_constexpr}
    arguments = tuple((name, kind(value, run_time[name]))
                      for name, value in named.items() if name in run_time)
    constants = tuple((name, value if isinstance(value, PLAIN) else str(getattr(value, "__name__", value)))
                      for name, value in named.items() if name not in run_time)
    return Recorded(kernel.fn.__module__, kernel.fn.__name__, arguments, constants, warps, stages, 0, ())


def kind(value: Any, specialise: bool) -> str | None:
    """Return the type that the JIT gives to an argument, as text."""
    try:
        return specialised(value, specialise)
    except (KeyError, TypeError):  # an 8-bit dtype, a tuple, a tensor descriptor
        if isinstance(value, (tuple, list)):
            return f"({', '.join(str(kind(one, specialise)) for one in value)})"
        return f"{type(value).__name__}:{getattr(value, 'dtype', '')}{getattr(value, 'block_shape', '')}"


def in_short(error: BaseException) -> str:
    """Return an exception as one line, with the location in the user's code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if theirs(frame.filename)]
    said = str(error) or (frames[-1].line if frames else "")
    return (f"{type(error).__name__}: "
            f"{said}{f' ({frames[-1].filename}:{frames[-1].lineno})' if frames else ''}")


def theirs(file: str) -> bool:
    """Return True if the file is the user's: not of Python, torch, Triton or this module."""
    ours = [os.path.dirname(str(sys.modules[name].__file__)) + os.sep
            for name in ("torch", "triton") if name in sys.modules]
    standard = file.startswith(os.path.dirname(os.__file__)) and "site-packages" not in file
    return not file.startswith((*ours, __file__, "<")) and not standard


if __name__ == "__main__":
    main()
