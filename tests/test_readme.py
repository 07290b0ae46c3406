"""The README tells the truth: its generated parts are what flashlin answers today, its Python runs, its
settings exist.

After a change of what the planner decides: ``python tests/test_readme.py --write``, and look at the
difference.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

import flashlin
from benchmarks import report
from flashlin.compat import releases
from flashlin.compat.target import USUAL_CARD, Target, parse
from flashlin.guards.problem import Plan, Problem
from flashlin.policy import CHOICES, ELSEWHERE, Policy

README = Path(__file__).resolve().parent.parent / "README.md"

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TRAINING = Problem("chunk_simple_gla", "simple_gla", "chunk", 8, 2048, 8, 128, 128, 8, "bfloat16",
                   needs_grad=True)


def outcome(plan: Plan) -> str:
    """What a plan comes to, in the table's words."""
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
    """The outcome on one machine; by dtype only where they differ."""
    found: dict[str, list[str]] = {}
    for dtype, short in DTYPES.items():
        found.setdefault(outcome(flashlin.plan(TRAINING._replace(dtype=dtype), target, Policy())),
                         []).append(short)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{' '.join(dtypes)}: {words}" for words, dtypes in found.items())


def ranges() -> dict[str, list[str]]:
    """Neighbouring releases between which no card sees a difference, as one column each."""
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
    """The table and the plot of benchmarks/report.py; until benchmarks/compare.py has been run, the table of
    an earlier script's records."""
    found = report.records()
    if not found:
        return earlier_speed()
    name = report.PLOT.relative_to(README.parent)
    return f"![the time of flashlin over that of others]({name})\n\n{report.table(found)}"


def earlier_speed() -> str:
    """Out of benchmarks/results/compare-fla-*.json: one row for each op and shape."""
    lines = ["| op | forward, ms | theirs | ratio | with backward, ms | theirs | ratio | first call, s |",
             "|---" * 8 + "|"]
    said = set()
    for file in sorted((README.parent / "benchmarks" / "results").glob("compare-fla-*.json")):
        record = json.loads(file.read_text())
        for row in record["rows"]:
            peer = "fla" if "fla" in row else "mamba_ssm"
            said.add(f"{record['device']}, Triton {record['triton']}, torch {record['torch']}, {peer} "
                     f"{record[peer]}, {record['date']}, "
                     f"B={row['B']} T={row['T']} H={row['H']} D={row['D']}")
            ours, theirs = row["flashlin"], row[peer]
            mark = "*" if row["guard_off"] is True and theirs.get("both_ms") else ""
            layout = ", channels last" if "channels_last" in row.get("arguments", "") else ""
            lines.append(f"| `{row['op']}`{layout} | {ours['forward_ms']:.3f} | {theirs['forward_ms']:.3f} | "
                         f"{row['ratio_forward']:.2f} "
                         f"| {ours['both_ms']:.2f} | {theirs['both_ms']:.2f}{mark} "
                         f"| {row['ratio_both']:.2f} | {record['first_call']['forward_s']:.1f} |")
    shape = ("bfloat16, both in one process: Mamba's scans beside mamba_ssm, all others beside fla; first "
             "call: chunk_simple_gla from empty caches.")
    return "\n".join([*lines, "",
                      f"{shape} *: fla refuses this backward here; its refusal was switched off for the "
                      "timing.", *sorted(said)])


GENERATED: dict[str, Callable[[], str]] = {"support table": support_table, "error": error_example,
                                           "speed": speed}


def between_markers(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated[^>]*-->\n)(.*?)(\n<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_part_is_current(name: str) -> None:
    found = between_markers(name).search(README.read_text())
    assert found, f"README.md has lost the markers of {name!r}"
    assert found[2] == GENERATED[name](), "run: python tests/test_readme.py --write"


def test_the_plot_is_current() -> None:
    drawn = report.plot(report.records())
    assert (report.PLOT.read_text() if report.PLOT.exists() else "") == drawn, (
        "run: python tests/test_readme.py --write")


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


def write() -> None:
    text = README.read_text()
    for name, made in GENERATED.items():
        text = between_markers(name).sub(lambda found, made=made: found[1] + made() + found[3], text)  # type: ignore[misc]
    README.write_text(text)
    if drawn := report.plot(report.records()):
        report.PLOT.write_text(drawn)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
