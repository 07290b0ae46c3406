"""Tests that the README is true: its generated sections are current, its Python runs, its settings exist.

After a change of the plans, run ``python -m tests.test_readme --write`` and review the diff.
"""
from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement

import flashlin
from benchmarks import report
from flashlin.__main__ import parser
from flashlin.compat import releases
from flashlin.compat.target import USUAL_CARD, Target, parse
from flashlin.diagnostics.why import matches
from flashlin.guards.plan_types import Plan, Problem
from flashlin.policy import CHOICES, ELSEWHERE, Policy
from matrix.__main__ import command_line

README = Path(__file__).resolve().parent.parent / "README.md"

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TRAINING = Problem("chunk_simple_gla", "simple_gla", "chunk", 8, 2048, 8, 128, 128, 8, "bfloat16",
                   needs_grad=True)


def outcome(plan: Plan) -> str:
    """Return the outcome of a plan in the words of the README's table."""
    if plan.refused:
        return "refused"
    if plan.path == "torch":
        return "torch path"
    details = [words for words, on in (("fp32 copies", plan.problem.dot == "fp32"),
                                       (f"{plan.problem.max_warps} warps",
                                        plan.problem.max_warps < plan.asked.max_warps),
                                       ("batch in parts", plan.problem.batch_part > 0)) if on]
    return "kernels" + (f" ({', '.join(details)})" if details else "")


def cell(target: Target) -> str:
    """Return the outcome on one machine; it is listed by dtype only if the dtypes differ."""
    found: dict[str, list[str]] = {}
    for dtype, short in DTYPES.items():
        found.setdefault(outcome(flashlin.plan(TRAINING._replace(dtype=dtype), target, Policy())),
                         []).append(short)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{' '.join(dtypes)}: {words}" for words, dtypes in found.items())


def ranges() -> dict[str, list[str]]:
    """Return the columns of the README's table, each with its releases.

    Consecutive releases with the same outcome on every GPU share one column.
    """
    def column(version: str) -> tuple[str, ...]:
        return tuple(cell(parse(f"triton={version},sm={major}{minor}")) for major, minor in USUAL_CARD)

    columns = {}
    for _, group in groupby((one.version for one in releases.RELEASES), key=column):
        members = list(group)
        ends = [minor(version) if set(releases_of(minor(version))) <= set(members) else version
                for version in (members[0], members[-1])]
        columns[" to ".join(dict.fromkeys(ends))] = members
    return columns


def minor(version: str) -> str:
    return version.rpartition(".")[0]


def releases_of(name: str) -> list[str]:
    return [one.version for one in releases.RELEASES if minor(one.version) == name]


def support_table() -> str:
    columns = ranges()
    rows: list[tuple[str, tuple[str, ...]]] = []
    for (major, minor), (card, _) in USUAL_CARD.items():
        rows.append((f"{card} (sm{major}{minor})",
                     tuple(cell(parse(f"triton={group[0]},sm={major}{minor}"))
                           for group in columns.values())))
    lines = ["| card | " + " | ".join(f"Triton {name}" for name in columns) + " |",
             "|---" * (len(columns) + 1) + "|"]
    for cells, group in groupby(rows, key=lambda row: row[1]):
        lines.append("| " + " | ".join([", ".join(name for name, _ in group), *cells]) + " |")
    elsewhere = {"An AMD GPU": "triton=3.7.1,backend=hip",
                 "a GPU with Triton missing, broken or older than 3.0": "triton=2.3.1,sm=90",
                 "a CPU": "triton=3.7.1,backend=cpu"}
    return "\n".join([*lines, "",
                      "; ".join(f"{name}: {cell(parse(target))}"
                                for name, target in elsewhere.items()) + "."])


def error_example() -> str:
    plan = flashlin.plan(TRAINING, parse("triton=3.2.0,sm=75", torch_version="2.6.0"),
                         Policy(policy="strict"))
    return f"```\nUnsupportedError: {flashlin.UnsupportedError(plan)}\n```"


def speed() -> str:
    """Return the README's section on speed: tables and plots of benchmarks/report.py, then older records.

    Older records come from an earlier script, for calls that benchmarks/compare.py has not measured yet.
    """
    name = report.PLOT.relative_to(README.parent)
    picture = f"![the time of flashlin over that of others]({name})"
    if report.CURVES.exists():
        picture += f"\n\n![losses of a small model]({report.CURVES.relative_to(README.parent)})"
    return f"{picture}\n\n{report.table(report.records())}\n\nMeasured earlier:\n\n{earlier_speed()}"


def earlier() -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Return (record, row, name of the compared package) for each older row that is not measured again yet.

    The rows come from benchmarks/results/compare-fla-*.json.
    """
    files = sorted(report.RESULTS.glob("compare-fla-*.json"))
    again = {named(row) for record in report.records() for row in record["rows"]}
    return [(record, row, "fla" if "fla" in row else "mamba_ssm") for record in
            (json.loads(file.read_text()) for file in files) for row in record["rows"]
            if named(row) not in again]


def named(row: dict[str, Any]) -> tuple[str, str]:
    """Return (op, note on the layout of its tensors), the key by which rows of records are compared."""
    return str(row["op"]), ", channels last" if "channels_last" in row.get("arguments", "") else ""


def drawn() -> str:
    return report.plot(report.records())


def earlier_speed() -> str:
    """Return a table of benchmarks/results/compare-fla-*.json with one row for each op and shape."""
    lines = ["| op | forward, ms | theirs | ratio | with backward, ms | theirs | ratio | first call, s |",
             "|---" * 8 + "|"]
    said = set()
    for record, row, peer in earlier():
        said.add(f"{record['device']}, Triton {record['triton']}, torch {record['torch']}, {peer} "
                 f"{record[peer]}, {record['date']}, B={row['B']} T={row['T']} H={row['H']} D={row['D']}")
        ours, theirs, (op, layout) = row["flashlin"], row[peer], named(row)
        mark = "*" if row["guard_off"] is True and theirs.get("both_ms") else ""
        lines.append(f"| `{op}`{layout} | {ours['forward_ms']:.3f} | {theirs['forward_ms']:.3f} | "
                     f"{row['ratio_forward']:.2f} | {ours['both_ms']:.2f} | {theirs['both_ms']:.2f}{mark} "
                     f"| {row['ratio_both']:.2f} | {record['first_call']['forward_s']:.1f} |")
    shape = ("bfloat16. Both packages ran in one process: mamba_ssm for Mamba's scans, fla for the others. First "
             "call: chunk_simple_gla from empty caches.")
    return "\n".join([*lines, "",
                      f"{shape} *: fla refuses this backward here; its refusal was switched off for the "
                      "timing.", *(f"- {one}" for one in sorted(said))])


GENERATED: dict[str, Callable[[], str]] = {"support table": support_table, "error": error_example,
                                           "speed": speed, "ranks": report.over_ranks,
                                           "invariance": report.of_invariance}


def between_markers(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated[^>]*-->\n)(.*?)(\n<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_part_is_current(name: str) -> None:
    found = between_markers(name).search(README.read_text())
    assert found, f"README.md has lost the markers of {name!r}"
    assert found[2] == GENERATED[name](), "run: python -m tests.test_readme --write"


PICTURES = {report.PLOT: drawn, report.CURVES: report.curves}


@pytest.mark.parametrize("place", PICTURES)
def test_a_picture_is_current(place: Path) -> None:
    assert (place.read_text() if place.exists() else "") == PICTURES[place](), (
        "run: python -m tests.test_readme --write")


def test_every_setting_and_choice_is_described() -> None:
    rows = {line.split("`")[1]: line
            for line in README.read_text().splitlines() if line.startswith("| `FLASHLIN_")}
    assert set(rows) == {f"FLASHLIN_{name.upper()}" for name in (*Policy._fields, *ELSEWHERE)}
    for field, choices in CHOICES.items():
        missing = [choice for choice in choices if f"`{choice}`" not in rows[f"FLASHLIN_{field.upper()}"]]
        assert not missing, f"FLASHLIN_{field.upper()}: README does not mention {missing}"


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    script = tmp_path / "readme.py"  # Triton reads a kernel's source from its file
    script.write_text("\n".join(blocks))
    search = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300,
                          check=False, env={**os.environ, "PYTHONPATH": search})
    assert done.returncode == 0, done.stderr


def test_files_the_readme_names_exist() -> None:
    named = re.findall(r"\]\(([\w./-]+)\)", README.read_text())
    assert named
    assert not [name for name in named if not (README.parent / name).exists()]


# --- commands ---

ROOT = README.parent
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md")),
         *sorted(ROOT.glob(".github/*/*.yml"))]
PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:pip install|python |flashlin |make |ruff |mypy|pytest |git )"
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
USERS = ("train.py", "program.py")  # names that stand for files of the reader


def commands(text: str) -> list[str]:
    """Return the shell commands of a page, from code blocks without a language and from inline code."""
    text = re.sub(r"^```\w+\n.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(rf"`({PROGRAM}[^`\n]*)`", text)
    return [line for block in blocks for line in block.splitlines() if re.match(PROGRAM, line)] + inline


def complaint(line: str) -> str:
    """Return why a printed command does not work in every shell in this folder; ``""`` if it works."""
    if special := re.findall(r"[\[\]*?$(){}~!;]", QUOTED.sub("", line.partition(" #")[0])):
        return f"a shell takes {special[0]} for something else: quote it"
    for simple in re.split(r" (?:&&|\|) ", line.replace(" 2>&1", "")):
        words = shlex.split(simple, comments=True)
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        try:
            if why := JUDGES[words[0]](words[1:]):
                return why
        except (KeyError, SystemExit, InvalidRequirement) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def of_pip(words: list[str]) -> str:
    optional = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", optional.partition("\n[")[0], re.MULTILINE)
    for word in words[1:]:
        if word.startswith("."):
            unknown = {name for name in word[1:].strip("[]").split(",") if name} - set(extras)
            if unknown:
                return f"no extra is called {', '.join(unknown)}"
        elif not word.startswith(("-", "https://")):
            Requirement(word)
    return ""


def of_python(words: list[str]) -> str:
    if words[:2] == ["-m", "flashlin"]:
        return of_flashlin(words[2:])
    if words[:2] == ["-m", "matrix"]:
        command_line().parse_args(words[2:])
        return ""
    if words[:2] == ["-m", "pytest"]:
        return of_files(words[2:])
    file = words[1].replace(".", "/") if words[0] == "-m" else words[0]
    there = [ROOT / f"{file}{ending}" for ending in ("", ".py", "/__main__.py")]
    return "" if file in USERS or any(path.is_file() for path in there) else f"{file} is not there"


def of_flashlin(words: list[str]) -> str:
    try:  # a sub-command without arguments is only its name, so --help replaces the required arguments
        parser().parse_args([*words, "--help"] if len(words) == 1 else words)
    except SystemExit as ended:
        return f"SystemExit: {ended.code}" if ended.code else ""
    return ""


def of_make(words: list[str]) -> str:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return "" if set(words) <= set(targets) else f"make has {', '.join(targets)}"


def of_files(words: list[str]) -> str:
    paths = [word.partition("=")[2] or word for word in words if not re.fullmatch(r"-\w+|check", word)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"{missing[0]} is not there" if missing else ""


JUDGES: dict[str, Callable[[list[str]], str]] = {
    "pip": of_pip, "python": of_python, "flashlin": of_flashlin, "make": of_make, "pytest": of_files,
    "ruff": of_files, "mypy": of_files, "git": lambda words: ""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_work_as_they_are_printed(page: Path) -> None:
    wrong = {line: why for line in commands(page.read_text(encoding="utf-8")) if (why := complaint(line))}
    assert not wrong


def test_there_are_commands_and_wrong_ones_are_noticed() -> None:
    found = commands(README.read_text(encoding="utf-8"))
    assert len(found) > 20 and 'pip install -e ".[matrix]"' in found
    assert "python -m matrix report" in " ".join(found)
    for line, why in {"pip install -e .[test,dev]": "quote it", "pip install -e '.[tests]'": "no extra",
                      "pip install torch --extra-index-url $TORCH_INDEX": "takes $", "make tests": "make has",
                      "flashlin doctr": "SystemExit", "python -m matrix run --cel 3.6.0 --frd": "SystemExit",
                      "python examples/train.py": "not there", "ls -l": "KeyError",
                      "mypy && pytest test": "test is not there", "pip install 'a b'": "InvalidRequirement"
                      }.items():
        assert why in complaint(line), line


def test_users_are_told_an_install_in_which_type_checkers_find_the_stubs() -> None:
    """The README's first install command is not editable, because type checkers cannot read such an install.

    The editable install by setuptools is an import hook, which type checkers do not run.
    """
    first = next(line for line in commands(README.read_text(encoding="utf-8")) if line.startswith("pip install"))
    assert shlex.split(first, comments=True) == ["pip", "install", "."]


def test_the_symptoms_at_the_top_are_those_of_known_failures() -> None:
    table = README.read_text(encoding="utf-8").partition("| on the screen |")[2].partition("\n\n")[0]
    shown = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(shown) == 5
    for symptom in shown:
        assert [match for match in matches(symptom) if "by the words" not in match.because], symptom


def write() -> None:
    text = README.read_text()
    for name, made in GENERATED.items():
        text = between_markers(name).sub(lambda found, made=made: found[1] + made() + found[3], text)  # type: ignore[misc]
    README.write_text(text)
    for place, made in PICTURES.items():
        if picture := made():
            place.write_text(picture)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
