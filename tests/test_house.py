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
           "releases": 9, "width": 0.3, "run files": 4, "import cycles": 0, "code lines": 35_500}
STEPS = {"forward": 37, "forward with gradients": 37, "backward": 22}
WALKS = {"a known issue": 4, "a remedy": 3, "a check": 1, "a limit": 1, "a scalar": 5, "a tensor": 6,
         "an op": 5,
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


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return counted("--steps")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_keeps_its_bound(name: str, here: dict[str, Any]) -> None:
    assert here["figures"][name] <= FIGURES[name], f"python tools/house.py --where {name!r}"


@pytest.mark.parametrize("thing", WALKS)
def test_a_walk_keeps_its_bound(thing: str, here: dict[str, Any]) -> None:
    [walk] = [walk for name, walk in here["walks"].items() if name.startswith(thing)]
    places = walk["places"]
    assert 1 <= len(places) <= WALKS[thing], f"ARCHITECTURE.md, 'Where a new thing goes': {', '.join(places)}"


@pytest.mark.parametrize("row", STEPS)
def test_a_call_takes_no_more_steps(row: str, steps: dict[str, Any]) -> None:
    assert steps[row]["steps"] <= STEPS[row], steps[row]["path"]


def test_the_steps_lead_from_the_op_to_its_first_kernel(steps: dict[str, Any]) -> None:
    path = [one.rpartition(" ")[2] for one in steps["forward"]["path"]]
    assert {"chunk_simple_gla", "check_qkv"} <= {*path} and path[-1] == "start"


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
RUN = '''"""Three lines
that are
no code."""


# nor this one
def run():
    """Nor this."""
    text = """# it
    # is"""
'''
A = "class A:\n    def run(self):\n        import flashlin.b\n"
B = """
from typing import TYPE_CHECKING

import flashlin.ops.run
from flashlin import b
from flashlin.kernels import absent

if TYPE_CHECKING:
    from flashlin.a import A
"""
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
             "flashlin/ops/run.py": RUN, "flashlin/a.py": A, "flashlin/b.py": B,
             "tests/test_it.py": "x = 1\n", "README.md": "", "ARCHITECTURE.md": ARCHITECTURE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_counted(small: Path) -> None:
    found = counted(small)
    lines = sum(len(path.read_text().splitlines()) for path in small.rglob("*.py"))
    dropped = 1 + 1 + 3 + 1 + 1 + 1  # a comment, told's docstring; in RUN also the line that looks like one
    ours = sum(len(path.read_text().splitlines()) for path in (small / "flashlin").rglob("*.py"))
    assert found["figures"] == {
        "root files": 4, "custom ops": 1, "positional": 1, "undocumented": 1, "fp32": 1, "releases": 3,
        "wide": 1, "width": round(100 / lines, 2), "run files": 1, "import cycles": 1,
        "code lines": ours - dropped}
    assert found["walks"] == {
        "a kernel": {"places": ["kernels/*/recipe.py", "dispatch.py", "tests/test_it.py"], "missing": []},
        "a ruin": {"places": ["nowhere.py", "README.md"], "missing": ["nowhere.py"]}}


def test_what_is_counted_is_shown(small: Path) -> None:
    at = "flashlin/ops/some.py"
    line = CODE.splitlines().index("def long(x):") + 1
    expected = {"positional": [f"{at}:8 some(10)"], "undocumented": [f"{at}:{line} long"],
                "wide": ["flashlin/dispatch.py:1"], "run files": ["flashlin/ops/run.py"],
                "import cycles": ["flashlin.a flashlin.b"],
                "releases": [f"{at}:7 (3, 4)", f"{at}:5 3.6.0", f"{at}:5 2.13"]}
    assert {name: house(small, "--where", name).stdout.splitlines() for name in expected} == expected
    text = house(small).stdout
    for line_shown in ("1  custom ops", "3  a kernel: kernels/*/recipe.py", "missing: nowhere.py"):
        assert line_shown in text


PROGRAM = {
    "__init__.py": """
import torch
from flashlin.compat import launch
CACHE = {}

class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        launch.start(q)
        return q.clone()

    @staticmethod
    def backward(ctx, do):
        for _ in range(3):
            check(do)
        launch.start(do)
        return do

def check(x):
    return [size for size in x.shape]

def prepare(scale):
    return CACHE.setdefault("plan", scale) if "plan" in CACHE else plan(scale)

def plan(scale):
    CACHE["plan"] = scale

def chunk_simple_gla(q, k, v, g, *, scale):
    prepare(scale)
    for x in (q, k, v):
        check(x)
    return Op.apply(q), None
""",
    "compat/__init__.py": "",
    "compat/launch.py": """
def start(x):
    after(x)

def after(x):
    pass
""",
    "compat/target.py": """
def parse(text):
    return text
""",
    "testing/__init__.py": "",
    "testing/record.py": """
from contextlib import contextmanager

@contextmanager
def recording(target):
    yield []
"""}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    for name, text in PROGRAM.items():
        path = tmp_path / "flashlin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_steps_are_functions_of_a_warm_call_up_to_the_first_start(program: Path) -> None:
    found = counted("--steps", program)
    names = {row: [step.rpartition(" ")[2] for step in one["path"]] for row, one in found.items()}
    assert names == {
        "forward": ["chunk_simple_gla", "prepare", "check", "forward", "start"],
        "forward with gradients": ["chunk_simple_gla", "prepare", "check", "forward", "start"],
        "backward": ["backward", "check", "start"]}
    assert found["forward"]["path"][0].startswith("flashlin/__init__.py:")
    assert {name: found["forward"][name] for name in ("steps", "calls", "files", "folders")} == {
        "steps": 5, "calls": 7, "files": 2, "folders": 2}
    assert found["backward"]["calls"] == 5
    text = house("--steps", program).stdout
    assert "       5       7       2       2  forward\n" in text and "steps   calls" in text


def test_steps_of_a_call_that_starts_nothing_are_an_error(program: Path) -> None:
    (program / "flashlin/compat/launch.py").write_text("start = print\n")
    done = house("--steps", program)
    assert done.returncode == 1 and "no function `start` of compat/launch.py was called" in done.stderr


def test_help_teaches_and_a_wrong_folder_is_one_line(tmp_path: Path) -> None:
    said = house("--help").stdout
    assert "git archive" in said and "examples:" in said and "--where positional" in said
    done = house(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"house: got {tmp_path}, need a checkout, with a folder flashlin\n"
