"""Kernels as differentiable functions: an autograd function in eager mode, library operators when traced.

An ``Operator`` is built from three NamedTuples, whose fields give names and order: the input tensors, the
scalars and the output tensors. Gradients are returned by name. Therefore a new tensor or scalar needs one
line in one class.

In eager mode the caller has a plan, and the operator runs its kernels. Under torch.compile there is no plan
yet. flashlin::<name> and flashlin::<name>_backward plan when they run, so torch.compile never specialises a
length. By then the plan may no longer choose kernels, because of ``settings``, a launch table or a trial. In
that case forward and backward compute in plain torch, each by its own plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from importlib import import_module
from itertools import compress, islice, zip_longest
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

from flashlin.guards.plan_types import Plan
from flashlin.ops._common.entry import own_nodes, without_autocast
from flashlin.ops._common.gradients import INSTEAD, once, once_traced, pulled_back
from flashlin.ops._common.pipeline import Planned, planned

X = TypeVar("X", bound=tuple[Any, ...])
S = TypeVar("S", bound=tuple[Any, ...])
Y = TypeVar("Y", bound=tuple[Any, ...])
Gradients = Mapping[str, Tensor | None]
Outputs = Sequence[Tensor | None]
Kept = tuple[Outputs, Outputs]

NOTHING = torch.uint8  # dtype of the empty vector that a library operator returns instead of None
TYPES: dict[Any, str] = {Tensor: "Tensor", float: "float", bool: "bool", int: "int", str: "str",
                         torch.dtype: "ScalarType"}
SCHEMA_TYPES = {**TYPES, **{hint | None: f"{name}?" for hint, name in TYPES.items()}}

# Operators whose traced forward has run in plain torch at least once. Such a forward may keep nothing for the
# kernels of backward, so from then on a traced backward that runs kernels repeats the forward kernels.
emptied: set[str] = set()


@dataclass(eq=False)
class Operator(Planned[X, S], Generic[X, S, Y]):
    """A set of kernels as a differentiable function, in eager mode and under torch.compile.

    tensors, scalars, outputs: NamedTuple classes. Scalars end with ``needs_grad: bool`` (True if backward may
        follow) and ``call: str`` (its first word is the op).
    returns: the number of outputs that the caller receives and that have gradients. Only backward reads the
        other outputs. ``on_torch`` returns these outputs or more.
    forward: ``forward(plan, x, how)`` returns the outputs, by kernels. A forward that replays runs
        (replay.py) may receive the record of the call as a fourth argument.
    kept: ``kept(x, y, how)`` returns the tensors that backward reads, in the order of x and of y, with None
        for the others. A tensor may be replaced by another one of the same shape. For a traced backward,
        ``Planned.problem`` receives the kept x, in which tensors may be missing or replaced.
    backward: ``backward(plan, x, y, grads, how, wanted)`` returns, by kernels, at least the wanted gradients
        by name, None for zeros. x and y are the kept tensors. y has passed through the method ``own``, so
        backward may empty its tensors. grads: gradients of y, None for zeros.
    same: ``same(how)`` maps an input to the input or output that has the same gradient.
    in_place: name of an input that forward may overwrite and return as an output.
    instead: text for errors: which alternative has second-order gradients.

    The following fields serve the library operators. Without ``empty`` there are no library operators, and
    torch.compile sees plain torch.
    empty: ``empty(x, how)`` returns empty tensors like the outputs, None for a missing output.
    filled: ``filled(x, how, made)`` returns the results of ``forward``. It replaces each None for which
        ``empty`` has a tensor.
    all_on_torch: ``all_on_torch(x, how)`` computes outputs and kept tensors in plain torch, if ``on_torch``
        returns fewer tensors.
    backward_on_torch: ``backward_on_torch(x, y, grads, how, wanted)`` is backward in plain torch, if it
        differs from autograd's backward of ``on_torch``.
    like: ``like(x, how, name)`` returns a tensor like the gradient of an input, if the gradient differs in
        shape or dtype from the tensor kept for that input.
    plain_backward: True if backward is plain torch, which torch.compile traces directly.
    """

    name: str
    tensors: Callable[..., X]
    scalars: Callable[..., S]
    outputs: Callable[..., Y]
    returns: int
    _: KW_ONLY
    forward: Callable[..., Outputs]
    kept: Callable[[X, Y, S], Kept]
    backward: Callable[[Plan, X, Y, Y, S, frozenset[str]], Gradients]
    same: Callable[[S], Mapping[str, str]] | None = None
    in_place: str = ""
    instead: str = INSTEAD
    empty: Callable[[X, S], Outputs] | None = None
    filled: Callable[[X, S, Outputs], Outputs] | None = None
    all_on_torch: Callable[[X, S], Outputs] | None = None
    backward_on_torch: Callable[[X, Y, Y, S, frozenset[str]], Gradients] | None = None
    like: Callable[[X, S, str], Tensor] | None = None
    plain_backward: bool = False

    def __post_init__(self) -> None:
        self.names, self.output_names = fields_of(self.tensors), fields_of(self.outputs)
        self.count, self.missing = len(self.names), (None,) * (len(self.output_names) - self.returns)
        if self.empty is None:
            self.while_tracing = None
        else:
            _Library(self, self.empty)

    def __call__(self, plan: Plan | None, x: Iterable[Tensor | None], how: S, *call: Any) -> tuple[Any, ...]:
        """Return the first ``returns`` outputs.

        plan: None while torch.compile traces. Then a placeholder replaces an output that the call does not
            have.
        call: the record of the call, for a ``forward`` that replays runs.
        """
        if plan is None:
            traced: tuple[Any, ...] = getattr(torch.ops.flashlin, self.name)(*x, *how)[: self.returns]
            return traced
        needs_grad = how.needs_grad  # type: ignore[attr-defined]  # Scalars end with it and with call
        if not (needs_grad or self.in_place):
            return tuple(self.forward(plan, self.tensors(*x), how, *call)[: self.returns])
        eager: tuple[Any, ...] = _Eager.apply((self, plan, how, call), *x)
        return eager

    def own(self, y: Y) -> Y:
        """Return y with new tensor objects for the outputs that the caller does not receive.

        Backward may empty these objects as soon as it has read them, even if other code still refers to y.
        Their memory is then freed, unless another tensor shares it.
        """
        read: Iterable[Tensor | None] = y
        return self.outputs(*[t if t is None or number < self.returns else t.data
                              for number, t in enumerate(read)])

    def gradients(self, compute: Callable[[frozenset[str]], Gradients], grads: Y, how: S,
                  needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the input tensors in their order, None if not needed.

        Only gradients that do not equal another one (``same``) are computed.
        """
        wanted = _wanted(self.names, tuple(needs))
        if self.same is None:
            gradients = compute(wanted)
        else:
            same = {name: source for name, source in self.same(how).items() if name in wanted}
            asked = wanted - same.keys() | {source for source in same.values() if source in self.names}
            computed = compute(asked) if asked else {}
            gradients = {**computed, **{
                name: computed[source] if source in self.names else getattr(grads, source)
                for name, source in same.items()}}
        return [gradients[name] if name in wanted else None for name in self.names]


@cache
def _wanted(names: tuple[str, ...], needs: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(compress(names, needs))


def _who(ctx: Any) -> tuple[str, str]:
    operator, _, how = ctx.call
    return how.call, operator.instead


def _gradients(ctx: Any, saved: list[Tensor | None], given: tuple[Tensor | None, ...],
               needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the operator's tensors in their order, None if not needed.

    The list ``saved`` is emptied, so that its memory can be reused.
    """
    operator, plan, how = ctx.call
    x, y = operator.tensors(*saved[: operator.count]), operator.outputs(*saved[operator.count :])
    if plan is not None:  # without a plan torch.compile is tracing
        y = operator.own(y)
        saved.clear()
    grads = operator.outputs(*given, *operator.missing)
    compute = partial(operator.backward, plan, x, y, grads, how)
    gradients: list[Tensor | None] = operator.gradients(compute, grads, how, needs)
    return gradients


@once(_who)
def _differentiate_plainly(ctx: Any, saved: list[Tensor | None], *given: Tensor | None) -> Any:
    operator, _, how = ctx.call
    return *_gradients(ctx, saved, given[: operator.returns], ctx.needs_input_grad), *(None for _ in how)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Operator[Any, Any, Any], Plan, Any, tuple[Any, ...]],
                *tensors: Tensor | None) -> Any:
        operator, plan, how, record = call  # one argument, because torch spends time on each in forward and backward
        x = operator.tensors(*tensors)
        y = operator.forward(plan, x, how, *record)
        if how.needs_grad:
            x_kept, y_kept = operator.kept(x, operator.outputs(*y), how)
            ctx.save_for_backward(*x_kept, *y_kept)
            ctx.set_materialize_grads(False)
            ctx.call = operator, plan, how
        if operator.in_place and y[0] is getattr(x, operator.in_place):
            ctx.mark_dirty(y[0])
        return tuple(y[: operator.returns])

    @staticmethod
    @once(_who)
    def backward(ctx: Any, saved: list[Tensor | None], *given: Tensor | None) -> Any:
        # Free saved tensors now, unless the graph is retained. Otherwise they would live until this returns.
        ctx.maybe_clear_saved_tensors()
        return None, *_gradients(ctx, saved, given, ctx.needs_input_grad[1:])


own_nodes.add(_Eager._backward_cls)


class _Library(Generic[X, S, Y]):
    """The two library operators of an Operator.

    Their schemas are explicit strings, because torch 2.4 cannot read the annotations.
    """

    def __init__(self, operator: Operator[X, S, Y], empty: Callable[[X, S], Outputs]) -> None:
        self.of, self.empty = operator, empty
        beside = typed(operator.scalars)
        results = ", ".join("Tensor" for _ in operator.output_names)
        there = torch.library.custom_op(
            f"flashlin::{operator.name}", self._run, mutates_args=(),
            schema=f"({', '.join([*typed(operator.tensors), *beside])}) -> ({results})")
        there.register_fake(lambda *arguments: _all_there(empty(*_split(operator, arguments)), arguments[0]))
        there.register_autograd(_differentiate_plainly if operator.plain_backward else self._differentiate,
                                setup_context=self._save)
        if operator.plain_backward:
            return
        read = [*operator.names, *(f"kept_{name}" for name in operator.output_names),
                *(f"d_{name}" for name in operator.output_names[: operator.returns])]
        back = torch.library.custom_op(
            f"flashlin::{operator.name}_backward", self._pull_back, mutates_args=(),
            schema=f"({', '.join([*(f'Tensor? {name}' for name in read), *beside])}, str wanted) -> Tensor[]")
        back.register_fake(self._pull_back_fake)
        once_traced(back)

    @without_autocast
    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, how = _split(self.of, arguments)
        plan = planned(self.of.problem(x, how), x[0].device)
        if plan.problem.path != "torch" or self.of.on_torch is None:
            made = self.of.forward(plan, x, how)
            return _all_there(self.of.filled(x, how, made) if self.of.filled else made, x[0])
        on_torch = self.of.all_on_torch or self.of.on_torch
        return _all_there(self._on_torch(x, how, on_torch(x, how)), x[0])

    def _on_torch(self, x: X, how: Any, made: Outputs) -> list[Tensor | None]:
        """Return the results of plain torch in the layout and dtype that the kernels would produce.

        An output that plain torch does not compute is an empty tensor.
        """
        outputs: list[Tensor | None] = []
        for room, y in zip_longest(self.empty(x, how), made):
            if room is None or y is None:
                if room is not None and how.needs_grad:
                    emptied.add(self.of.name)
                outputs.append(room)
            else:
                alike = y.dtype == room.dtype and y.stride() == room.stride()
                outputs.append(y if alike else room.copy_(y.reshape(room.shape)))
        return outputs

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        x, how = _split(self.of, inputs)
        ctx.call = self.of, None, how
        ctx.set_materialize_grads(False)
        y = self.of.outputs(*(None if t.dtype == NOTHING else t for t in output))
        x_kept, y_kept = self.of.kept(x, y, how)
        ctx.save_for_backward(*x_kept, *y_kept)

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        back, saved = getattr(torch.ops.flashlin, f"{self.of.name}_backward"), ctx.saved_tensors
        _, _, how = ctx.call

        def compute(wanted: frozenset[str]) -> Gradients:
            names = [name for name in self.of.names if name in wanted]
            gradients = back(*saved, *grads[: self.of.returns], *how, " ".join(names))
            return dict(zip(names, gradients, strict=True))

        gradients = self.of.gradients(compute, self.of.outputs(*grads), how, ctx.needs_input_grad)
        return *gradients, *(None for _ in how)

    @without_autocast
    def _pull_back(self, *arguments: Any) -> list[Tensor]:
        x, y, grads, how, wanted = self._parted(arguments)
        first = next(t for t in arguments if t is not None)
        plan = planned(self.of.problem(x, how), first.device)
        if plan.problem.path != "torch":
            if self.of.name in emptied:
                # kept(x) is complete here, because kernels that keep more than the outputs also read x.
                y = self.of.outputs(*self.of.forward(plan, x, how))
            gradients = self.of.backward(plan, x, self.of.own(y), grads, how, frozenset(wanted))
        elif self.of.backward_on_torch is not None:
            gradients = self.of.backward_on_torch(x, y, grads, how, frozenset(wanted))
        else:
            on_torch = self.of.on_torch
            assert on_torch is not None  # operators without on_torch have plain_backward and do not come here
            count = self.of.returns
            gradients = pulled_back(lambda x: on_torch(x, how)[:count], x, wanted, grads[:count])
        taken = {t.untyped_storage().data_ptr() for t in grads if t is not None}
        return [_apart(gradients[name], self._like(x, how, name), taken) for name in wanted]

    def _pull_back_fake(self, *arguments: Any) -> list[Tensor]:
        x, _, _, how, wanted = self._parted(arguments)
        return [self._like(x, how, name) for name in wanted]

    def _parted(self, arguments: tuple[Any, ...]) -> tuple[X, Y, Y, S, list[str]]:
        """Split the arguments of the backward library operator into (x, y, grads, how, wanted).

        x, y: the kept inputs and outputs. grads: the gradients of y. how: the scalars. wanted: the names of
        the inputs that need a gradient.
        """
        given = iter(arguments[:-1])
        x = self.of.tensors(*islice(given, self.of.count))
        y = self.of.outputs(*islice(given, len(self.of.output_names)))
        grads = self.of.outputs(*islice(given, self.of.returns), *self.of.missing)
        return x, y, grads, self.of.scalars(*given), arguments[-1].split()

    def _like(self, x: X, how: S, name: str) -> Tensor:
        of = getattr(x, name) if self.of.like is None else self.of.like(x, how, name)
        return torch.empty_like(of, memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Overwriting(Planned[X, S]):
    """A set of kernels that overwrite one of their tensors and have no gradients.

    tensors, scalars: NamedTuple classes. Scalars end with ``call: str``.
    written: name of the overwritten tensor, a field of either class.
    launch: ``launch(plan, x, how)`` returns the result, by kernels. ``on_torch`` overwrites the same tensor.
    empty: ``empty(x, how)`` returns an empty tensor like the result.
    """

    name: str
    tensors: Callable[..., X]
    scalars: Callable[..., S]
    written: str
    _: KW_ONLY
    launch: Callable[[Plan, X, S], Tensor]
    empty: Callable[[X, S], Tensor]

    def __post_init__(self) -> None:
        """Define the library operator flashlin::<name>, which plans when it runs."""
        inputs = ", ".join([*typed(self.tensors), *typed(self.scalars)])
        library = torch.library.custom_op(
            f"flashlin::{self.name}",
            without_autocast(lambda *arguments: self.run_planned(*_split(self, arguments)).contiguous()),
            mutates_args=(self.written,),
            schema=f"({inputs.replace(f'Tensor {self.written}', f'Tensor(a!) {self.written}')}) -> Tensor")
        library.register_fake(lambda *arguments: self.empty(*_split(self, arguments)))

    def __call__(self, plan: Plan | None, x: X, how: S) -> Tensor:
        if plan is None:
            traced: Tensor = getattr(torch.ops.flashlin, self.name)(*x, *how)
            return traced
        return self.launch(plan, x, how)


@cache
def kernels(family: str, direction: str) -> Any:
    """Return the kernel module of a family for a direction, and import Triton only then."""
    return import_module(f"flashlin.kernels.{family}.{direction}")


def fields_of(named: Any) -> tuple[str, ...]:
    """Return the field names of a NamedTuple or its class."""
    return tuple(named._fields)


def typed(fields: Any) -> list[str]:
    """Return the fields of a NamedTuple class in the syntax of a torch schema, such as ``Tensor? h0``."""
    return [f"{SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(fields).items()]


def _split(of: Operator[X, S, Any] | Overwriting[X, S], arguments: Sequence[Any]) -> tuple[X, S]:
    """Return the arguments of a library operator as its two NamedTuples, tensors and scalars."""
    count = len(fields_of(of.tensors))
    return of.tensors(*arguments[:count]), of.scalars(*arguments[count:])


def _all_there(outputs: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs with an empty vector instead of each None."""
    return tuple(like.new_empty(0, dtype=NOTHING) if t is None else t for t in outputs)


def _apart(x: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """Return x with the dtype of ``like`` in memory of its own; zeros if x is None.

    A library operator must return neither one tensor twice nor one of its inputs.
    taken: storage addresses that are already in use; the result's address is added.
    """
    if x is None:
        return torch.zeros_like(like)
    x = x.to(like.dtype).contiguous()
    place = x.untyped_storage().data_ptr()
    if place and place in taken:
        x = x.clone()
    taken.add(x.untyped_storage().data_ptr())
    return x
