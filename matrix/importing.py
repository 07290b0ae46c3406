"""Child process of a cell: import every module of flashlin and print the result as one JSON line.

    {"triton": release, "torch": release, "modules": number of modules, "wrong": list of problems}

A problem is a missing public name, a changed environment variable, or a new CUDA context.
"""
from __future__ import annotations

import importlib
import json
import os
import pkgutil

# The first is a program. Importing the other two raises an error that names the replacement.
NOT_IMPORTED = ("flashlin.__main__", "flashlin.layers", "flashlin.models")


def main() -> None:
    before = dict(os.environ)
    import torch

    import flashlin
    names = [name for _, name, _ in pkgutil.walk_packages(flashlin.__path__, "flashlin.")
             if name not in NOT_IMPORTED and ".testing" not in name]
    for name in names:
        importlib.import_module(name)
    missing = [name for name in flashlin.__all__ if not hasattr(flashlin, name)]
    import triton
    changed = sorted(name for name in set(before) | set(os.environ)
                     if before.get(name) != os.environ.get(name))
    wrong = [text for text in (missing and f"no {missing}", changed and f"environment changed: {changed}",
                               torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
                               and "a CUDA context was made") if text]
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__.partition("+")[0],
                      "modules": len(names), "wrong": wrong}))


if __name__ == "__main__":
    main()
