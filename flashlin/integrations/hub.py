"""flashlin as kernels of the package ``kernels``, in which models of transformers look kernels up by name.

Nothing is downloaded.
"""
from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

from torch import nn

from flashlin.integrations.adapters import ADAPTERS, UNFUSED
from flashlin.integrations.transformers import KERNEL, decorated, is_modeling


class Repository(NamedTuple):
    """A source of one kernel, with the interface that the package ``kernels`` expects of a repository.

    name: the name that models look up.
    """
    name: str

    def load(self) -> type[nn.Module]:
        """Return a module class without state whose forward calls flashlin's function.

        Its forward has the parameters of the models' own torch function. Raises LookupError if no loaded
        model looks up this name.
        """
        kernel = KERNEL[self.name]
        function = UNFUSED.get(kernel, ADAPTERS[kernel])
        theirs = next((one.torch for key, module in list(sys.modules.items()) if is_modeling(key)
                       for one in decorated(module) if one.kernel == kernel), None)
        if theirs is None:
            raise LookupError(f"{self.name}: no loaded model of transformers looks up this kernel")

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # compared by kernels
            [this, *inspect.signature(theirs).parameters.values()])
        return type(self.name, (nn.Module,), {"forward": forward, "can_torch_compile": True,
                                              "has_backward": True, "__module__": __name__})

    def __str__(self) -> str:
        return f"flashlin's {KERNEL[self.name]}"


def kernel_mapping() -> dict[str, dict[str, Repository]]:
    """Return a mapping for the package ``kernels``, with flashlin's functions for models of transformers.

    It covers every name that these models look up, on CPUs and GPUs, for inference, training and
    torch.compile. Use it in a block:

        with kernels.use_kernel_mapping(flashlin.kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING)

    Or add it to the mapping of transformers before ``model.set_use_kernels(True)``:

        mapping = transformers.integrations.hub_kernels.get_kernel_mapping_transformers()
        mapping.update(flashlin.kernel_mapping())

    It reaches models whose functions are modules of ``kernels``: those of transformers 5.15 to 5.22. It does
    nothing with transformers 5.23 and 5.24, which require kernels 0.18.2, while the newest release is 0.17.2.
    ``flashlin.patch("transformers")`` works with all these releases.
    """
    return {name: {device: Repository(name) for device in ("cpu", "cuda", "rocm")} for name in KERNEL}
