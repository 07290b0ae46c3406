"""What tuners of other packages have found, as a file, so that on the next machine nothing is tuned again."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FIELDS = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")
USUAL = {"num_ctas": 1, "maxnreg": None}  # of nearly every configuration, so the file leaves it out


class Tuned(NamedTuple):
    """A tuner, and the keys whose configurations it was given."""
    kernel: str
    tuner: Any
    given: dict[Any, Any]


class Winners:
    """The configurations of a file go into every tuner that is made from now on; ``write`` adds what tuners
    have found themselves.

    Args:
        file: read where it is there, whose ``made_by`` has to be the same, or nothing of it is taken.
        made_by: card, releases of Triton and of the package: what a winner holds for.
        packages: whose tuners they are.

    Import the packages afterwards: RuntimeError if one of them is there already.
    """

    def __init__(self, file: Path, made_by: dict[str, Any], packages: tuple[str, ...] = ("fla",)) -> None:
        if early := [name for name in packages if name in sys.modules]:
            raise RuntimeError(f"winners: {', '.join(early)} has made its tuners already, import it later")
        self.file, self.made_by = file, made_by
        self.rows = self._read()
        self.tuned: list[Tuned] = []
        self._watch()

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        record = json.loads(self.file.read_text(encoding="utf-8"))
        if record["made_by"] != self.made_by:
            print(f"{self.file.name}: for {record['made_by']}, here is {self.made_by}: all is tuned anew",
                  flush=True)
            return []
        rows: list[dict[str, Any]] = record["winners"]
        return rows

    def _watch(self) -> None:
        from triton.runtime.autotuner import Autotuner
        before = Autotuner.__init__

        def watched(tuner: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
            before(tuner, fn, *args, **kwargs)
            kernel = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
            given = {}
            for row in self.rows:
                config = next((one for one in tuner.configs if fields(one) == row["config"]), None)
                if row["kernel"] == kernel and config is not None:  # the tuner's own, which may have a hook
                    given[_key(row["key"])] = config
            tuner.cache.update(given)
            self.tuned.append(Tuned(kernel, tuner, given))
        Autotuner.__init__ = watched

    def found(self) -> list[dict[str, Any]]:
        """What tuners found for themselves, since it was in no file."""
        return [{"kernel": one.kernel, "key": list(key), "config": fields(config)}
                for one in self.tuned for key, config in one.tuner.cache.items() if key not in one.given]

    def write(self) -> None:
        """The file, with what has been found since it was read; other processes' winners stay."""
        found = self.found()
        again = {(row["kernel"], _key(row["key"])) for row in found}
        rows = [row for row in self._read() if (row["kernel"], _key(row["key"])) not in again] + found
        rows.sort(key=lambda row: (row["kernel"], str(row["key"])))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n ".join(json.dumps(row, default=str) for row in rows)
        self.file.write_text(f'{{"made_by": {json.dumps(self.made_by)},\n"winners": [\n {lines}\n]}}\n',
                             encoding="utf-8")


def fields(config: Any) -> dict[str, Any]:
    """A configuration as the file has it."""
    found = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    return {name: value for name, value in found.items() if name not in USUAL or value != USUAL[name]}


def _key(value: Any) -> Any:
    """A tuner's key out of JSON, which has lists for tuples."""
    return tuple(map(_key, value)) if isinstance(value, list) else value
