"""Kernels as differentiable functions: an autograd function eagerly, library operators when traced.

An ``Operator`` is made of three NamedTuples, whose fields give names and order: the tensors that go in, the
scalars beside them, the tensors that come out. Gradients come back by name. So another field is one line in
one class.

Eagerly the caller has a plan, and the operator runs its kernels. Under torch.compile there is no plan yet:
flashlin::<name> and flashlin::<name>_backward make theirs when they run, so that no length is ever
specialised. By then it may have left the kernels that torch.compile saw (``settings``, a launch table, a
canary); then they compute by plain torch, forward and backward each as planned for itself.
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

NOTHING = torch.uint8  # the dtype of the empty vector that stands for None where an operator returns a tensor
TYPES: dict[Any, str] = {Tensor: "Tensor", float: "float", bool: "bool", int: "int", str: "str",
                         torch.dtype: "ScalarType"}
SCHEMA_TYPES = {**TYPES, **{hint | None: f"{name}?" for hint, name in TYPES.items()}}

# Operators that have once gone forward by plain torch when traced: what they kept for backward's kernels may
# be nothing, so from then on a traced backward that runs kernels repeats forward's.
emptied: set[str] = set()


@dataclass(eq=False)
class Operator(Planned[X, S], Generic[X, S, Y]):
    """A set of kernels as a differentiable function, eagerly and under torch.compile.

    tensors, scalars, outputs: NamedTuple classes. Scalars end with ``needs_grad: bool``, whether backward may
        follow, and ``call: str``, whose first word is the op.
    returns: so many outputs go to the caller, and have gradients; backward may read the others. ``on_torch``
        returns these or more.
    forward(plan, x, how) -> outputs, by kernels. One that replays runs (replay.py) may get the record of the
        call as a fourth argument.
    kept(x, y, how) -> what backward reads, in the order of x and of y, with None for the rest. A tensor of
        the same shape may take the place of another. ``problem`` may get such an x.
    backward(plan, x, y, grads, how, wanted) -> gradients by name, of the wanted ones at least, None for
        zeros, by kernels. x and y: as kept, y by ``own``. grads: of y, None for zeros.
    same(how): inputs by name, each with the input or output that has the same gradient.
    in_place: an input that may be an output, written to. instead: what has second-order gradients.

    Library operators need more; without ``empty`` there are none, and torch.compile sees plain torch.
    empty(x, how) -> tensors like the outputs, None where there is none.
    all_on_torch(x, how) -> by plain torch what is returned and kept, if ``on_torch`` makes less.
    backward_on_torch(x, y, grads, how, wanted): backward by plain torch, if it is not what autograd makes of
        ``on_torch``.
    like(x, how, name): a tensor like the gradient of an input, if it is not like what is kept in the input's
        place.
    plain_backward: backward is plain torch, which torch.compile traces as it is.
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
        """Return the first ``returns`` outputs. plan: None while torch.compile traces; then a placeholder
        replaces an output that the call does not have. call: its record, for a ``forward`` that replays
        runs."""
        if plan is None:
            traced: tuple[Any, ...] = getattr(torch.ops.flashlin, self.name)(*x, *how)[: self.returns]
            return traced
        needs_grad = how.needs_grad  # type: ignore[attr-defined]  # Scalars end with it and with call
        if not (needs_grad or self.in_place):
            return tuple(self.forward(plan, self.tensors(*x), how, *call)[: self.returns])
        eager: tuple[Any, ...] = _Eager.apply((self, plan, how, call), *x)
        return eager

    def own(self, y: Y) -> Y:
        """y with other objects for what is not returned, which backward may empty as soon as it has read
        them, whoever holds y meanwhile. Their memory goes then, unless somebody else has it, too."""
        read: Iterable[Tensor | None] = y
        return self.outputs(*[t if t is None or number < self.returns else t.data
                              for number, t in enumerate(read)])

    def gradients(
        self, compute: Callable[[frozenset[str]], Gradients], grads: Y, how: S, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Those of the tensors, in their order, None where it is not needed. Computed are the ones that are
        not the same as others."""
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


def _gradients(
    ctx: Any, saved: list[Tensor | None], given: tuple[Tensor | None, ...], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the operator's tensors, in their order, None where it is not needed. saved is emptied."""
    operator, plan, how = ctx.call
    x, y = operator.tensors(*saved[: operator.count]), operator.outputs(*saved[operator.count :])
    if plan is not None:  # else torch.compile traces
        y = operator.own(y)
        saved.clear()
    grads = operator.outputs(*given, *operator.missing)
    gradients: list[Tensor | None] = operator.gradients(
        partial(operator.backward, plan, x, y, grads, how), grads, how, needs
    )
    return gradients


@once(_who)
def _differentiate_plainly(ctx: Any, saved: list[Tensor | None], *given: Tensor | None) -> Any:
    operator, _, how = ctx.call
    return *_gradients(ctx, saved, given[: operator.returns], ctx.needs_input_grad), *(None for _ in how)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: tuple[Operator[Any, Any, Any], Plan, Any, tuple[Any, ...]], *tensors: Tensor | None
    ) -> Any:
        operator, plan, how, record = call  # one argument: torch looks at each of them, forward and back
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
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: else they would live until this returns
        return None, *_gradients(ctx, saved, given, ctx.needs_input_grad[1:])


own_nodes.add(_Eager._backward_cls)


class _Library(Generic[X, S, Y]):
    """An operator's two library operators. Their schemas are spelt out because torch 2.4 cannot read
    annotations."""

    def __init__(self, operator: Operator[X, S, Y], empty: Callable[[X, S], Outputs]) -> None:
        self.of, self.empty = operator, empty
        beside = typed(operator.scalars)
        results = ", ".join("Tensor" for _ in operator.output_names)
        there = torch.library.custom_op(
            f"flashlin::{operator.name}",
            self._run,
            mutates_args=(),
            schema=f"({', '.join([*typed(operator.tensors), *beside])}) -> ({results})",
        )
        there.register_fake(self._run_fake)
        there.register_autograd(
            _differentiate_plainly if operator.plain_backward else self._differentiate,
            setup_context=self._save,
        )
        if operator.plain_backward:
            return
        read = [
            *operator.names,
            *(f"kept_{name}" for name in operator.output_names),
            *(f"d_{name}" for name in operator.output_names[: operator.returns]),
        ]
        back = torch.library.custom_op(
            f"flashlin::{operator.name}_backward",
            self._pull_back,
            mutates_args=(),
            schema=(
                f"({', '.join([*(f'Tensor? {name}' for name in read), *beside])}, str wanted) -> Tensor[]"
            ),
        )
        back.register_fake(self._pull_back_fake)
        once_traced(back)

    @without_autocast
    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, how = _split(self.of.tensors, self.of.scalars, arguments)
        plan = planned(self.of.problem(x, how), x[0].device)
        if plan.problem.path != "torch" or self.of.on_torch is None:
            return _all_there(self.of.forward(plan, x, how), x[0])
        on_torch = self.of.all_on_torch or self.of.on_torch
        return _all_there(self._on_torch(x, how, on_torch(x, how)), x[0])

    def _run_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, how = _split(self.of.tensors, self.of.scalars, arguments)
        return _all_there(self.empty(x, how), x[0])

    def _on_torch(self, x: X, how: Any, made: Outputs) -> list[Tensor | None]:
        """Return what plain torch made as kernels would have left it. An output that plain torch does not
        make is an empty tensor."""
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
        x, how = _split(self.of.tensors, self.of.scalars, inputs)
        ctx.call = self.of, None, how
        ctx.set_materialize_grads(False)
        x_kept, y_kept = self.of.kept(
            x, self.of.outputs(*(None if t.dtype == NOTHING else t for t in output)), how
        )
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
        gradients: Gradients
        if plan.problem.path != "torch":
            if self.of.name in emptied:
                # x is all there then: kernels that keep more than what is returned read x, too
                y = self.of.outputs(*self.of.forward(plan, x, how))
            gradients = self.of.backward(plan, x, self.of.own(y), grads, how, frozenset(wanted))
        elif self.of.backward_on_torch is not None:
            gradients = self.of.backward_on_torch(x, y, grads, how, frozenset(wanted))
        else:
            on_torch = self.of.on_torch
            assert on_torch is not None  # else backward is plain torch
            gradients = pulled_back(
                lambda x: on_torch(x, how)[: self.of.returns], x, wanted, grads[: self.of.returns]
            )
        taken = {t.untyped_storage().data_ptr() for t in grads if t is not None}
        return [_apart(gradients[name], self._like(x, how, name), taken) for name in wanted]

    def _pull_back_fake(self, *arguments: Any) -> list[Tensor]:
        x, _, _, how, wanted = self._parted(arguments)
        return [self._like(x, how, name) for name in wanted]

    def _parted(self, arguments: tuple[Any, ...]) -> tuple[X, Y, Y, S, list[str]]:
        """(x, y, grads, how, wanted) of the backward operator."""
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
    """Kernels that write to one of their tensors and have no gradients.

    tensors, scalars: NamedTuple classes; scalars end with ``call: str``. written: the name of the tensor, in
        either of them.
    launch(plan, x, how) -> the result, by kernels. ``on_torch`` writes to the same tensor.
    empty(x, how) -> a tensor like the result.
    """

    name: str
    tensors: Callable[..., X]
    scalars: Callable[..., S]
    written: str
    _: KW_ONLY
    launch: Callable[[Plan, X, S], Tensor]
    empty: Callable[[X, S], Tensor]

    def __post_init__(self) -> None:
        """Define flashlin::<name>, which plans when it runs."""
        inputs = ", ".join([*typed(self.tensors), *typed(self.scalars)])
        library = torch.library.custom_op(
            f"flashlin::{self.name}",
            without_autocast(lambda *arguments: self.run_planned(*self._split(arguments)).contiguous()),
            mutates_args=(self.written,),
            schema=f"({inputs.replace(f'Tensor {self.written}', f'Tensor(a!) {self.written}')}) -> Tensor",
        )
        library.register_fake(lambda *arguments: self.empty(*self._split(arguments)))

    def __call__(self, plan: Plan | None, x: X, how: S) -> Tensor:
        if plan is None:
            traced: Tensor = getattr(torch.ops.flashlin, self.name)(*x, *how)
            return traced
        return self.launch(plan, x, how)

    def _split(self, arguments: Sequence[Any]) -> tuple[X, S]:
        return _split(self.tensors, self.scalars, arguments)


@cache
def kernels(family: str, direction: str) -> Any:
    """The module of a family's kernels. Triton is imported when it is needed, not before."""
    return import_module(f"flashlin.kernels.{family}.{direction}")


def fields_of(named: Any) -> tuple[str, ...]:
    """The names of the fields of a NamedTuple or its class."""
    names: tuple[str, ...] = named._fields
    return names


def typed(fields: Any) -> list[str]:
    """The fields of a NamedTuple class as a schema writes them: ``Tensor? h0``."""
    return [f"{SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(fields).items()]


def _split(
    tensors: Callable[..., X], scalars: Callable[..., S], arguments: Sequence[Any]
) -> tuple[X, S]:
    """What a library operator got, as an operator's functions take it."""
    count = len(fields_of(tensors))
    return tensors(*arguments[:count]), scalars(*arguments[count:])


def _all_there(outputs: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Outputs with an empty vector in the place of each that there is not."""
    return tuple(like.new_empty(0, dtype=NOTHING) if t is None else t for t in outputs)


def _apart(x: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """x (None: zeros) as ``like`` is, and in memory of its own: an operator may return neither one tensor
    twice nor one that it got."""
    if x is None:
        return torch.zeros_like(like)
    x = x.to(like.dtype).contiguous()
    place = x.untyped_storage().data_ptr()
    if place and place in taken:
        x = x.clone()
    taken.add(x.untyped_storage().data_ptr())
    return x
