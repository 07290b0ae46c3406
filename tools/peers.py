"""Signatures of the packages whose names flashlin shares, and their differences from ours.

    python -m tools.peers FOLDER ...     after a release of a package; the folders contain the sources

The signatures are read from the sources and stored in peers.json.
"""
from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flashlin
import flashlin.mamba
from flashlin.integrations.fla import NOT_FLA

RECORD = Path(__file__).with_suffix(".json")
# Files and folders with the public names of each package.
PACKAGES: dict[str, tuple[str, ...]] = {
    "fla": ("fla/ops", "fla/modules"),
    "mamba_ssm": ("mamba_ssm/ops/selective_scan_interface.py", "mamba_ssm/ops/triton/ssd_combined.py",
                  "mamba_ssm/ops/triton/selective_state_update.py", "mamba_ssm/ops/triton/layer_norm.py",
                  "mamba_ssm/ops/triton/layernorm_gated.py",
                  "mamba_ssm/ops/triton/mamba3/mamba3_siso_combined.py", "mamba_ssm/modules/mamba_simple.py",
                  "mamba_ssm/modules/mamba2.py", "mamba_ssm/modules/mamba3.py"),
    "causal_conv1d": ("causal_conv1d/causal_conv1d_interface.py", "causal_conv1d/causal_conv1d_varlen.py")}
FAMILIES = "fla/ops"  # each subfolder is a family, and exports more than the package re-exports
INTERNAL = re.compile(r"^naive_|_(ref|fwd|bwd|cache)$")  # exports of a family that are not public
NOT_PUBLIC = ("backends", "ascend", "tilelang", "gluon", "naive", "/cp", "_ref", "/utils")
LAYERS = ("Mamba", "Mamba2", "Mamba3")
ONLY_NONE = frozenset({"process_group"})  # we have these parameters only to say that they must be None


class Theirs(NamedTuple):
    """One public name of another package.

    module: the module that defines it.
    name: its name.
    parameters: (name, default) in order, with "" for no default. ``**`` precedes the name that collects
        keywords.
    """
    module: str
    name: str
    parameters: tuple[tuple[str, str], ...]


def ours(package: str) -> dict[str, Any]:
    """Return flashlin's public names that have the same meaning as the package's, with their objects."""
    home: Any = flashlin if package == "fla" else flashlin.mamba
    return {name: getattr(home, name) for name in home.__all__ if package != "fla" or name not in NOT_FLA}


# --- reading sources ---

def read(package: str, folder: Path) -> Iterator[Theirs]:
    """Yield the public names of a package.

    These are the names in ``__all__`` of its PACKAGES and of fla's families, the LAYERS of mamba_ssm, and
    functions and classes that have the same name as one of ours.

    folder: folder that contains the package's sources.
    """
    mine, exported = ours(package), set[str]()
    files = [file for place in PACKAGES[package]
             for file in sorted((folder / place).rglob("*.py") if "." not in place else [folder / place])
             if not any(part in file.as_posix() for part in NOT_PUBLIC)]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    for file, tree in trees.items():
        if file.name != "__init__.py":
            continue
        place = file.parent.relative_to(folder)
        if place.as_posix() in PACKAGES[package] or place.parent.as_posix() == FAMILIES:
            exported |= {name for node in tree.body if isinstance(node, ast.Assign)
                         and ast.unparse(node.targets[0]) == "__all__"
                         for name in ast.literal_eval(node.value) if not INTERNAL.search(name)}
    for file, tree in trees.items():
        module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                    node.name in mine or node.name in exported or is_layer(package, node)):
                yield Theirs(module, node.name, tuple(parameters(node)))


def is_layer(package: str, node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and package == "mamba_ssm" and node.name in LAYERS


def parameters(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ClassDef):
        begins = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        yield from list(parameters(begins[0]))[1:] if begins else []
        return
    every = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(every) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [*zip(every, defaults, strict=True),
             *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    yield from ((one.arg, ast.unparse(default) if default else "") for one, default in pairs)
    if node.args.kwarg:
        yield "**" + node.args.kwarg.arg, ""


# --- comparing ---

def differences(theirs: Theirs, mine: Any) -> list[str]:
    """Return how our function differs from the other package's function, as phrases for its callers.

    Keywords that the other function collects with ``**`` are ignored.
    """
    known = inspect.signature(mine).parameters
    names = [name for name, _ in theirs.parameters if not name.startswith("**")]
    lost = [name for name in names if name not in known]
    refused = [name for name in names if name in known and name in ONLY_NONE]
    more = [name for name, one in known.items()
            if name not in names and one.kind is not one.VAR_KEYWORD and one.kind is not one.VAR_POSITIONAL]
    shared, order = [name for name in names if name in known], [name for name in known if name in names]
    told = [f"no `{'`, `'.join(lost)}`"] if lost else []
    told += [f"`{'`, `'.join(refused)}`: None only"] if refused else []
    told += [f"`{name}={found}`, theirs is `{default}`" for name, default in theirs.parameters
             if name in known and default and (found := shown(known[name].default)) != same(default)]
    told += ["different order: pass arguments by name"] if shared != order else []
    told += [f"additional: `{'`, `'.join(more)}`"] if more else []
    return told


def shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "(required)"
    return default.__name__ if callable(default) else repr(default)


def same(default: str) -> str:
    """Return a default from source in the form that ``shown`` gives it."""
    literal = re.sub(r"float\(['\"](-?)inf['\"]\)", r"\g<1>1e999", default)
    try:
        return repr(ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        return default


def recorded() -> dict[str, tuple[str, list[Theirs]]]:
    """Return (version, public names) of each package, as stored in peers.json."""
    return {package: (one["version"], [Theirs(module, name, tuple((a, b) for a, b in given))
                                       for module, name, given in one["names"]])
            for package, one in json.loads(RECORD.read_text(encoding="utf-8")).items()}


def version_of(package: str, folder: Path) -> str:
    text = (folder / package / "__init__.py").read_text(encoding="utf-8")
    return next(str(ast.literal_eval(node.value)) for node in ast.parse(text).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__")


def main(folders: list[str]) -> None:
    found = {package: {"version": version_of(package, folder), "names": sorted(read(package, folder))}
             for package in PACKAGES for folder in map(Path, folders) if (folder / package).is_dir()}
    if set(found) != set(PACKAGES):
        raise SystemExit(f"tools.peers: found {', '.join(found) or 'nothing'}, need {', '.join(PACKAGES)}")
    lines = [f'"{package}": {{"version": {json.dumps(one["version"])}, "names": [\n'
             + ",\n".join(json.dumps(name, separators=(",", ":")) for name in one["names"]) + "]}"
             for package, one in found.items()]
    RECORD.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    print(f"wrote {RECORD.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
