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
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from flashlin import policy
from flashlin.compat.target import probe

if TYPE_CHECKING:
    from flashlin.testing.compile import Result

CHILDREN, CHILD_SECONDS = 16, 300  # at a time, for each
DETERMINISTIC = ("first", "rank0")
# configurations are tried for that: Triton says nothing either
USUAL = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")


class Tuned(NamedTuple):
    """What a tuner has found: a configuration per key, and the lock under which another one is looked for."""
    chosen: dict[Any, Any]
    lock: threading.RLock


def autotune(
    configs: list[Any],
    key: list[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None,
    restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    deterministic: str | None = None,
    **options: Any,
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
                raise ValueError(f"{what}: got {', '.join(map(repr, unknown))}, need names of arguments of "
                                 f"{_name(fn)}: {', '.join(fn.arg_names)}")
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


def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``Autotuner.run``: the kernel with the configuration for these arguments, which may have to
    be found first."""
    given = dict(zip(tuner.arg_names, args, strict=False))
    if len(tuner.configs) > 1:
        state = tuner.__dict__.get("flashlin") or tuner.__dict__.setdefault("flashlin",
                                                                            Tuned({}, threading.RLock()))
        key = _key_of(tuner, {**given, **kwargs})
        config = state.chosen.get(key)
        if config is None:
            with state.lock:
                config = state.chosen.get(key)
                if config is None:
                    config = state.chosen[key] = tuner.cache[key] = _found(tuner, key, given, args, kwargs)
    else:
        config = tuner.configs[0]
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**given, **kwargs, **config.all_kwargs()})
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


_wanted: dict[str, Callable[[], bool]] = {}
_put: list[tuple[Any, Any]] = []  # ours in the place of Autotuner.run, and what was there
_hooking = threading.Lock()


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
    found = getattr(tuner, by_name, None)
    return list(found) if found is not None else [tuner.arg_names[at] for at in getattr(tuner, by_position)]


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


def _found(tuner: Any, key: tuple[Any, ...], given: dict[str, Any], args: tuple[Any, ...],
           kwargs: dict[str, Any]) -> Any:
    """The configuration for a key: found here, or by rank 0 of the job."""
    twice = kwargs.keys() & {name for config in tuner.configs for name in config.kwargs}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))}: given in the call to {_name(tuner)} and by a "
                         "configuration, need one of the two")
    tuner.nargs = given  # prune_configs of every release reads it
    try:
        pruned = list(tuner.prune_configs(kwargs))
    finally:
        tuner.nargs = None
    how = tuner.__dict__.get("flashlin_deterministic") or policy.current().autotune
    tune = partial(_tune, tuner, key, pruned, how == "first", given, args, kwargs)
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


def _tune(tuner: Any, key: tuple[Any, ...], pruned: list[Any], first: bool, given: dict[str, Any],
          args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fastest of the configurations that work, measured, or read from disk where the tuner is told to
    keep its results there."""
    if first or not getattr(tuner, "cache_results", False):
        return _measured(tuner, pruned, first, given, args, kwargs)
    written = tuple(map(str, key))  # it is written down as JSON

    def measure() -> None:
        tuner.cache[written] = _measured(tuner, pruned, first, given, args, kwargs)
    tuner.check_disk_cache(written, pruned, measure)
    return tuner.cache.pop(written)


def _measured(tuner: Any, pruned: list[Any], first: bool, given: dict[str, Any], args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Any:
    """The fastest, or the first, one at a time. Raises the first configuration's error where none works."""
    errors = list[Exception]()
    for together in [[config] for config in pruned] if first else [pruned]:
        configs, seconds = _compiling(tuner, together, errors, args, kwargs), dict[Any, float]()
        if len(configs) == 1 and not first:
            tuner.configs_timings = {configs[0]: 0.0}
            return configs[0]
        for config in configs:
            try:
                timed = _timed(tuner, config, first, given, args, kwargs)
            except Exception as error:  # told, and raised if no configuration is left
                errors.append(error)
                if type(error).__name__ not in USUAL:
                    _tell(f"{_name(tuner)}: configuration {config} fails ({type(error).__name__}: {error})")
            else:
                seconds[config] = timed[0] if isinstance(timed, (list, tuple)) else timed
        if seconds:
            best = min(seconds, key=lambda config: seconds[config])
            _reset(tuner, {**given, **kwargs, **best.all_kwargs()}, args, reset_only=True)
            tuner.configs_timings = seconds
            return best
    raise errors[0] if errors else ValueError(
        f"{_name(tuner)}: prune_configs_by leaves no configuration, need one at least")


def _compiling(tuner: Any, configs: list[Any], errors: list[Exception], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> list[Any]:
    """Those of the configurations that a child has compiled, and did not end."""
    found = list[Any]()
    for config, result in _compiled(tuner, configs, args, kwargs):
        if result is None or result.status not in ("abort", "timeout", "not tried"):
            found.append(config)
        else:
            why = f"{result.status}: {result.cause or result.message}"
            what = "could not be compiled ahead" if result.status == "not tried" else "ends the compiler"
            errors.append(RuntimeError(f"{_name(tuner)}: configuration {config} {what} ({why})"))
            _tell(errors[-1])
    return found


def _tell(why: object) -> None:
    warnings.warn(f"{why}; it is left out", stacklevel=2)


def _timed(tuner: Any, config: Any, first: bool, given: dict[str, Any], args: tuple[Any, ...],
           kwargs: dict[str, Any]) -> Any:
    """Milliseconds, by the timer of the release; 0 where the first that works is taken. The user's hooks are
    called as that release does."""
    full = {**given, **kwargs, **config.all_kwargs()}
    ours = not _own(tuner.pre_hook) and not _own(tuner.post_hook)
    kept = [full[name] for name in _names(tuner, "restore_value", "restore_idx") if ours
            and full.get(name) is not None]

    def call() -> None:
        if config.pre_hook:
            config.pre_hook(full)
        copies = [tensor.clone() for tensor in kept]
        _reset(tuner, full, args)
        failed: Exception | None = None
        try:
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        except Exception as error:
            failed = error
            raise
        finally:
            for tensor, before in zip(kept, copies, strict=True):
                tensor.copy_(before)
            if _own(tuner.post_hook):
                tuner.post_hook(_told(tuner, full, args), exception=failed)
    if first:
        call()
        return 0.0
    timer = getattr(tuner, "do_bench", None)
    if timer is not None:
        return timer(call, quantiles=(0.5, 0.2, 0.8))
    import triton.testing
    if tuner.use_cuda_graph:
        return triton.testing.do_bench_cudagraph(call, rep=tuner.num_reps, return_mode="median")
    return triton.testing.do_bench(call, warmup=tuner.num_warmups, rep=tuner.num_reps,
                                   quantiles=(0.5, 0.2, 0.8))


def _reset(tuner: Any, full: dict[str, Any], args: tuple[Any, ...], **how: bool) -> None:
    """Before a launch whose result counts, in tuning or after it: the user's hook, or what reset_to_zero
    names."""
    if _own(tuner.pre_hook):
        tuner.pre_hook(_told(tuner, full, args), **how)
        return
    for name in _names(tuner, "reset_to_zero", "reset_idx"):
        if full.get(name) is not None:
            full[name].zero_()


def _told(tuner: Any, full: dict[str, Any], args: tuple[Any, ...]) -> Any:
    """What a hook is handed: arguments by name from Triton 3.2 on, by position before."""
    return full if hasattr(tuner, "keys") else args


def _own(hook: Any) -> bool:
    """Whether a hook is the user's, not what Triton makes of reset_to_zero and restore_value."""
    return not getattr(hook, "__qualname__", "").startswith("Autotuner.__init__.")


def _benchmark(call: Callable[[], None], quantiles: Any) -> Any:
    from triton.runtime import driver
    return driver.active.get_benchmarker()(call, quantiles=quantiles)


def _compiled(tuner: Any, configs: list[Any], args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Iterator[tuple[Any, Result | None]]:
    """Each configuration compiled in a child first; None where that is not done. What a child compiles lies
    in Triton's cache afterwards."""
    device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)),
                  None)
    target = None if device is None else probe(device)
    if target is None or target.backend != "cuda" or not hasattr(os,
                                                                 "fork") or policy.current().policy == "off":
        yield from ((config, None) for config in configs)
        return
    from flashlin.testing.compile import forked
    sm = 10 * target.capability[0] + target.capability[1]
    works = [partial(_compile, tuner, args, {**kwargs, **config.all_kwargs(), "warmup": True}, sm)
             for config in configs]
    results = dict(forked(works, min(os.cpu_count() or 1, CHILDREN), CHILD_SECONDS))
    # Where no child ends at all, forking is what fails: a lock that another thread held. Where none can try,
    # the machine.
    stuck = all(result.status in ("timeout", "not tried") for result in results.values())
    yield from ((config, None if stuck else results[number]) for number, config in enumerate(configs))


def _compile(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sm: int, folder: Path) -> Result:
    """In the child. An exception is no reason to leave a configuration out: it is met again, and caught,
    where it is timed."""
    from triton.runtime import driver

    from flashlin.testing.compile import Driver, Result
    driver.set_active(Driver(sm))
    try:
        tuner.fn.run(*args, **kwargs)
    except Exception as error:
        return Result("exception", f"{type(error).__name__}: {error}"[:2000])
    return Result("ok")
