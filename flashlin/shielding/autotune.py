"""autotune: Triton's decorator without what its releases get wrong. A drop-in; the tuner that it makes is
Triton's own, with another ``run``.

What differs. Values of the key are looked up by name: Triton 3.0 and 3.1 look them up by position among the
arguments that were given, which raises IndexError, or silently takes the value of another argument. Keys that
are no arguments of the kernel are dropped with a warning: 3.0, 3.1 and 3.9 refuse them when decorating. No
driver is asked before the first call. A configuration that fails is left out, and one that would end the
process ends a child instead. Two threads tune one after the other, and the second finds the result of the
first. All ranks of a job can have the same configuration.
"""
from __future__ import annotations

import copy
import inspect
import os
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from flashlin import policy
from flashlin.compat.locks import ThreadLock
from flashlin.compat.suggestions import need_one_of
from flashlin.compat.target import probe

if TYPE_CHECKING:
    from flashlin.testing.compile import Result

CHILDREN, CHILD_SECONDS = 16, 300  # at a time, for each
DETERMINISTIC = ("first", "rank0")
# configurations are tried for that: Triton says nothing either
USUAL = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")


class Tuned(NamedTuple):
    """A tuner's configurations by key, and the lock under which another one is looked for."""
    chosen: dict[Any, Any]
    lock: ThreadLock


def autotune(
    configs: list[Any], key: list[str], prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None, restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None, post_hook: Callable[..., Any] | None = None,
    deterministic: str | None = None, **options: Any,
) -> Callable[[Any], Any]:
    """``triton.autotune``, in the words of its release; see the module's docstring for what differs.

    Args:
        configs, prune_configs_by, pre_hook, post_hook, options: as Triton's.
        key: names of arguments; other values of these are tuned for anew. Where a release has only positions,
            still names.
        reset_to_zero, restore_value: names of tensors, None among them is skipped.
        deterministic: how all ranks of a job find the same configuration. ``"first"``: nothing is measured,
            the first that works is taken, which is the same one on the same card with the same Triton.
            ``"rank0"``: rank 0 measures and tells the others, through torch.distributed where that is
            initialised; all ranks must then call the kernel for the same keys in the same order, since each
            new key is a collective operation of the default group. None: as
            ``flashlin.settings(autotune=...)`` says, by default ``timed``: each process measures for itself,
            and may find another configuration than its neighbour, and so round differently.

    Warns about names in key that are no arguments of the kernel, and does without them. Raises ValueError for
    such names in reset_to_zero or restore_value, without which results would be wrong, and for an unknown
    ``deterministic``. With ``"rank0"``, a call raises RuntimeError where rank 0 found no configuration or
    tunes something else.
    """
    if deterministic not in (None, *DETERMINISTIC):
        raise ValueError(f"deterministic: got {deterministic!r}, need None, "
                         f"{' or '.join(map(repr, DETERMINISTIC))}")

    def decorate(fn: Any) -> Any:
        from triton.runtime.autotuner import Autotuner
        for what, names in (("reset_to_zero", reset_to_zero), ("restore_value", restore_value)):
            if unknown := _unknown(names, fn):
                raise ValueError(f"{what}: got {', '.join(map(repr, unknown))} as names of arguments of "
                                 f"{_name(fn)}, {need_one_of(unknown[0], fn.arg_names)}")
        if unknown := _unknown(key, fn):
            warnings.warn(f"autotune: key names {', '.join(unknown)}, which {_name(fn)} has no arguments of; "
                          "they are left out", stacklevel=2)
        accepted = inspect.signature(Autotuner.__init__).parameters
        given, timer = dict(options), options.get("do_bench")
        if "do_bench" not in accepted:  # Triton 3.0 and 3.1: ours looks for the attribute
            given.pop("do_bench", None)
        elif timer is None and not {"warmup", "rep", "use_cuda_graph"} & given.keys():
            given["do_bench"] = _benchmark  # 3.2 and 3.3 ask the driver at once unless they are handed one
        tuner = Autotuner(fn, fn.arg_names, configs, [name for name in key or () if name not in unknown],
                          list(reset_to_zero or ()), list(restore_value or ()), pre_hook=pre_hook,
                          post_hook=post_hook, prune_configs_by=prune_configs_by, **given)
        if timer is not None:
            tuner.do_bench = timer
        tuner.flashlin_deterministic = deterministic
        return fixed(tuner)
    return decorate


def fixed(tuner: Any) -> Any:
    """The same tuner with ``run`` of this module, and nothing found yet."""
    tuner.__dict__.pop("flashlin", None)
    tuner.run = types.MethodType(run, tuner)
    return tuner


def around(tuner: Any, fn: Any) -> Any:
    """A copy of a tuner that tunes ``fn`` instead of its kernel."""
    another = copy.copy(tuner)
    another.fn, another.cache = fn, {}
    return fixed(another)


class Call(NamedTuple):
    """A call of a tuned kernel. given: its positional arguments by name."""
    tuner: Any
    given: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self, config: Any) -> dict[str, Any]:
        """All arguments by name, with those of a configuration."""
        return {**self.given, **self.kwargs, **config.all_kwargs()}

    def start(self, config: Any) -> Any:
        return self.tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())


def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``Autotuner.run``: the kernel with the configuration for these arguments, which may have to
    be found first."""
    call = Call(tuner, dict(zip(tuner.arg_names, args, strict=False)), args, kwargs)
    config = _chosen(call) if len(tuner.configs) > 1 else tuner.configs[0]
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook(call.named(config))
    return call.start(config)


def _chosen(call: Call) -> Any:
    """The configuration for a call's key, as found before or now; one thread looks for it at a time."""
    attributes = call.tuner.__dict__
    state = attributes.get("flashlin") or attributes.setdefault("flashlin", Tuned({}, ThreadLock()))
    key = _key_of(call.tuner, {**call.given, **call.kwargs})
    if key not in state.chosen:
        with state.lock:
            if key not in state.chosen:
                state.chosen[key] = call.tuner.cache[key] = _found(call, key)
    return state.chosen[key]


_wanted: dict[str, Callable[[], bool]] = {}
_put: list[tuple[Any, Any]] = []  # ours in the place of Autotuner.run, and what was there
_hooking = ThreadLock()


def hook(who: str, wanted: Callable[[], bool]) -> None:
    """Let every tuner of Triton's run as ``run`` does while ``wanted()`` says so, until ``unhook(who)``."""
    from triton.runtime.autotuner import Autotuner
    with _hooking:
        _wanted[who] = wanted
        if not _put:
            original = Autotuner.run

            def asking(tuner: Any, *args: Any, **kwargs: Any) -> Any:
                chosen = run if any(wanted() for wanted in tuple(_wanted.values())) else original
                return chosen(tuner, *args, **kwargs)
            _put.append((asking, original))
            Autotuner.run = asking


def unhook(who: str) -> None:
    """What another package has put in the place of ours meanwhile stays; if it calls ours, that only hands
    on."""
    from triton.runtime.autotuner import Autotuner
    with _hooking:
        _wanted.pop(who, None)
        if not _wanted and _put:
            ours, original = _put.pop()
            if Autotuner.run is ours:
                Autotuner.run = original


def _unknown(names: list[str] | None, fn: Any) -> list[str]:
    return [name for name in names or () if name not in fn.arg_names]


def _name(fn: Any) -> str:
    return str(_python(fn).__name__)


def _python(fn: Any) -> Any:
    while hasattr(fn, "fn"):
        fn = fn.fn
    return fn


def _names(tuner: Any, by_name: str, by_position: str) -> list[str]:
    """key, reset_to_zero or restore_value of a tuner: names from Triton 3.2 on, positions in the kernel's
    signature before."""
    names = getattr(tuner, by_name, None)
    return list(names) if names is not None else [tuner.arg_names[at] for at in getattr(tuner, by_position)]


def _key_of(tuner: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    names = tuner.__dict__.get("flashlin_key")
    if names is None:
        parameters = inspect.signature(_python(tuner.fn)).parameters
        names = tuner.__dict__["flashlin_key"] = [
            (name, parameters[name].default)
            for name in _names(tuner, "keys", "key_idx") if name in parameters]
    values = [given.get(name, default) for name, default in names]
    dtypes = [(name, getattr(given.get(name), "dtype", None)) for name in tuner.arg_names]
    return (*values, *(pair for pair in dtypes if pair[1] is not None))


def _found(call: Call, key: tuple[Any, ...]) -> Any:
    """The configuration for a key: found here, or by rank 0 of the job."""
    tuner = call.tuner
    twice = call.kwargs.keys() & {name for config in tuner.configs for name in config.kwargs}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))}: given in the call to {_name(tuner)} and by a "
                         "configuration, need one of the two")
    if hasattr(tuner.fn, "check_device"):  # a shielded kernel's: timing it would fail in other words
        tuner.fn.check_device(call.named(tuner.configs[0]))
    tuner.nargs = call.given  # prune_configs of every release reads it
    try:
        pruned = list(tuner.prune_configs(call.kwargs))
    finally:
        tuner.nargs = None
    how = tuner.__dict__.get("flashlin_deterministic") or policy.current().autotune
    tune = partial(_tune, call, key, pruned, how == "first")
    if (how == "rank0" and distributed.is_available() and distributed.is_initialized()
        and distributed.get_world_size() > 1):
        return _of_rank0(tune, f"{_name(tuner)} for {key}", pruned)
    return tune()


def _of_rank0(tune: Callable[[], Any], asked: str, pruned: list[Any]) -> Any:
    rank, answer = distributed.get_rank(), [(asked, "", "interrupted")]
    if rank == 0:
        try:
            best = tune()
            answer = [(asked, str(best), "")]
            return best
        except Exception as error:
            answer = [(asked, "", f"{type(error).__name__}: {error}")]
            raise
        finally:  # the others wait for it
            distributed.broadcast_object_list(answer, src=0)
    distributed.broadcast_object_list(answer, src=0)
    theirs, chosen, failed = answer[0]
    if theirs != asked:
        raise RuntimeError(f"autotune: rank 0 tunes {theirs}, rank {rank} tunes {asked}, need the same calls "
                           "on all ranks, or deterministic='first'")
    if failed:
        raise RuntimeError(f"autotune: rank 0 finds no configuration of {asked} ({failed})")
    for config in pruned:
        if str(config) == chosen:
            return config
    raise RuntimeError(f"autotune: rank 0 chooses {chosen} of {asked}, which prune_configs_by leaves out on "
                       f"rank {rank}, need the same on all ranks")


def _tune(call: Call, key: tuple[Any, ...], pruned: list[Any], first: bool) -> Any:
    """The fastest of the configurations that work, measured, or read from disk where the tuner is told to
    keep its results there."""
    tuner = call.tuner
    if first or not getattr(tuner, "cache_results", False):
        return _measured(call, pruned, first)
    written = tuple(map(str, key))  # it is written down as JSON

    def measure() -> None:
        tuner.cache[written] = _measured(call, pruned, first)
    tuner.check_disk_cache(written, pruned, measure)
    return tuner.cache.pop(written)


def _measured(call: Call, pruned: list[Any], first: bool) -> Any:
    """The fastest, or the first, one at a time. Raises the first configuration's error where none works."""
    errors = list[Exception]()
    for together in [[config] for config in pruned] if first else [pruned]:
        configs, seconds = _compiling(call, together, errors), dict[Any, float]()
        if len(configs) == 1 and not first:
            call.tuner.configs_timings = {configs[0]: 0.0}
            return configs[0]
        for config in configs:
            try:
                timed = _timed(call, config, first)
            except Exception as error:  # told, and raised if no configuration is left
                errors.append(error)
                if type(error).__name__ not in USUAL:
                    _tell(f"{_name(call.tuner)}: configuration {config} fails "
                          f"({type(error).__name__}: {error})")
            else:
                seconds[config] = timed[0] if isinstance(timed, (list, tuple)) else timed
        if seconds:
            best = min(seconds, key=lambda config: seconds[config])
            _reset(call, call.named(best), reset_only=True)
            call.tuner.configs_timings = seconds
            return best
    raise errors[0] if errors else ValueError(
        f"{_name(call.tuner)}: prune_configs_by leaves no configuration, need one at least")


def _compiling(call: Call, configs: list[Any], errors: list[Exception]) -> list[Any]:
    """Those of the configurations that do not end the child in which they are compiled first; the others are
    told and put into ``errors``."""
    results = _compiled(call, configs)
    # Where no child ends at all, forking is what fails: a lock that another thread held. Where none can try,
    # the machine.
    if all(result.status in ("timeout", "not tried") for result in results):
        return configs
    left = list[Any]()
    for config, result in zip(configs, results, strict=True):
        if result.status not in ("abort", "timeout", "not tried"):
            left.append(config)
            continue
        what = "could not be compiled ahead" if result.status == "not tried" else "ends the compiler"
        errors.append(RuntimeError(f"{_name(call.tuner)}: configuration {config} {what} "
                                   f"({result.status}: {result.cause or result.message})"))
        _tell(errors[-1])
    return left


def _tell(why: object) -> None:
    warnings.warn(f"{why}; it is left out", stacklevel=2)


def _timed(call: Call, config: Any, first: bool) -> Any:
    """Milliseconds, by the timer of the release; 0 where the first that works is taken. The user's hooks are
    called as that release does."""
    tuner, named = call.tuner, call.named(config)
    ours = not _own(tuner.pre_hook) and not _own(tuner.post_hook)
    kept = [named[name] for name in _names(tuner, "restore_value", "restore_idx") if ours
            and named.get(name) is not None]

    def once() -> None:
        if config.pre_hook:
            config.pre_hook(named)
        copies = [tensor.clone() for tensor in kept]
        _reset(call, named)
        failed: Exception | None = None
        try:
            call.start(config)
        except Exception as error:
            failed = error
            raise
        finally:
            for tensor, before in zip(kept, copies, strict=True):
                tensor.copy_(before)
            if _own(tuner.post_hook):
                tuner.post_hook(_told(call, named), exception=failed)
    if first:
        once()
        return 0.0
    timer = getattr(tuner, "do_bench", None)
    if timer is not None:
        return timer(once, quantiles=(0.5, 0.2, 0.8))
    import triton.testing
    if tuner.use_cuda_graph:
        return triton.testing.do_bench_cudagraph(once, rep=tuner.num_reps, return_mode="median")
    return triton.testing.do_bench(once, warmup=tuner.num_warmups, rep=tuner.num_reps,
                                   quantiles=(0.5, 0.2, 0.8))


def _reset(call: Call, named: dict[str, Any], **how: bool) -> None:
    """Before a launch whose result counts, in tuning or after it: the user's hook, or what reset_to_zero
    names."""
    if _own(call.tuner.pre_hook):
        call.tuner.pre_hook(_told(call, named), **how)
        return
    for name in _names(call.tuner, "reset_to_zero", "reset_idx"):
        if named.get(name) is not None:
            named[name].zero_()


def _told(call: Call, named: dict[str, Any]) -> Any:
    """What a hook is handed: arguments by name from Triton 3.2 on, by position before."""
    return named if hasattr(call.tuner, "keys") else call.args


def _own(hook: Any) -> bool:
    """Whether a hook is the user's, not what Triton makes of reset_to_zero and restore_value."""
    return not getattr(hook, "__qualname__", "").startswith("Autotuner.__init__.")


def _benchmark(call: Callable[[], None], quantiles: Any) -> Any:
    from triton.runtime import driver
    return driver.active.get_benchmarker()(call, quantiles=quantiles)


def _compiled(call: Call, configs: list[Any]) -> list[Result]:
    """How each configuration compiles in a child; empty where that is not asked. What a child compiles lies
    in Triton's cache afterwards."""
    device = next((value.device for value in (*call.args, *call.kwargs.values())
                   if isinstance(value, torch.Tensor)), None)
    target = None if device is None else probe(device)
    if (target is None or target.backend != "cuda" or not hasattr(os, "fork")
        or policy.current().policy == "off"):
        return []
    from flashlin.testing.compile import compiled_in_forks
    sm = 10 * target.capability[0] + target.capability[1]
    works = [partial(_compile, call, config, sm) for config in configs]
    results = dict(compiled_in_forks(works, min(os.cpu_count() or 1, CHILDREN), CHILD_SECONDS))
    return [results[number] for number in range(len(configs))]


def _compile(call: Call, config: Any, sm: int, folder: Path) -> Result:
    """In the child. An exception is no reason to leave a configuration out: it is met again, and caught,
    where it is timed."""
    from triton.runtime import driver

    from flashlin.testing.compile import Driver, Result
    driver.set_active(Driver(sm))
    try:
        call.tuner.fn.run(*call.args, **{**call.kwargs, **config.all_kwargs(), "warmup": True})
    except Exception as error:
        return Result("exception", f"{type(error).__name__}: {error}"[:2000])
    return Result("ok")
