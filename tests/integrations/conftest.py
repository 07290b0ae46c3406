"""Every test of patches must leave no patch behind."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from flashlin.integrations.bindings import is_stand_in

PACKAGES = ("fla", "transformers", "mamba_ssm", "causal_conv1d")
METHODS = ("forward", "prepare_inputs_for_generation")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check after each test that PACKAGES bind the same objects as before the test.

    Modules that the test imported must bind no stand-in. The check imports nothing.
    """
    before = bindings()
    yield
    monkeypatch.undo()  # else it would be undone after this check, because an earlier fixture also uses it
    after = bindings()
    loaded = {module for module, _ in after}
    changed = [place for place, value in before.items() if place[0] in loaded
               and after.get(place) is not value and not filled(value, after.get(place))]
    assert changed == [], "not put back"
    assert [place for place, value in after.items() if is_stand_in(value)] == [], "copied and kept"


def filled(before: Any, after: Any) -> bool:
    """Return True if the package itself has filled a cache that was None before."""
    return before is None and after is not None and not callable(after)


def bindings() -> dict[tuple[ModuleType, str], Any]:
    """Return the bindings of the loaded modules, and the class attributes that patches replace.

    A module that is loaded again counts as another module.
    """
    found: dict[tuple[ModuleType, str], Any] = {}
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] not in PACKAGES or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found[module, name] = value
            if isinstance(value, type) and value.__module__ == key:
                found |= {(module, f"{name}.{method}"): vars(value)[method] for method in METHODS
                          if method in vars(value)}
    return found
