"""The function ``shield``, which applies flashlin's checks and remedies to a user's Triton kernel.

``shield`` replaces the innermost object, which ``@triton.jit`` created, by a ``Launcher``. An autotuner and
heuristics around it stay. At each launch all arguments and options are known. They are reduced to plain facts
(``Given``) and planned as any other call. The plan says which remedies to apply. The decision is cached for
each kernel and its facts, so that a repeated call costs only some microseconds.
"""
from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashlin import policy
from flashlin.compat.signatures import signature_of
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
# Types that are not tensors. A lookup in this set is faster than isinstance.
NUMBERS = frozenset({int, float, bool, str, type(None)})
OPTIONS = ("num_warps", "num_stages")


def shield(kernel: Any, *, batch: Mapping[str, int | None] | None = None, batch_axis: int | None = None,
           batch_size: str | None = None, outputs: Sequence[str] = ()) -> Any:
    """Return a Triton kernel that checks each launch first; call it as before, with ``kernel[grid](...)``.

    A launch with too large a grid or too large offsets is split along the batch, if the batch is declared. If
    the tensors are not on the current device, the launch runs on their device. A launch with more warps than
    the compiler supports runs with fewer. A launch on 16-bit tensors that does not compile runs on fp32
    copies, if the outputs are declared.

    Args:
        kernel: the result of ``@triton.jit``, ``@triton.autotune`` or ``@triton.heuristics``, or a function
            that launches such kernels. Launches in the function and in its backward are planned, and the
            function is called on slices of the batch if necessary. It must not write to its arguments.
        batch: maps the name of each tensor argument to the index of its batch dimension; None for a tensor
            without one. The dimension may combine batch and heads, batch first. A dimension of size batch + 1
            is treated as sequence boundaries (cu_seqlens). A launch is not split if a tensor that is not
            named here has such a dimension.
        batch_axis: the grid axis (0, 1, 2) that counts the batch, or batch times heads, batch first. Not for
            functions.
        batch_size: the argument that contains the size of the batch, if there is one.
        outputs: the tensor arguments that the kernel writes.

    Raises ValueError or TypeError if a declaration names an argument or a dimension that does not exist; some
    are found only in a call. A call raises UnsupportedError before any launch if no remedy helps.
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
            names = list(signature_of(kernel).parameters)
        except ValueError:
            raise TypeError(f"kernel: got {kernel!r}, whose arguments Python cannot list, need a Triton "
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
    """A cached plan for launches of a user's kernel, with the conditions for which it is valid.

    target, policy, device: the decision is valid while these stay the same.
    card: the index of the CUDA device, or None if the device is not a GPU.
    warps: the number of warps, or None to keep the requested number.
    part: the number of batch entries per launch, or 0 for the whole batch.
    fp32: launch on fp32 copies of the tensors.
    """
    target: Target
    policy: Policy
    device: torch.device
    card: int | None
    warps: int | None
    part: int
    fp32: bool


class Launcher:
    """A wrapper of a ``@triton.jit`` kernel that plans each launch.

    All other attributes come from the kernel itself.
    """

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
        if name == "kernel":  # copy first creates an object without attributes
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """Compile the kernel for these arguments without launching it."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Plan the launch and start it; return the result of the kernel's own ``run``.

        A split batch has one result for each slice, of which the last one is returned.
        """
        grid = tuple(grid({**self._defaults, **self._named(args, kwargs)}) if callable(grid) else grid)
        key = self._facts(grid, args, kwargs)
        decision = self._decided.get(key)
        # Whether a batch can be split depends on shapes, which the key does not contain. Therefore the rare
        # split launch is planned each time.
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
        """Return the key of a decision: grid, options, constants, and dtype and device of each tensor.

        Shape and strides are added only for large tensors. Every launch runs this function, so it must be
        fast.
        """
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
        asked = problem_of(tuning.name_of(self.kernel), text, self.declared, {**self._defaults, **named},
                           self._constants, grid)
        plan = planned(asked, device)
        launch = plan.launches[0]
        assert asked.given is not None
        warps = None if launch.num_warps == asked.given.launch.num_warps else launch.num_warps
        card = device.index if device.type == "cuda" else None
        return Decision(plan.target, policy.current(), device, card, warps, plan.problem.batch_part,
                        plan.problem.dot == "fp32")

    def check_device(self, named: dict[str, Any]) -> None:
        """Raise UnsupportedError if the arguments are on a device that cannot run Triton kernels."""
        if self._device(named).type == "cpu":
            grid = named.pop("grid")
            self._decide(named, tuple(grid({**self._defaults, **named}) if callable(grid) else grid))

    def _device(self, named: dict[str, Any]) -> torch.device:
        """Return the device of the tensors, or raise ValueError if they are on several devices.

        Tensors in pinned host memory are ignored, because a GPU can read them.
        """
        devices = {tensor.device: name for name, tensor in reversed(tensors_of(named).items())
                   if tensor.device.type != "cpu" or not tensor.is_pinned()}
        if len(devices) > 1:
            shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(f"{tuning.name_of(self.kernel)}: got {shown}, need all tensors on one device")
        for device in devices:
            return device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _around(kernel: Any, declared: Declared) -> Any:
    """Return a copy of a kernel with its innermost object replaced by a ``Launcher``.

    Autotuners and heuristics stay around it. If the kernel is already shielded, the new shield replaces the
    old one.
    """
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
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{what}: got {', '.join(map(repr, unknown))} as names of arguments, "
                         f"{need_one_of(unknown[0], names)}")
