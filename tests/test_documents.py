"""Tests of the generated pages of docs/: they match the tables, and contain the terms of searches."""
from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import flashlin
import flashlin.mamba
from flashlin.compat import known_failures
from flashlin.diagnostics import why
from flashlin.kernels.families import PUBLIC
from tools import documents, peers

DOCS = documents.DOCS


def test_the_index_of_failures_and_the_page_on_migration_are_current() -> None:
    for name, text in (("troubleshooting.md", documents.troubleshooting()["troubleshooting.md"]),
                       ("migration.md", documents.migration())):
        path = DOCS / name
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        assert found == text, "run: python -m tools.documents"


def test_the_pages_of_benchmarks_are_current() -> None:
    pages, folder = documents.report.pages(), DOCS / "benchmarks"
    assert {path.name for path in folder.glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (folder / name).read_text(encoding="utf-8") == text, "run: python -m tools.documents"


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("asked", [
    "reshapeOuts", "Unsupported conversion", "device-side assert", "invalid argument",
    "list index out of range", "map::at", "out of resource: shared memory", "PTXASError",
    "No module named 'selective_scan_cuda'", "0 active drivers", "illegal memory access"])
def test_a_search_lands_on_a_heading(asked: str) -> None:
    headings = [heading for text in documents.troubleshooting().values() for heading in sections(text)]
    assert [heading for heading in headings if asked in heading]


def test_every_failure_is_on_one_page_with_all_that_it_prints() -> None:
    grouped, pages = documents.groups(), documents.troubleshooting()
    assert [known.id for known in why.failures()] == sorted(
        (known.id for group in grouped.values() for known in group),
        key=[known.id for known in why.failures()].index)
    for group, members in grouped.items():
        parts = sections(pages[f"troubleshooting/{group}.md"])
        row = re.search(rf"troubleshooting/{group}.html.* \| (\d+) \|", pages["troubleshooting.md"])
        assert members and row and int(row[1]) == len(members)
        for known in members:
            for symptom in known.symptoms or known.asked:
                assert any(symptom in part and f"**{known.id}**" in part for part in parts.values()), known.id
            assert known.symptoms or known.asked or f"**{known.id}**" in parts["Nothing is printed"]
        headings = [documents.sorting(heading.strip("` ")) for heading in parts
                    if heading != "Nothing is printed"]
        assert headings == sorted(headings) and "Nothing is printed" not in list(parts)[:-1]


def test_a_failure_more_makes_its_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    before = documents.troubleshooting()
    added = replace(known_failures.KNOWN_FAILURES[0], symptoms=("never * seen",))
    monkeypatch.setattr(why, "KNOWN_FAILURES", (*known_failures.KNOWN_FAILURES, added))
    why.failures.cache_clear()
    after = documents.troubleshooting()
    why.failures.cache_clear()
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["troubleshooting.md", "troubleshooting/builds.md"]
    assert "`never * seen`" in after["troubleshooting/builds.md"]


def test_what_markdown_would_eat_is_shown() -> None:
    assert documents.plain("a <b> __shared__ x*y [c]`") == "a \\<b\\> \\_\\_shared\\_\\_ x\\*y \\[c\\]\\`"
    assert documents.code("Assertion `x`") == "`` Assertion `x` ``" and documents.code("a|b") == "`a|b`"


def test_the_lists_of_pages_on_how_flashlin_is_built_are_complete() -> None:
    pages = {path.name for path in (DOCS / "how").glob("*.md")}
    pointer = (documents.ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert set(re.findall(r"docs/how/([\w-]+\.md)", pointer)) == pages
    table = sections((DOCS / "how" / "index.md").read_text(encoding="utf-8"))["Pages"]
    assert set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", table, re.MULTILINE)) == pages - {"index.md"}


# --- public names of other packages ---

def test_the_record_is_what_the_installed_fla_says() -> None:
    folder = Path(str(metadata.distribution("fla-core").locate_file("")))
    version, names = peers.recorded()["fla"]
    assert metadata.version("fla-core") == version, "run: python -m tools.peers"
    assert sorted(peers.read("fla", folder)) == names and len(names) > 100


def test_the_record_has_all_that_flashlin_says_it_has_of_others() -> None:
    known = {package: {one.name for one in names} for package, (_, names) in peers.recorded().items()}
    assert set(flashlin.mamba.__all__) - known["mamba_ssm"] - known["causal_conv1d"] == {
        "RMSNormGated"}, "mamba_ssm's layers import RMSNorm under this name"
    ops = {name for name, op in PUBLIC.items() if name.startswith(("chunk_", "fused_", "parallel_"))}
    assert ops - known["fla"] == {"chunk_gdn", "fused_recurrent_gdn",  # in fla they are also only aliases
                                  "fused_recurrent_gated_delta_product"}, "only aliases or inside a layer of fla"


def test_every_name_of_others_is_here_or_has_a_reason() -> None:
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    for package, (_, names) in peers.recorded().items():
        assert [one.name for one in names if not re.search(rf"[.`]{one.name}`", page)] == [], package
    assert "`flashlin.chunk_gated_delta_product` (composed)" in page and "`flashlin.chunk_gla` |" in page
    assert documents.absent(["Mamba2", "chunk_gsa"]) == [
        ("`chunk_gsa`", "later", documents.ABSENT[0].why), ("`Mamba2`", "left out", documents.ABSENT[-1].why)]
    with pytest.raises(SystemExit, match="chunk_of_tomorrow matches no row of ABSENT"):
        documents.absent(["chunk_of_tomorrow"])


COMPOSED = {"chunk_gated_delta_product": "gated delta rule", "fused_recurrent_gated_delta_product":
            "gated delta rule", "mamba3_siso_combined": "simple GLA"}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_composed_says_of_what(name: str) -> None:
    """The docstring of an op that is built from another op names that op, because help() prints only it."""
    words = " ".join((getattr(flashlin, name).__doc__ or "").split())
    assert re.search(rf"Composed: [^.]*{COMPOSED[name]}", words), words[:300]


LATER = ("chunk_gsa", "chunk_abc", "parallel_based", "parallel_rebased", "chunk_lightnet", "RodimusAttention",
         "MomAttention", "chunk_precond_kda")
LEFT_OUT = ("parallel_attn", "parallel_nsa", "chunk_log_linear_attn", "chunk_mesa_net", "chunk_titans_linear",
            "chunk_ttt_linear", "fused_recurrent_rwkv4")


@pytest.mark.parametrize("name", LATER + LEFT_OUT)
def test_a_family_that_is_not_here_has_a_row_that_says_when_and_why(name: str) -> None:
    [row] = [line for line in documents.migration().splitlines() if f"`{name}`" in line]
    _, _, said, why, _ = row.split("|")
    assert said.strip() == ("later" if name in LATER else "left out") and len(why) > 20



def test_each_kind_of_difference_is_told() -> None:
    def ours(q: int, scale: float = 1.0, process_group: object = None, *, chunk_size: int = 64) -> None: ...

    def told(*parameters: tuple[str, str]) -> list[str]:
        return peers.differences(peers.Theirs("m", "f", parameters), ours)
    same = (("q", ""), ("scale", "1.0"), ("process_group", "None"), ("chunk_size", "64"))
    assert told(*same) == ["`process_group`: None only"]
    assert told(*same, ("**kwargs", "")) == told(*same)
    assert told(("q", ""), ("window", "None"), ("scale", "None"), ("chunk_size", "64")) == [
        "no `window`", "`scale=1.0`, theirs is `None`", "additional: `process_group`"]
    assert told(("scale", "1.0"), ("q", ""))[0] == "different order: pass arguments by name"


# --- issue forms and contributing ---

def test_the_form_for_failures_asks_for_doctor_and_has_fields_that_exist() -> None:
    folder = documents.ROOT / ".github" / "ISSUE_TEMPLATE"
    failure = (folder / "failure.yml").read_text(encoding="utf-8")
    asked = dict(re.findall(r"id: (\w+)\n.*?label: (.*?)\n", failure, re.DOTALL))
    assert asked["doctor"] == '"What `flashlin doctor --markdown` prints"' and set(asked) >= {"call", "output"}
    assert failure.count("required: true") == 3
    yaml = pytest.importorskip("yaml")
    for file in folder.glob("*.yml"):
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        for field in loaded.get("body", ()):
            assert field["type"] in ("markdown", "textarea", "input") and field["attributes"], file.name
        assert file.name == "config.yml" or {"name", "description", "body"} <= set(loaded)


def test_what_contributors_are_told_to_edit_is_there() -> None:
    text = (DOCS / "contributing.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:flashlin|matrix|tests|tools)/[\w./]+)`", text)
    assert len(paths) > 5 and not [path for path in paths if not (documents.ROOT / path).exists()]
    assert f"## {flashlin.__version__}" in (documents.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
