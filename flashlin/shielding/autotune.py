"""Drop-in replacement of ``triton.autotune`` without known defects of Triton's releases.

The tuner is Triton's own ``Autotuner`` with another ``run``. The differences are:

- Values of the key are looked up by name. Triton 3.0 and 3.1 look them up by position among the given
  arguments. This raises IndexError, or silently uses the value of another argument.
- Names in the key that are not arguments of the kernel are dropped with a warning. Triton 3.0, 3.1 and 3.9
  raise an error in the decorator.
- The GPU driver is not queried before the first call.
- A configuration that fails is dropped. A configuration that would abort the process aborts a child process
  instead.
- If two threads need the same key, one tunes and the other waits for its result.
- All ranks of a job can use the same configuration.
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

CHILDREN, CHILD_SECONDS = 16, 300  # child processes at a time, and the time limit of each
DETERMINISTIC = ("first", "rank0")
# Errors that are normal while tuning. No warning is printed for them, as in Triton.
USUAL = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")


class Tuned(NamedTuple):
    """Results of a tuner.

    chosen: the configuration for each key.
    lock: is held while a configuration for a new key is found.
    """
    chosen: dict[Any, Any]
    lock: ThreadLock


def autotune(configs: list[Any], key: list[str], prune_configs_by: dict[str, Any] | None = None,
             reset_to_zero: list[str] | None = None, restore_value: list[str] | None = None,
             pre_hook: Callable[..., Any] | None = None, post_hook: Callable[..., Any] | None = None,
             deterministic: str | None = None, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that tunes a Triton kernel as ``triton.autotune`` of the installed release does.

    The module's docstring and docs/guides/shield.md list the differences from Triton.

    Args:
        configs: as in ``triton.autotune``.
        key: names of arguments; new values of these arguments start a new tuning. They are names in all
            releases, including releases that look them up by position.
        prune_configs_by: as in ``triton.autotune``.
        reset_to_zero: names of tensor arguments that are zeroed before each launch of a tuning and once after
            it; None values are skipped.
        restore_value: names of tensor arguments that are restored after each timed launch; None values are
            skipped.
        pre_hook: as in ``triton.autotune``.
        post_hook: as in ``triton.autotune``.
        deterministic: makes all ranks of a job use the same configuration. ``"first"`` measures nothing and
            uses the first configuration that works, which is the same on the same GPU with the same Triton.
            ``"rank0"`` measures on rank 0, which sends the result to the others if torch.distributed is
            initialised. All ranks must then call the kernel for the same keys in the same order, because
            each new key is a collective operation of the default group. None uses the setting
            ``flashlin.settings(autotune=...)``, by default ``timed``: each process measures for itself.
            Processes may then find different configurations, whose results round differently.
        options: further keyword arguments of ``triton.autotune``.

    Warns about names in key that are not arguments of the kernel, and ignores them. Raises ValueError for
    such names in reset_to_zero or restore_value, because results would be wrong without them. Raises
    ValueError for an unknown ``deterministic``. With ``"rank0"``, a call raises RuntimeError if rank 0 found
    no configuration or tunes another kernel or key.
    """
    if deterministic not in (None, *DETERMINISTIC):
        raise ValueError(f"deterministic: got {deterministic!r}, need None, "
                         f"{' or '.join(map(repr, DETERMINISTIC))}")

    def decorate(fn: Any) -> Any:
        from triton.runtime.autotuner import Autotuner
        for what, names in (("reset_to_zero", reset_to_zero), ("restore_value", restore_value)):
            if unknown := _unknown(names, fn):
                raise ValueError(f"{what}: got {', '.join(map(repr, unknown))} as names of arguments of "
                                 f"{name_of(fn)}, {need_one_of(unknown[0], fn.arg_names)}")
        if unknown := _unknown(key, fn):
            warnings.warn(f"autotune: key names {', '.join(unknown)}, which are not arguments of "
                          f"{name_of(fn)}; they are left out", stacklevel=2)
        accepted = inspect.signature(Autotuner.__init__).parameters
        given, timer = dict(options), options.get("do_bench")
        if "do_bench" not in accepted:  # Triton 3.0 and 3.1 use the attribute that is set below
            given.pop("do_bench", None)
        elif timer is None and not {"warmup", "rep", "use_cuda_graph"} & given.keys():
            given["do_bench"] = _benchmark  # without a timer, 3.2 and 3.3 query the driver now
        tuner = Autotuner(fn, fn.arg_names, configs, [name for name in key or () if name not in unknown],
                          list(reset_to_zero or ()), list(restore_value or ()), pre_hook=pre_hook,
                          post_hook=post_hook, prune_configs_by=prune_configs_by, **given)
        if timer is not None:
            tuner.do_bench = timer
        tuner.flashlin_deterministic = deterministic
        return fixed(tuner)
    return decorate


def fixed(tuner: Any) -> Any:
    """Replace ``run`` of a tuner by this module's, clear its results, and return the tuner."""
    tuner.__dict__.pop("flashlin", None)
    tuner.run = types.MethodType(run, tuner)
    return tuner


def around(tuner: Any, fn: Any) -> Any:
    """Return a copy of a tuner that tunes ``fn`` instead of its own kernel."""
    another = copy.copy(tuner)
    another.fn, another.cache = fn, {}
    return fixed(another)


class Call(NamedTuple):
    """One call of a tuned kernel.

    tuner: Triton's ``Autotuner``.
    given: the positional arguments by name.
    args, kwargs: the arguments as passed.
    """
    tuner: Any
    given: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self, config: Any) -> dict[str, Any]:
        """Return all arguments by name, including the arguments that a configuration sets."""
        return {**self.given, **self.kwargs, **config.all_kwargs()}

    def start(self, config: Any) -> Any:
        """Launch the kernel with a configuration; return the result of the kernel's own ``run``."""
        return self.tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())


def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch a tuned kernel with the configuration for its arguments, after tuning if necessary.

    This function replaces ``Autotuner.run``.
    """
    call = Call(tuner, dict(zip(tuner.arg_names, args, strict=False)), args, kwargs)
    config = _chosen(call) if len(tuner.configs) > 1 else tuner.configs[0]
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook(call.named(config))
    return call.start(config)


def _chosen(call: Call) -> Any:
    """Return the configuration for the key of a call. Tune if necessary, in one thread at a time."""
    attributes = call.tuner.__dict__
    state = attributes.get("flashlin") or attributes.setdefault("flashlin", Tuned({}, ThreadLock()))
    key = _key_of(call.tuner, {**call.given, **call.kwargs})
    if key not in state.chosen:
        with state.lock:
            if key not in state.chosen:
                state.chosen[key] = call.tuner.cache[key] = _found(call, key)
    return state.chosen[key]


_wanted: dict[str, Callable[[], bool]] = {}
_put: list[tuple[Any, Any]] = []  # our replacement of Autotuner.run, and the original
_hooking = ThreadLock()


def hook(who: str, wanted: Callable[[], bool]) -> None:
    """Make every Triton autotuner use ``run`` of this module while ``wanted()`` returns True.

    who: a name for the request; ``unhook`` with the same name removes it.
    """
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
    """Undo ``hook(who)``. After the last undo, restore ``Autotuner.run``.

    If another package has replaced ``Autotuner.run`` since then, its replacement stays. If that replacement
    still calls our function, our function only calls the original.
    """
    from triton.runtime.autotuner import Autotuner
    with _hooking:
        _wanted.pop(who, None)
        if not _wanted and _put:
            ours, original = _put.pop()
            if Autotuner.run is ours:
                Autotuner.run = original


def _unknown(names: list[str] | None, fn: Any) -> list[str]:
    return [name for name in names or () if name not in fn.arg_names]


def name_of(kernel: Any) -> str:
    """Return the name of the Python function of a kernel."""
    return str(innermost(kernel).__name__)


def innermost(kernel: Any) -> Any:
    """Return the Python function of a kernel."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _names(tuner: Any, by_name: str, by_position: str) -> list[str]:
    """Return the argument names in one attribute of a tuner: key, reset_to_zero or restore_value.

    by_name: the attribute since Triton 3.2, which contains names.
    by_position: the attribute before 3.2, which contains positions in the kernel's signature.
    """
    names = getattr(tuner, by_name, None)
    return list(names) if names is not None else [tuner.arg_names[at] for at in getattr(tuner, by_position)]


def _key_of(tuner: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    names = tuner.__dict__.get("flashlin_key")
    if names is None:
        parameters = inspect.signature(innermost(tuner.fn)).parameters
        names = tuner.__dict__["flashlin_key"] = [
            (name, parameters[name].default)
            for name in _names(tuner, "keys", "key_idx") if name in parameters]
    values = [given.get(name, default) for name, default in names]
    dtypes = [(name, getattr(given.get(name), "dtype", None)) for name in tuner.arg_names]
    return (*values, *(pair for pair in dtypes if pair[1] is not None))


def _found(call: Call, key: tuple[Any, ...]) -> Any:
    """Find the configuration for a new key, in this process or on rank 0 of the job."""
    tuner = call.tuner
    twice = call.kwargs.keys() & {name for config in tuner.configs for name in config.kwargs}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))}: given in the call to {name_of(tuner)} and by a "
                         "configuration, need one of the two")
    if hasattr(tuner.fn, "check_device"):  # a shielded kernel; timing it would fail with a less clear error
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
        return _of_rank0(tune, f"{name_of(tuner)} for {key}", pruned)
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
        finally:  # the other ranks wait for the answer, also after an error
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
    """Return the fastest configuration that works, by measurement or from Triton's results on disk.

    The disk is used only if the tuner has ``cache_results`` set.
    first: return the first configuration that works instead.
    """
    tuner = call.tuner
    if first or not getattr(tuner, "cache_results", False):
        return _measured(call, pruned, first)
    written = tuple(map(str, key))  # the disk cache stores JSON

    def measure() -> None:
        tuner.cache[written] = _measured(call, pruned, first)
    tuner.check_disk_cache(written, pruned, measure)
    return tuner.cache.pop(written)


def _measured(call: Call, pruned: list[Any], first: bool) -> Any:
    """Return the fastest configuration that works.

    With ``first``, try the configurations in order and return the first that works. Raise the first error if
    no configuration works.
    """
    errors = list[Exception]()
    for together in [[config] for config in pruned] if first else [pruned]:
        configs, seconds = _compiling(call, together, errors), dict[Any, float]()
        if len(configs) == 1 and not first:
            call.tuner.configs_timings = {configs[0]: 0.0}
            return configs[0]
        for config in configs:
            try:
                timed = _timed(call, config, first)
            except Exception as error:  # warned about here; raised if no configuration works
                errors.append(error)
                if type(error).__name__ not in USUAL:
                    _tell(f"{name_of(call.tuner)}: configuration {config} fails "
                          f"({type(error).__name__}: {error})")
            else:
                seconds[config] = timed[0] if isinstance(timed, (list, tuple)) else timed
        if seconds:
            best = min(seconds, key=lambda config: seconds[config])
            _reset(call, call.named(best), reset_only=True)
            call.tuner.configs_timings = seconds
            return best
    raise errors[0] if errors else ValueError(
        f"{name_of(call.tuner)}: prune_configs_by leaves no configuration, need one at least")


def _compiling(call: Call, configs: list[Any], errors: list[Exception]) -> list[Any]:
    """Compile configurations in child processes, and return the configurations that do not abort their child.

    For each configuration that aborts its child, warn and append an error to ``errors``.
    """
    results = _compiled(call, configs)
    # If no child finishes, the fork itself has failed, for example on a lock that another thread held. If no
    # child can compile, the machine is the cause. In both cases no configuration is to blame.
    if all(result.status in ("timeout", "not tried") for result in results):
        return configs
    left = list[Any]()
    for config, result in zip(configs, results, strict=True):
        if result.status not in ("abort", "timeout", "not tried"):
            left.append(config)
            continue
        what = "could not be compiled ahead" if result.status == "not tried" else "ends the compiler"
        errors.append(RuntimeError(f"{name_of(call.tuner)}: configuration {config} {what} "
                                   f"({result.status}: {result.cause or result.message})"))
        _tell(errors[-1])
    return left


def _tell(why: object) -> None:
    warnings.warn(f"{why}; it is left out", stacklevel=2)


def _timed(call: Call, config: Any, first: bool) -> Any:
    """Return the time of a configuration in milliseconds, measured with the timer of the Triton release.

    The user's hooks are called as that release calls them. With ``first``, launch once and return 0.
    """
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
    """Call the user's pre_hook before a launch, or zero the tensors in reset_to_zero if there is no hook.

    how: further keyword arguments of the hook, such as Triton's ``reset_only``.
    """
    if _own(call.tuner.pre_hook):
        call.tuner.pre_hook(_told(call, named), **how)
        return
    for name in _names(call.tuner, "reset_to_zero", "reset_idx"):
        if named.get(name) is not None:
            named[name].zero_()


def _told(call: Call, named: dict[str, Any]) -> Any:
    """Return the arguments for a hook: by name since Triton 3.2, by position before."""
    return named if hasattr(call.tuner, "keys") else call.args


def _own(hook: Any) -> bool:
    """Return True if a hook is the user's, and not Triton's own for reset_to_zero or restore_value."""
    return not getattr(hook, "__qualname__", "").startswith("Autotuner.__init__.")


def _benchmark(call: Callable[[], None], quantiles: Any) -> Any:
    from triton.runtime import driver
    return driver.active.get_benchmarker()(call, quantiles=quantiles)


def _compiled(call: Call, configs: list[Any]) -> list[Result]:
    """Compile each configuration in a child process and return the results; the code goes to Triton's cache.

    The list is empty without fork, without a CUDA tensor, or with ``policy="off"``. Then nothing is compiled.
    """
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
    """Compile a configuration in the child process.

    An exception here does not drop the configuration. The same exception occurs again when the parent
    measures the configuration, and the parent handles it there.
    """
    from triton.runtime import driver

    from flashlin.testing.compile import Driver, Result
    driver.set_active(Driver(sm))
    try:
        call.tuner.fn.run(*call.args, **{**call.kwargs, **config.all_kwargs(), "warmup": True})
    except Exception as error:
        return Result("exception", f"{type(error).__name__}: {error}"[:2000])
    return Result("ok")
