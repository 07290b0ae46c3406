"""Tests that README.md and the pages of docs/ are true.

Generated sections are current, Python blocks run, commands work as printed, files and settings exist. After a
change of plans or records, run ``python -m tools.documents`` and review the diff.
"""
from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from flashlin.__main__ import parser
from flashlin.diagnostics import report
from flashlin.diagnostics.why import matches
from flashlin.policy import CHOICES, ELSEWHERE, Policy
from flashlin.trial.run import Trial, Tried
from matrix.__main__ import command_line
from tools import documents
from tools.sections import SECTIONS, between_markers

ROOT = documents.ROOT
README, SETTINGS = ROOT / "README.md", ROOT / "docs" / "reference" / "settings.md"
PAGES = [README, *sorted(ROOT.glob("docs/**/*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- generated sections and pictures ---

@pytest.mark.parametrize("name", SECTIONS)
def test_generated_part_is_current(name: str) -> None:
    page = SECTIONS[name].page
    found = between_markers(name).search(read(ROOT / page))
    assert found, f"{page} has lost the markers of {name!r}"
    assert found[2] == SECTIONS[name].make(), "run: python -m tools.documents"


def test_a_marked_section_of_a_page_has_a_function() -> None:
    """A section that is not in SECTIONS, or is on another page, would never be compared."""
    marked = [(name, name_of(page)) for page in PAGES
              for name in re.findall(r"^<!-- end of (.+) -->$", read(page), re.MULTILINE)]
    assert sorted(marked) == sorted((name, one.page) for name, one in SECTIONS.items())


@pytest.mark.parametrize("place", documents.PICTURES, ids=name_of)
def test_a_picture_is_current(place: Path) -> None:
    assert (place.read_text() if place.exists() else "") == documents.PICTURES[place](), (
        "run: python -m tools.documents")


# --- size ---

def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= 14 * 1024
    tables = re.findall(r"(?:^\|.*\n)+", read(README), re.MULTILINE)
    assert max(table.count("\n") - 2 for table in tables) <= 12  # without the header and the line below it
    assert len(re.findall(r"!\[", read(README))) <= 1


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_that_people_write_is_at_most_20_kb(page: Path) -> None:
    text = read(page)
    written = re.sub(r"<!-- (.+): generated.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    assert len(written.encode()) <= 20 * 1024 or "generated" in text[:400].lower()


# --- settings ---

def test_every_setting_and_choice_is_described() -> None:
    rows = {line.split("`")[1]: line for line in read(SETTINGS).splitlines() if line.startswith("| `FLASHLIN_")}
    assert set(rows) == {f"FLASHLIN_{name.upper()}" for name in (*Policy._fields, *ELSEWHERE)}
    for field, choices in CHOICES.items():
        missing = [choice for choice in choices if f"`{choice}`" not in rows[f"FLASHLIN_{field.upper()}"]]
        assert not missing, f"FLASHLIN_{field.upper()}: {SETTINGS.name} does not mention {missing}"


# --- the command line ---

CLI = ROOT / "docs" / "reference" / "cli.md"
[SUBCOMMANDS] = [one.choices for one in parser()._actions if isinstance(one, argparse._SubParsersAction)]


def of_command(name: str) -> str:
    """Return the section of cli.md on a command."""
    return read(CLI).partition(f"\n## flashlin {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_command_is_described_with_its_options_examples_and_exit_codes(name: str) -> None:
    section = of_command(name)
    options = {option for action in SUBCOMMANDS[name]._actions for option in action.option_strings
               if option not in ("-h", "--help")}
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `-")]
    assert {option for row in rows for option in re.findall(r"`(-+[\w-]+)", row)} == options
    examples = "".join(re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    assert len(re.findall(rf"^.*\bflashlin {name}\b", examples, re.MULTILINE)) >= 2
    codes = section.partition("**Exit codes.**")[2].partition("**JSON.**")
    assert codes[1] and re.search(r"\b2: ", codes[0])
    assert ("This command" not in codes[2]) == ("--json" in options)
    assert f"[`flashlin {name}`](#flashlin-{name})" in read(CLI)


def test_the_json_of_doctor_and_warmup_is_described() -> None:
    listed = {}
    for line in of_command("doctor").splitlines():
        if names := re.findall(r"`(\w+)`", line.split(" | ")[0]) if line.startswith("| `") else []:
            listed.update(dict.fromkeys(names, re.findall(r"`(\w+)`", line.split(" | ")[1])))
    fields, computed = report.Report.model_fields, report.Report.model_computed_fields
    assert {name for name in listed if not name.startswith("-")} == {*fields, *computed}
    for name, kind in {"devices": report.Device, "checks": report.Check, "plans": report.OpPlan,
                       "issues": report.Issue, "ran": report.Ran, "packages": report.Package,
                       "bindings": report.Binding, "flaws": report.Flaw, "advice": report.Advice}.items():
        assert listed[name] == list(kind.model_fields), name
    said = of_command("warmup").partition("**JSON.**")[2].partition("verdict is")[0]
    assert set(re.findall(r"`(\w+)`", said)) == {*Tried._fields, *Trial._fields}


# --- Python ---

# One process imports torch and flashlin, and then forks a child for each page: the imports take longer than most
# pages. It reads lines "script<tab>log" and answers with the exit code of the child.
RUNNER = """
import os, runpy, signal, sys, traceback
import flashlin, torch, triton
for line in sys.stdin:
    script, log = line.rstrip("\\n").split("\\t")
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(300)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(output, 2)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
"""
Run = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function that runs a script in a fresh process, and returns its exit code and output."""
    folder = tmp_path_factory.mktemp("pages")
    with subprocess.Popen([sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          cwd=ROOT) as runner:
        assert runner.stdin and runner.stdout
        stdin, stdout = runner.stdin, runner.stdout

        def run(text: str) -> tuple[int, str]:
            script, log = folder / "page.py", folder / "log"  # Triton reads a kernel's source from its file
            script.write_text(text, encoding="utf-8")
            log.unlink(missing_ok=True)
            stdin.write(f"{script}\t{log}\n")
            stdin.flush()
            return int(stdout.readline()), log.read_text(encoding="utf-8")
        yield run
        stdin.close()


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=name_of)
def test_python_of_a_page_runs(page: Path, run_script: Run) -> None:
    code, output = run_script("\n".join(python_of(page)))
    assert code == 0, output


def test_python_that_fails_is_noticed(run_script: Run) -> None:
    code, output = run_script("import flashlin\nflashlin.chunk_gla(1)")
    assert code == 1 and "TypeError" in output
    assert run_script("import sys\nprint(__name__)") == (0, "__main__\n")
    assert python_of(README) and python_of(ROOT / "docs" / "quickstart.md")


# --- links ---

def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")}), ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]*))?\)", text)
    for file, anchor in links:
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in headings(read(target)), f"{file}#{anchor}"
    assert links or page != README


# --- commands ---

WITH_COMMANDS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob(".github/*/*.yml"))]
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


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_work_as_they_are_printed(page: Path) -> None:
    wrong = {line: why for line in commands(read(page)) if (why := complaint(line))}
    assert not wrong


def test_there_are_commands_and_wrong_ones_are_noticed() -> None:
    assert 'pip install -e ".[test,dev]"' in commands(read(README)), "of a code block"
    assert "TEST_WHOLE=1 make test" in commands(read(README)), "of inline code"
    assert len([line for page in PAGES for line in commands(read(page))]) > 50
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
    first = next(line for line in commands(read(README)) if line.startswith("pip install"))
    assert shlex.split(first, comments=True) == ["pip", "install", "."]


def test_the_symptoms_at_the_top_are_those_of_known_failures() -> None:
    table = read(README).partition("| on the screen |")[2].partition("\n\n")[0]
    shown = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(shown) == 5
    for symptom in shown:
        assert [match for match in matches(symptom) if "by the words" not in match.because], symptom
