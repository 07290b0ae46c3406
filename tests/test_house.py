"""The figures of order get no worse: tools/house.py on this checkout, and on one in which all is known."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Upper bounds: what was true when they were written. What gets better gets a new bound.
FIGURES = {"root files": 7, "custom ops": 3, "positional": 0, "undocumented": 0, "fp32": 4,
           "releases": 9, "width": 0.3}
WALKS = {"a known issue": 4, "a remedy": 5, "a check": 1, "a limit": 1, "a scalar": 8, "an op": 7,
         "a Triton release": 1}


def house(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "house.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def counted(*arguments: object) -> dict[str, Any]:
    done = house("--json", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return counted()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_keeps_its_bound(name: str, here: dict[str, Any]) -> None:
    assert here["figures"][name] <= FIGURES[name], f"python tools/house.py --where {name!r}"


@pytest.mark.parametrize("thing", WALKS)
def test_a_walk_keeps_its_bound(thing: str, here: dict[str, Any]) -> None:
    [walk] = [walk for name, walk in here["walks"].items() if name.startswith(thing)]
    places = walk["places"]
    assert 1 <= len(places) <= WALKS[thing], f"ARCHITECTURE.md, 'Where a new thing goes': {', '.join(places)}"


def test_every_walk_leads_to_what_is_there(here: dict[str, Any]) -> None:
    assert not {thing: walk["missing"] for thing, walk in here["walks"].items() if walk["missing"]}


CODE = '''
import torch
import triton

RELEASES = ("3.6.0", "2.13", "not 3.6.0", "3.6.0.dev1")
TAPS = (3, 4)
OLD = release(RELEASES[0]) < (3, 4)
operator = torch.library.custom_op("one", None)(some(1, 2, 3, 4, 5, 6, 7, 8, 9, 0))
other = some(1, 2, 3, 4, 5, 6, 7, 8, 9, other=10)
lost = problem.dot == "fp32" or problem.dot == "16"


@triton.jit
def short(x):
    pass


@triton.jit
def long(x):
LINES


@triton.autotune([])
@triton.jit(noinline=True)
def told(x):
    """[x]."""
LINES
'''.replace("LINES", "\n".join(["    pass"] * 15))
ARCHITECTURE = """# A house
## Where a new thing goes
| thing | edit | run |
|---|---|---|
| a kernel | `kernels/*/recipe.py`, one of `OPS` in `dispatch.py`, a line of `tests/test_it.py` | writes `README.md` |
| a ruin | `nowhere.py`, `README.md` |

Then other things.
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    files = {"flashlin/__init__.py": "", "flashlin/dispatch.py": f"# {'x' * 109}\n",
             "flashlin/ops/some.py": CODE,
             "flashlin/kernels/some/recipe.py": "", "flashlin/compat/known_issues.py": "SINCE = '3.6.0'",
             "tests/test_it.py": "x = 1\n", "README.md": "", "ARCHITECTURE.md": ARCHITECTURE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_counted(small: Path) -> None:
    found = counted(small)
    lines = sum(len(path.read_text().splitlines()) for path in small.rglob("*.py"))
    assert found["figures"] == {"root files": 2, "custom ops": 1, "positional": 1, "undocumented": 1,
                                "fp32": 1, "releases": 3, "wide": 1, "width": round(100 / lines, 2)}
    assert found["walks"] == {
        "a kernel": {"places": ["kernels/*/recipe.py", "dispatch.py", "tests/test_it.py"], "missing": []},
        "a ruin": {"places": ["nowhere.py", "README.md"], "missing": ["nowhere.py"]}}


def test_what_is_counted_is_shown(small: Path) -> None:
    at = "flashlin/ops/some.py"
    line = CODE.splitlines().index("def long(x):") + 1
    expected = {"positional": [f"{at}:8 some(10)"], "undocumented": [f"{at}:{line} long"],
                "wide": ["flashlin/dispatch.py:1"],
                "releases": [f"{at}:7 (3, 4)", f"{at}:5 3.6.0", f"{at}:5 2.13"]}
    assert {name: house(small, "--where", name).stdout.splitlines() for name in expected} == expected
    text = house(small).stdout
    for line_shown in ("1  custom ops", "3  a kernel: kernels/*/recipe.py", "not there: nowhere.py"):
        assert line_shown in text


def test_help_teaches_and_a_wrong_folder_is_one_line(tmp_path: Path) -> None:
    said = house("--help").stdout
    assert "git archive" in said and "examples:" in said and "--where positional" in said
    done = house(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"house: got {tmp_path}, need a checkout, in which there is a folder flashlin\n"
