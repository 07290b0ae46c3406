"""Store the configurations that other packages' autotuners choose, to skip the tuning on other machines."""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

FIELDS = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")
USUAL = {"num_ctas": 1, "maxnreg": None}  # defaults, which the file leaves out
# dtypes in the keys of tuners -> their short names in the file
SHORT = {'"torch.bfloat16"': '"bf16"', '"torch.float32"': '"fp32"', '"torch.float16"': '"fp16"',
         '"torch.int64"': '"int64"', '"torch.int32"': '"int32"'}


class Tuned(NamedTuple):
    """One autotuner, and the configurations that it got from the file.

    kernel: full name of the kernel.
    tuner: Triton's autotuner.
    given: configurations from the file, by the tuner's key.
    """
    kernel: str
    tuner: Any
    given: dict[Any, Any]


class Winners:
    """Gives the configurations of a file to every autotuner that is made later.

    ``write`` adds the choices that tuners make themselves. Import the packages after this object is made.

    Args:
        file: the file to read, if it exists. It is ignored if its ``made_by`` differs.
        made_by: GPU, and releases of Triton and of the package, for which a choice is valid.
        packages: packages whose autotuners get the configurations.

    Raises RuntimeError if one of the packages is already imported.
    """

    def __init__(self, file: Path, made_by: dict[str, Any], packages: tuple[str, ...] = ("fla",)) -> None:
        if early := [name for name in packages if name in sys.modules]:
            raise RuntimeError(f"winners: {', '.join(early)} has already made its tuners; import it later")
        self.file, self.made_by = file, made_by
        self.rows = self._read()
        self.tuned: list[Tuned] = []
        self._watch()

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        text = self.file.read_text(encoding="utf-8")
        for dtype, short in SHORT.items():
            text = text.replace(short, dtype)
        record = json.loads(text)
        if record["made_by"] != self.made_by:
            print(f"{self.file.name}: for {record['made_by']}, this is {self.made_by}; all is tuned again",
                  flush=True)
            return []
        return [{"kernel": kernel, "key": key, "config": config}
                for kernel, choices in record["winners"].items() for config, keys in choices for key in keys]

    def _watch(self) -> None:
        from triton.runtime.autotuner import Autotuner
        before = Autotuner.__init__

        def watched(tuner: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
            before(tuner, fn, *args, **kwargs)
            kernel = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
            given = {}
            for row in self.rows:
                config = next((one for one in tuner.configs if fields(one) == row["config"]), None)
                # the tuner's own configuration, which may have a hook
                if row["kernel"] == kernel and config is not None:
                    given[_key(row["key"])] = config
            tuner.cache.update(given)
            self.tuned.append(Tuned(kernel, tuner, given))
        Autotuner.__init__ = watched

    def found(self) -> list[dict[str, Any]]:
        """Return the choices that tuners made themselves because the file had none."""
        return [{"kernel": one.kernel, "key": list(key), "config": fields(config)}
                for one in self.tuned for key, config in one.tuner.cache.items() if key not in one.given]

    def write(self) -> None:
        """Write the file with the new choices. Choices that other processes wrote meanwhile are kept."""
        found = self.found()
        again = {(row["kernel"], _key(row["key"])) for row in found}
        rows = [row for row in self._read() if (row["kernel"], _key(row["key"])) not in again] + found
        rows.sort(key=lambda row: (row["kernel"], str(row["key"])))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        made_by, lines = json.dumps(self.made_by), ",\n ".join(map(compact, together(rows)))
        for dtype, short in SHORT.items():
            lines = lines.replace(dtype, short)
        self.file.write_text(f'{{"made_by": {made_by},\n"winners": {{\n {lines}\n}}}}\n', encoding="utf-8")


def together(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (kernel, choices); a choice is a configuration with all keys for which it was the fastest."""
    for kernel, of_one in groupby(rows, key=lambda row: row["kernel"]):
        choices: list[Any] = []
        for row in of_one:
            same = next((keys for config, keys in choices if config == row["config"]), None)
            if same is None:
                choices.append((row["config"], same := []))
            same.append(row["key"])
        yield kernel, choices


def compact(one: tuple[str, list[Any]]) -> str:
    """Return a kernel and its choices as an entry of a JSON object without blanks."""
    return ":".join(json.dumps(part, separators=(",", ":"), default=str) for part in one)


def fields(config: Any) -> dict[str, Any]:
    """Return a configuration in the form of the file."""
    found = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    return {name: value for name, value in found.items() if name not in USUAL or value != USUAL[name]}


def _key(value: Any) -> Any:
    """Return a tuner's key from JSON, with tuples instead of lists."""
    return tuple(map(_key, value)) if isinstance(value, list) else value
