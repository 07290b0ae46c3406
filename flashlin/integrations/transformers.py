"""``patch("transformers")``: flashlin's functions in the models of transformers.

The models bind functions of fla, mamba_ssm and causal_conv1d. Releases of transformers bind them in three
ways, and a release may use two of these ways. The contents of a modeling file show which way it uses:

- **decorated** (since 5.15): the torch function of a kernel has a decorator, which calls the package's
  function if that could be imported. The patch replaces the decorated function. With the package ``kernels``,
  the function is inside a module (a ``Func``), and the patch replaces the forward of that module.
- **globals** (before 5.15): the file has the functions as globals, which are None if the package is missing,
  and a flag. Delta rule layers copy the globals. If the file has a torch function for the same kernel, the
  patch replaces it as well.
- **loaded lazily** (5.0 to 5.14, Mamba): constructors of layers call ``lazy_load_kernel`` and write globals.
  ``lazy_load_kernel`` then returns a module of flashlin's functions. After the patch, these globals get the
  values that the constructors would have written.
"""
from __future__ import annotations

import dis
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from flashlin.compat.known_flaws import UNPATCHED
from flashlin.integrations.bindings import MISSING, free_variables, layers, named_like
from flashlin.integrations.patching import Patch, arrived

HUB, DYNAMIC = "transformers.integrations.hub_kernels", "transformers.dynamic_module_utils"
UNSLOTH = "unsloth_zoo.compiler"  # rewrites modeling files
# Modules that run modeling files without Python's import, so import hooks do not see these files. For each: its
# function that runs a file, and a function that returns the file's module from the result.
RUNS_FILES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    DYNAMIC: ("get_class_in_module", lambda kind: sys.modules.get(getattr(kind, "__module__", ""))),
    UNSLOTH: ("create_new_function", lambda module: module)}
FLAG, LAZY, CONV_CACHE = "is_fast_path_available", "lazy_load_kernel", "_causal_conv1d_cache"
# kernel -> names under which modeling files bind it
NAMES = {
    "chunk_gated_delta_rule": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule",
                                         "torch_recurrent_gated_delta_rule"),
    "chunk_kda": ("chunk_kda", "chunk_kimi_delta_attention"),
    "fused_recurrent_kda": ("fused_recurrent_kda", "recurrent_kimi_delta_attention"),
    "causal_conv1d_fn": ("causal_conv1d_fn",),
    "causal_conv1d_update": ("causal_conv1d_update",),
    "mamba_split_conv1d_scan_combined": ("mamba_split_conv1d_scan_combined",
                                         "mamba2_split_conv1d_scan_combined"),
    "mamba_chunk_scan_combined": ("mamba_chunk_scan_combined", "mamba2_chunk_scan"),
    "selective_state_update": ("selective_state_update", "mamba2_selective_state_update",
                               "mamba_selective_state_update"),
    "selective_scan_fn": ("selective_scan_fn", "mamba_selective_scan"),
    "mamba_inner_fn": ("mamba_inner_fn", "falcon_mamba_inner_fn"),
}
KERNEL = {name: kernel for kernel, names in NAMES.items() for name in names}
DISPATCHES = frozenset({"applicable_params", "implementation"})  # closure variables of a decorated function
# Models whose attention mixes documents. The models in INDEXED choose tokens by an index of their own. Models
# of transformers up to 5.1 with the method OWN_MASK make their own mask. With flash attention, the latter
# models keep documents apart.
INDEXED, OWN_MASK = ("Glm5Next",), "_update_causal_mask"
ACROSS = "its attention looks across documents"
MAKE_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
OLD = frozenset({FLAG, LAZY})
OF_INTEREST = {*KERNEL, FLAG, LAZY, CONV_CACHE}
LAZILY = ("causal-conv1d", "mamba-ssm", "falcon_mamba-ssm")  # packages that models load by lazy_load_kernel
# The module in which programs look for each kernel. If a package has a kernel in several modules, it is
# the one that transformers uses.
HOMES = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
    "recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",  # 5.15 looks for this name, which fla does not have
    "chunk_kda": "fla.ops.kda", "fused_recurrent_kda": "fla.ops.kda",
    "mamba_split_conv1d_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "mamba3_siso_combined": "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined",
    "selective_state_update": "mamba_ssm.ops.triton.selective_state_update",
    "selective_scan_fn": "mamba_ssm.ops.selective_scan_interface",
    "mamba_inner_fn": "mamba_ssm.ops.selective_scan_interface",
    "causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d"}


class Decorated(NamedTuple):
    """A decorated function in a modeling file.

    name: its name in the file.
    kernel: the kernel that it calls.
    owner: the function itself, or the module of ``kernels`` around it.
    torch: the model's own torch function.
    """
    name: str
    kernel: str
    owner: Any
    torch: Any


def decorated(module: ModuleType) -> Iterator[Decorated]:
    """Yield the decorated functions of a modeling file."""
    for name, owner in list(vars(module).items()):
        function = dispatching(owner)
        free = free_variables(function)
        kernel = KERNEL.get(free.get("func_name", ""), KERNEL.get(name, ""))
        if kernel and DISPATCHES <= free.keys():
            yield Decorated(name, kernel, owner, getattr(function, "__wrapped__", None))


def dispatching(value: Any) -> Any:
    """Return the function inside ``value`` that transformers' kernel decorator wraps, or ``value`` itself.

    It may be inside a module of ``kernels``, or inside wrappers of unsloth.
    """
    inner = value
    if hasattr(type(value), "kernel_layer_name") and not isinstance(value, type):
        inner = free_variables(type(value).forward).get("func")
    if type(inner) is not FunctionType:  # reading attributes of a lazy object would load its module
        return value
    inner = inspect.unwrap(inner, stop=lambda one: DISPATCHES <= free_variables(one).keys())
    return inner if DISPATCHES <= free_variables(inner).keys() else value


def reads(module: ModuleType) -> set[str]:
    """Return the names of ``OF_INTEREST`` that functions and methods of a module read as globals.

    ``OF_INTEREST`` has the names of kernels, and of the flag, the function and the cache that files use to
    find kernels.
    """
    mine = [one for one in vars(module).values()
            if isinstance(one, (FunctionType, type)) and one.__module__ == module.__name__]
    functions = [inspect.unwrap(part) for one in mine
                 for part in ([one] if isinstance(one, FunctionType) else vars(one).values())
                 if isinstance(part, FunctionType)]
    return {name for function in functions for name in _globals(function.__code__)}


def _globals(code: CodeType) -> Iterator[str]:
    if not OF_INTEREST.isdisjoint(code.co_names):  # a quick test, since co_names also has attributes
        yield from (one.argval for one in dis.get_instructions(code)
                    if one.opname == "LOAD_GLOBAL" and one.argval in OF_INTEREST)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _globals(part)


def is_modeling(name: str) -> bool:
    """Return True for the module name of a modeling file."""
    return name.rpartition(".")[2].startswith(("modeling_", "unsloth_compiled_module"))


class TransformersPatch(Patch):
    """The patch of transformers.

    It has two limits. Models that were compiled or exported before the patch keep the functions that were
    traced. A later ``kernelize`` with a mapping of the program replaces flashlin's functions by its kernels.
    """
    package = distribution = "transformers"
    watched = ("transformers", "transformers_modules", "unsloth_compiled_module*", "unsloth_zoo")

    def __init__(self) -> None:
        super().__init__()
        self._done: weakref.WeakSet[ModuleType] = weakref.WeakSet()
        self._in_layers: dict[tuple[str, str], Any] = {}  # (module, attribute of its layers) -> stand-in
        self._lazily: dict[str, ModuleType] = {}

    def begin(self) -> None:
        """Patch the loaded modeling files, and layers that are already built."""
        super().begin()
        if self._in_layers:
            self._see_layers(layers())

    def arrived(self, module: ModuleType) -> None:
        """Patch a modeling file that has been imported, or executed again."""
        self._done.discard(module)  # it may have been read while half imported, or was executed again
        super().arrived(module)

    def reads(self, name: str) -> bool:
        """Return True for a modeling file, or a module that loads kernels or runs modeling files."""
        return is_modeling(name) or name == HUB or name in RUNS_FILES

    def model(self, model: Any) -> None:
        """Patch the modeling files and layers of a model that is already built."""
        for name in {type(layer).__module__ for layer in model.modules()}:
            if name in sys.modules and not name.startswith("torch."):
                self.read(sys.modules[name])
        self.bindings.sweep()
        self._see_layers(model.modules())

    def end(self) -> None:
        """Undo the patch, and restore the globals that constructors of layers wrote meanwhile."""
        written = self._written()
        super().end()
        self._as_without(written)

    # --- find the bindings of a module ---

    def read(self, module: ModuleType) -> None:
        """Register a stand-in for each function of a module, and wrap its models and masks."""
        if module in self._done:
            return
        self._done.add(module)
        if module.__name__ == HUB:
            self._see_lazy_loading(module)
        elif module.__name__ in RUNS_FILES:
            self._see_runner(module, *RUNS_FILES[module.__name__])
        else:
            if kernels := self._see_decorated(module) or self._see_globals(module):
                # Files before 5.15 have FLAG or LAZY. Their layers drop keywords such as seq_idx.
                self._see_models(module, kernels, told=OLD.isdisjoint({*vars(module), *reads(module)}))
                self._see_masks(module)
            elif module.__name__.rpartition(".modeling_")[2] in UNPATCHED:
                self._see_models(module, kernels, told=False, mixes=(
                    "flashlin does not patch its recurrent layers, which do not know documents"))

    def _see_decorated(self, module: ModuleType) -> set[str]:
        found = list(decorated(module))
        for one in found:
            # The models accept None from a fused function, and continue on their unfused path.
            stand_in = stand_in_for(one.kernel, one.torch, module.__name__, one.name, takes_none=True)
            if isinstance(one.owner, FunctionType):
                self.bindings.swap(one.owner, stand_in, _by(one.kernel))
            else:
                self.bindings.stand(one.owner, "forward", stand_in, _by(one.kernel),
                                    f"{module.__name__}.{one.name}")
        return {one.kernel for one in found}

    def _see_globals(self, module: ModuleType) -> set[str]:
        read = reads(module)
        names = vars(module)
        wanted = [name for name in KERNEL if name in read and not name.startswith("torch_")
                  and not self.bindings.knows(names.get(name))]
        if not wanted or not (module.__name__.startswith("transformers") or read & {FLAG, CONV_CACHE}):
            return set()
        for name in wanted:
            kernel, original = KERNEL[name], names.get(name, MISSING)
            functions = [names[one] for one in NAMES[kernel] if isinstance(names.get(one), FunctionType)]
            # the file's torch function for this kernel
            own = next((one for one in functions if one.__module__ == module.__name__), None)
            if original is MISSING and LAZY in read:
                continue  # no layer has loaded it yet
            if own is not None and original in (own, None):
                stand_in = stand_in_for(kernel, own, module.__name__, own.__name__)
                self.bindings.swap(own, stand_in, _by(kernel))
            else:
                stand_in = stand_in_for(kernel, original, module.__name__, name)
                self.bindings.stands_for(stand_in, original)
            self.bindings.put(module, name, stand_in, _by(kernel))
            for attribute in NAMES[kernel]:
                self._in_layers[module.__name__, attribute] = stand_in
        if FLAG in names:
            self.bindings.put(module, FLAG, True, "True")
        if CONV_CACHE in names:
            pair = tuple(stand_in_for(kernel, None, module.__name__, kernel)
                         for kernel in ("causal_conv1d_update", "causal_conv1d_fn"))
            self.bindings.put(module, CONV_CACHE, pair, _by("causal_conv1d_fn"))
        return {KERNEL[name] for name in wanted}

    def _see_layers(self, some: Iterable[Any]) -> None:
        """Bind stand-ins to attributes of layers that are already built, in place of a function or None."""
        for layer in some:
            for name in vars(layer).keys() & KERNEL.keys():
                if (stand_in := self._in_layers.get((type(layer).__module__, name))) is not None:
                    self.bindings.put(layer, name, stand_in, _by(KERNEL[name]))

    def _see_lazy_loading(self, hub: ModuleType) -> None:
        known, loaded = getattr(hub, "_HUB_KERNEL_MAPPING", {}), getattr(hub, "_KERNEL_MODULE_MAPPING", None)
        for package in LAZILY if loaded is not None else ():
            if package in known:
                ours = ModuleType(f"flashlin, for {package}")
                for name in KERNEL:
                    stand_in = stand_in_for(KERNEL[name], None, ours.__name__, name)
                    self.bindings.stands_for(stand_in, None)
                    setattr(ours, name, stand_in)
                self.bindings.stands_for(ours, None)
                self.bindings.put(loaded, package, ours, "flashlin's functions",
                                  f"{HUB}._KERNEL_MODULE_MAPPING")
                self._lazily[package] = ours

    def _see_runner(self, module: ModuleType, name: str, module_of: Callable[[Any], Any]) -> None:
        if (original := getattr(module, name, None)) is None:
            return

        def run(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if isinstance(file := module_of(result), ModuleType) and file not in self._done:
                arrived(file)
            return result
        stand_in = named_like(run, original, signature=inspect.signature(original))
        self.bindings.stand(module, name, stand_in, "its own, watched for files that it runs")

    def _see_models(self, module: ModuleType, kernels: set[str], *, told: bool, mixes: str = "") -> None:
        from flashlin.integrations.documents import watched
        kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
        models = [one for one in vars(module).values()
                  if isinstance(one, type) and one.__module__ == module.__name__ and issubclass(one, kind)]
        own_mask = any(hasattr(one, OWN_MASK) for one in models)
        if own_mask or any(one.__name__.startswith(INDEXED) for one in models):
            mixes = ACROSS + ", unless it is flash attention with cu_seq_lens_q" * own_mask
        for one in models:
            forward = vars(one).get("forward")
            if isinstance(forward, FunctionType) and not self.bindings.knows(forward):
                ours = watched(forward, by_seq_idx="selective_scan_fn" not in kernels and told,
                               said=self.said, mixes=mixes, but_flash=own_mask)
                self.bindings.stand(one, "forward", ours, "its own forward, told of packed rows")

    def _see_masks(self, module: ModuleType) -> None:
        from flashlin.integrations.documents import masking
        for name in MAKE_MASKS:
            original = vars(module).get(name)
            if isinstance(original, FunctionType) and not self.bindings.knows(original):
                self.bindings.stand(module, name, masking(original), "its own, told of packed rows")

    # --- globals that constructors of layers wrote ---

    def _written(self) -> list[tuple[ModuleType, str, str]]:
        """Return (modeling file, global, package) of the stand-ins that constructors of layers wrote."""
        ours = {id(value): package for package, module in self._lazily.items()
                for value in (module, *(vars(module)[name] for name in KERNEL))}
        return [(module, name, ours[id(value)]) for module in list(sys.modules.values())
                if isinstance(module, ModuleType) and is_modeling(getattr(module, "__name__", ""))
                for name, value in list(vars(module).items()) if id(value) in ours]

    def _as_without(self, written: list[tuple[ModuleType, str, str]]) -> None:
        """Set these globals to the values that the constructors would have written without the patch."""
        for package in {package for _, _, package in written}:
            try:
                theirs = getattr(sys.modules[HUB], LAZY)(package, mapping={})  # fills the given mapping
            except Exception as error:  # the patch must also end if the hub does not answer
                warnings.warn(f"lazy_load_kernel({package!r}): {type(error).__name__}: {error}; models built "
                              "while transformers was patched use their torch path", RuntimeWarning,
                              stacklevel=2)
                theirs = None
            for module, name, of in written:
                if of == package:
                    setattr(module, name, _part(theirs, name) if name in KERNEL else theirs)
        for module in {module for module, _, _ in written}:
            if FLAG in vars(module):
                setattr(module, FLAG, all(vars(module)[name] for one, name, _ in written
                                          if one is module and name in KERNEL))


def stand_in_for(kernel: str, original: Any, module: str, name: str, takes_none: bool = False) -> Any:
    """Return the adapter of a kernel, with the name ``module.name``.

    original: the function that it replaces.
    takes_none: True if the caller accepts None from a fused function and continues without it.
    """
    from flashlin.integrations.adapters import ADAPTERS, UNFUSED
    adapter = ADAPTERS[kernel]
    function = UNFUSED.get(kernel, adapter) if takes_none else adapter
    stand_in = named_like(function, original, module, name, inspect.signature(adapter))
    stand_in.__flashlin_kernel__ = kernel
    return stand_in


def _by(kernel: str) -> str:
    return f"flashlin's {kernel}"


def _part(package: Any, name: str) -> Any:
    """Return a function of mamba_ssm or causal_conv1d, from the package or the module that defines it."""
    found = getattr(package, name, None)
    if callable(found) and not isinstance(found, ModuleType):
        return found
    for step in (*HOMES.get(name, "").split(".")[1:], name):
        package = getattr(package, step, None)
    return package
