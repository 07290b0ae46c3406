"""shield: the care that our own kernels get, for a Triton kernel of the user's.

How it works. The innermost part of a kernel, what ``@triton.jit`` made, is replaced by a Launcher; a tuner
and heuristics around it stay. When a launch arrives, with every argument and option known, it is turned into
facts (``Given``) and planned like any other call; the plan says which remedies to apply. The decision is kept
per kernel and facts, so a call seen before costs some microseconds.
"""
from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashlin import policy
from flashlin.compat.suggestions import need_one_of
from flashlin.compat.target import Target, probe
from flashlin.guards.checks import OFFSET_LIMIT
from flashlin.kernels.shield import source
from flashlin.kernels.shield.problem import Declared, batch_of, problem_of, tensors_of
from flashlin.kernels.shield.views import fp32_copies, part_of
from flashlin.ops._common.pipeline import planned
from flashlin.policy import Policy
from flashlin.shielding import autotune as tuning
from flashlin.shielding.function import ShieldedFunction

REMEMBERED = 4096  # decisions per kernel
# what is no tensor, told apart faster than by isinstance
NUMBERS = frozenset({int, float, bool, str, type(None)})
OPTIONS = ("num_warps", "num_stages")


def shield(kernel: Any, *, batch: Mapping[str, int | None] | None = None, batch_axis: int | None = None,
           batch_size: str | None = None, outputs: Sequence[str] = ()) -> Any:
    """A Triton kernel whose launches are planned: called as before, ``kernel[grid](...)``.

    Too large a grid or too long offsets: launched in parts of the batch, if it is declared. Tensors on
    another device than the current one: launched there. More warps than the compiler survives: launched with
    fewer. 16-bit tensors that do not compile: launched on fp32 copies, if the outputs are declared.

    Args:
        kernel: what ``@triton.jit``, ``@triton.autotune`` or ``@triton.heuristics`` made; or a function that
            launches such kernels, which must not write to its arguments: its launches are planned too, those
            of its backward included, and it is called in parts.
        batch: the dimension that is the batch, by name of the tensor argument; None for a tensor that has
            none. A dimension may hold batch times heads, batch first; one of batch + 1 is taken for
            boundaries of sequences (cu_seqlens). No launch is split beside a tensor that is not named and has
            such a dimension.
        batch_axis: the grid axis (0, 1, 2) that counts the batch, or batch times heads, batch first. Not for
            functions.
        batch_size: the argument that holds the size of the batch, if there is one.
        outputs: the tensor arguments that the kernel writes.

    Raises ValueError or TypeError for a declaration that names what is not there, here or in the call; a call
    raises UnsupportedError, before anything is launched, where no remedy is left.
    """
    if isinstance(outputs, str):
        raise TypeError(f"outputs: got the string {outputs!r}, need a list of names of arguments")
    if not callable(getattr(kernel, "run", None)) or not hasattr(kernel, "arg_names"):
        if not callable(kernel):
            raise TypeError(f"kernel: got {type(kernel).__name__}, need a Triton kernel or a function that "
                            "launches some")
        for name, value in {"batch_axis": batch_axis, "outputs": outputs or None}.items():
            if value is not None:
                raise ValueError(f"{name}: got {value!r}, need none: {getattr(kernel, '__name__', kernel)} "
                                 "is a function, not a kernel")
        try:
            names = list(inspect.signature(kernel).parameters)
        except ValueError:
            raise TypeError(f"kernel: got {kernel!r}, which Python knows no arguments of, need a Triton "
                            "kernel or a Python function that launches some") from None
        _checked("batch_size", [] if batch_size is None else [batch_size], names)
        return ShieldedFunction(kernel, _batch(batch, names), batch_size, shield)
    names = list(kernel.arg_names)
    declared = Declared(_batch(batch, names), -1 if batch_axis is None else batch_axis, batch_size,
                        tuple(outputs))
    _checked("outputs", outputs, names)
    _checked("batch_size", [] if batch_size is None else [batch_size], names)
    if declared.batch and declared.axis not in (0, 1, 2):
        raise ValueError(f"batch_axis: got {batch_axis}, need 0, 1 or 2: the grid axis that counts the batch")
    return _around(kernel, declared)


class Decision(NamedTuple):
    """A plan as far as a launch needs it, and what it holds for. card: number of the CUDA device, None
    without one. warps: None to leave them as they are. part: how much of the batch at a time, 0 for all of
    it."""
    target: Target
    policy: Policy
    device: torch.device
    card: int | None
    warps: int | None
    part: int
    fp32: bool


class Launcher:
    """A ``@triton.jit`` kernel whose every launch is planned. Everything but launching is the kernel's
    own."""

    def __init__(self, kernel: Any, declared: Declared) -> None:
        self.kernel, self.declared, self.fn = kernel, declared, kernel
        self.arg_names: list[str] = list(kernel.arg_names)
        self._start: Callable[..., Any] = kernel.run
        parameters = inspect.signature(kernel.fn).parameters
        self._defaults = {name: parameter.default for name, parameter in parameters.items()
                          if parameter.default is not parameter.empty}
        self._constants = [name for name, parameter in parameters.items()
                           if "constexpr" in str(parameter.annotation)]
        self._kept = (*self._constants, *OPTIONS)
        self._kept_at = [at for at, name in enumerate(self.arg_names) if name in self._constants]
        self._decided: dict[Any, Decision] = {}
        self._source: source.Source | None = None
        self._wide = False

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """Compile as a call would, without launching."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Plan, then launch. What the kernel's own ``run`` returns (of the last part)."""
        if callable(grid):
            grid = grid({**self._defaults, **self._named(args, kwargs)})
        grid = tuple(grid)
        key = self._facts(grid, args, kwargs)
        decision = self._decided.get(key)
        # Whether a batch can be split depends on shapes, which are not among the facts: the odd large launch
        # is decided each time.
        if (decision is None or decision.part or decision.policy is not policy.current()
            or decision.target is not probe(decision.device)):
            decision = self._decide(self._named(args, kwargs), grid)
            if len(self._decided) >= REMEMBERED:
                self._decided.clear()
            self._decided[key] = decision
        if decision.card is not None and not warmup and decision.card != torch.cuda.current_device():
            with torch.cuda.device(decision.card):
                return self._launch(decision, args, kwargs, grid, warmup)
        return self._launch(decision, args, kwargs, grid, warmup)

    def _facts(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All that a decision depends on, as fast as can be: types and devices, options and constants,
        strides of what is long."""
        facts = [grid, *map(kwargs.get, self._kept), *[args[at] for at in self._kept_at if at < len(args)]]
        add = facts.append
        if not NUMBERS.issuperset(map(type, kwargs.values())):
            add(tuple(kwargs))
            args = (*args, *kwargs.values())
        for value in args:
            kind = type(value)
            if kind is torch.Tensor or (kind not in NUMBERS and isinstance(value, torch.Tensor)):
                add(value.dtype)
                add(value.get_device())
                if not self._wide and value.untyped_storage().nbytes() > OFFSET_LIMIT:
                    add((value.shape, value.stride()))
        return tuple(facts)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.arg_names, args, strict=False)), **kwargs}

    def _launch(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any],
                grid: tuple[int, ...], warmup: bool) -> Any:
        if decision.warps is None and not decision.part and not decision.fp32:
            return self._start(*args, grid=grid, warmup=warmup, **kwargs)
        named = self._named(args, kwargs)
        if decision.warps is not None:
            named["num_warps"] = decision.warps
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        if decision.fp32:
            copies = fp32_copies(tensors_of(named))
            written = [(named[name], copies[name]) for name in self.declared.outputs if name in copies]
            named.update(copies)
        result = None
        for part, programs in self._parts(named, grid, decision.part):
            result = self._start(**part, grid=programs, warmup=warmup)
        if not warmup:
            with torch.no_grad():
                for original, converted in written:
                    original.copy_(converted)
        return result

    def _parts(self, named: dict[str, Any], grid: tuple[int, ...],
               size: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        if not size:
            yield named, grid
            return
        whole, axis = batch_of(self.declared, {**self._defaults, **named}), self.declared.axis
        for begin in range(0, whole, size):
            count = min(size, whole - begin)
            views: dict[str, Any] = {
                name: part_of(named[name], dimension, whole, begin, count)
                for name, dimension in self.declared.batch.items()
                if dimension is not None and named.get(name) is not None}
            if self.declared.size is not None:
                views[self.declared.size] = count
            yield {**named, **views}, (*grid[:axis], grid[axis] // whole * count, *grid[axis + 1:])

    def _decide(self, named: dict[str, Any], grid: tuple[int, ...]) -> Decision:
        device = self._device(named)
        text = self._source = self._source or source.of(self.kernel)
        self._wide = text.wide
        asked = problem_of(_name(self.kernel), text, self.declared, {**self._defaults, **named},
                           self._constants, grid)
        plan = planned(asked, device)
        launch = plan.launches[0]
        given = asked.given
        assert given is not None
        warps = None if launch.num_warps == given.launch.num_warps else launch.num_warps
        card = device.index if device.type == "cuda" else None
        return Decision(plan.target, policy.current(), device, card, warps, plan.problem.batch_part,
                        plan.problem.dot == "fp32")

    def check_device(self, named: dict[str, Any]) -> None:
        """Raises UnsupportedError where these arguments are on a device that runs no Triton kernel."""
        if self._device(named).type == "cpu":
            grid = named.pop("grid")
            self._decide(named, tuple(grid({**self._defaults, **named}) if callable(grid) else grid))

    def _device(self, named: dict[str, Any]) -> torch.device:
        """Return the one device of the tensors. Pinned host memory, which a GPU reads too, may be among
        them."""
        devices = {tensor.device: name for name, tensor in reversed(tensors_of(named).items())
                   if tensor.device.type != "cpu" or not tensor.is_pinned()}
        if len(devices) > 1:
            shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(f"{_name(self.kernel)}: got {shown}, need all tensors on one device")
        for device in devices:
            return device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _around(kernel: Any, declared: Declared) -> Any:
    """Only the innermost launch is ours: what tunes and derives arguments stays around it. A shield around a
    shield replaces it."""
    if isinstance(kernel, Launcher):
        return Launcher(kernel.kernel, declared)
    if not hasattr(kernel.fn, "arg_names"):
        return Launcher(kernel, declared)
    inner = _around(kernel.fn, declared)
    if hasattr(kernel, "configs"):
        return tuning.around(kernel, inner)
    outer = copy.copy(kernel)
    outer.fn = inner
    return outer


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def _batch(given: Mapping[str, int | None] | None, names: list[str]) -> dict[str, int | None]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f'batch: got {given!r}, need a dict of dimensions by name of the argument, such as '
                        f'{{"q": 0}}')
    _checked("batch", given, names)
    for name, dimension in given.items():
        if dimension is not None and type(dimension) is not int:
            raise TypeError(f"batch: got {dimension!r} for {name}, need the number of a dimension, or None")
    if given and all(dimension is None for dimension in given.values()):
        raise ValueError(f"batch: got None for {', '.join(given)}, need the dimension of one tensor at "
                         "least: without it nothing can be split")
    return dict(given)


def _checked(what: str, given: Iterable[str], names: list[str]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"{what}: got {', '.join(map(repr, unknown))} as names of arguments, "
                         f"{need_one_of(unknown[0], names)}")
