"""Tests of the support page: its embedded data, and that no text from the results can become HTML."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import matrix.page
from matrix.page import data, page
from matrix.results import Card, Cell, Matrix
from matrix.status import MEANS, STATUSES, Square

MATRIX = Matrix(card=(Card(name="sm75", example="T4", kind="gate"),
                      Card(name="gfx942", example="MI300", kind="report")),
                cell=(Cell(triton="3.0.0", kind="report"), Cell(triton="3.2.0", kind="gate"),
                      Cell(triton="3.10.0", kind="gate")))
SQUARES = [Square(op="gla", card="sm75", triton="3.2.0", status="worked around",
                  why=("bf16: copies", "K=256: 4 warps"), evidence="2 of 2", calls=9),
           Square(op="gla", card="gfx942", triton="3.10.0", status="compiled", evidence="2 of 2", calls=9),
           Square(op="conv", card="sm75", triton="3.0.0", status="FAILED", why=("K=256: 4 warps",), calls=1)]
HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--<script>", "\"'`&amp;\\", "</SCRIPT >", "{{data}}",
           "\u2028 é \x00", "$& $1 \\1"]


def embedded(html):
    """Return the page's embedded JSON data as a browser reads it: up to the first ``</script``."""
    text = re.split(r"</script", html.split('<script type="application/json" id="data">', 1)[1], maxsplit=1,
                    flags=re.IGNORECASE)[0]
    return json.loads(text)


def by_place(found):
    """Return the squares of the page's data by (op, triton, card), with texts instead of their numbers."""
    op, triton, card = ([item["name"] for item in found["axes"][axis]] for axis in ("op", "triton", "card"))
    at = {(o, t, c): found["squares"][(i * len(triton) + j) * len(card) + k]
          for i, o in enumerate(op) for j, t in enumerate(triton) for k, c in enumerate(card)}
    assert len(at) == len(found["squares"])
    return {place: (found["statuses"][status][0], calls, found["texts"][evidence],
                    [found["texts"][number] for number in why])
            for place, (status, calls, evidence, why) in at.items()}


def test_the_page_holds_the_data():
    assert embedded(page(MATRIX, SQUARES,
                         "2025-06-14")) == json.loads(json.dumps(data(MATRIX, SQUARES, "2025-06-14")))


def test_every_square_given_is_there():
    found = by_place(embedded(page(MATRIX, SQUARES, "")))
    for square in SQUARES:
        assert found[square.op, square.triton, square.card] == (square.status, square.calls, square.evidence,
                                                                list(square.why))


def test_every_combination_is_there_and_the_missing_are_not_run():
    found = by_place(data(MATRIX, SQUARES, ""))
    assert set(found) == {(op, cell.triton, card.name) for op in ("gla", "conv") for cell in MATRIX.cell
                          for card in MATRIX.card}
    for place in set(found) - {(square.op, square.triton, square.card) for square in SQUARES}:
        assert found[place] == ("not run", 0, "", [])


def test_order_and_kinds_are_the_matrix_own():
    axes = data(MATRIX, SQUARES, "")["axes"]
    assert [(item["name"], item["kind"]) for item in axes["triton"]] == [("3.0.0", "report"),
                                                                         ("3.2.0", "gate"), ("3.10.0",
                                                                                             "gate")]
    assert [(item["name"], item["note"], item["kind"]) for item in axes["card"]] == [("sm75", "T4", "gate"),
                                                                                     ("gfx942", "MI300",
                                                                                      "report")]
    assert [item["name"] for item in axes["op"]] == ["conv", "gla"]


def test_no_results_at_all():
    found = embedded(page(MATRIX, [], ""))
    assert found["squares"] == [] and len(found["axes"]["card"]) == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text):
    square = Square(op=f"op {text}", card="sm75", triton="3.2.0", status="FAILED", why=(text,), evidence=text)
    html = page(MATRIX, [square], text)
    assert by_place(embedded(html))[f"op {text}", "3.2.0", "sm75"] == ("FAILED", 0, text, [text])
    assert embedded(html)["date"] == text
    # The data adds no HTML element: the page has the same tags as one without squares.
    assert re.findall(r"<[!/a-zA-Z]", html) == re.findall(r"<[!/a-zA-Z]", page(MATRIX, [], ""))


def test_the_template_reads_data_as_text_only_and_loads_nothing():
    template = Path(matrix.page.__file__).with_name("page.html").read_text(encoding="utf-8")
    assert template.count("{{data}}") == 1
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|https?:|\bsrc=|url\(|@import", template)


def test_every_status_is_explained_and_coloured():
    assert list(MEANS) == list(STATUSES)
    template = Path(matrix.page.__file__).with_name("page.html").read_text(encoding="utf-8")
    assert all(f'[data-status="{status}"]' in template for status in STATUSES)


# --- drawing: node runs the script of the page on a fake document that only records changes ---

DOCUMENT = r"""
const fs = require('fs'), vm = require('vm');
class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, hidden: false }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener(type, listener) { this.listeners[type] = listener; }
  querySelector() { return null; }
  querySelectorAll() { return []; }
  focus() {}
  get textContent() { return this.children.map(child => child.textContent ?? child).join(' '); }
  set textContent(text) { this.children = [text]; }
  all(tag) {
    const below = this.children.flatMap(child => child.all ? child.all(tag) : []);
    return this.tag === tag ? [this, ...below] : below;
  }
}
const [html, hashes] = JSON.parse(fs.readFileSync(0, 'utf8')), known = {};
const get = id => known[id] ??= new Element(id);
const parts = html.split(/<script[^>]*>/);
get('data').textContent = parts[1].split('</script>')[0];
get('choice').elements = Object.fromEntries(['op', 'triton', 'card', 'q'].map(name => [name, { value: '' }]));
Object.assign(globalThis, { document: { getElementById: get, createElement: tag => new Element(tag) },
                            location: { hash: '' }, addEventListener: () => {}, FormData: class {} });
vm.runInThisContext(parts[2].split('</script>')[0]);
console.log(JSON.stringify(hashes.map(hash => {
  location.hash = hash;
  draw();
  const cells = get('heat').all('td').map(td => td.children[0]?.attributes['aria-label'] ?? td.textContent);
  const part = ({ attributes }) => [attributes['data-status'], attributes.style];
  const bars = get('heat').all('td').map(td => td.all('i').map(part));
  return { cells, bars, panel: get('panel').hidden ? '' : get('panel').textContent,
           links: get('panel').all('a').map(a => a.attributes.href).filter(href => !href.startsWith('#')) };
})));
"""


def drawn(squares, *hashes):
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    done = subprocess.run(["node", "-e", DOCUMENT], input=json.dumps([page(MATRIX, squares, "today"), hashes]),
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def square(op, status, *why, calls=2):
    return Square(op=op, card="sm75", triton="3.2.0", status=status, why=why, evidence="2 of 2", calls=calls)


MAP_AT = "bf16-pre-ampere-32: a kernel with 4 warps"
ANOTHER = MAP_AT.replace("a kernel", "another")
SEVERAL = [square("a", "ran"), square("b", "ran"),
           square("conv", "torch path", f"K=64: {MAP_AT}", f"K=128: {MAP_AT}"),
           square("d", "torch path", f"K=64: {ANOTHER}", "T=1: width: 9 columns")]


def test_a_place_of_many_ops_is_a_bar_of_all_of_them():
    [whole] = drawn(SEVERAL, "#all")
    at = whole["cells"].index("all ops, Triton 3.2.0, sm75: 2 ran, 2 torch path")
    assert whole["bars"][at] == [["ran", "flex-grow: 2"], ["torch path", "flex-grow: 2"]]
    assert "all ops, Triton 3.10.0, gfx942: 4 not run" in whole["cells"]


def test_a_text_leaves_the_places_that_have_it():
    by_op, by_reason, none = drawn(SEVERAL, "#q=CONV", "#q=9%20columns", "#q=nobody")
    of_op = [cell for cell in by_op["cells"] if "3.2.0, sm75" in cell]
    assert of_op == ["all ops, Triton 3.2.0, sm75: 1 torch path"]
    assert [cell for cell in by_reason["cells"] if cell] == ["all ops, Triton 3.2.0, sm75: 1 torch path"]
    assert not any(none["cells"])


def test_a_reason_is_told_once_with_all_that_meet_it_and_its_thread():
    everything, one = drawn(SEVERAL, "#at=/3.2.0/sm75", "#at=d/3.2.0/sm75")
    assert everything["panel"].count("bf16-pre-ampere-32: ptxas: Feature '.bf16' requires") == 1
    assert "3 calls of conv, d" in everything["panel"] and "4 warps" not in everything["panel"]
    assert everything["links"] == ["https://github.com/Lightning-AI/pytorch-lightning/issues/18070"]
    assert one["panel"].count(ANOTHER) == 1 and "1 call: T=1" in one["panel"]


def test_the_page_says_what_its_words_mean_and_leads_back():
    html = page(MATRIX, SEVERAL, "")
    assert "<b>required</b>" in html and "<b>informational</b>" in html and 'href="../docs/support/index.md"' in html
    assert 'href="index.html"' in page(MATRIX, SEVERAL, "", "index.html")
    assert 'href="#all"' in html and "javascript:" not in html


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


@pytest.mark.skipif(not BROWSER, reason="no chromium is installed: the page was not drawn")
def test_a_browser_draws_the_page(tmp_path):
    """A real browser runs the script of the page without an error and draws something.

    The screenshot is kept as ``build/support.png``.
    """
    def looked(html, *options):
        (tmp_path / "page.html").write_text(html, encoding="utf-8")
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                   f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,900", *options,
                   f"{(tmp_path / 'page.html').as_uri()}#at=/3.2.0/sm75"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    whole = page(MATRIX, SEVERAL, "today")
    picture = Path(__file__).resolve().parent.parent / "build" / "support.png"
    picture.parent.mkdir(exist_ok=True)
    drawn, errors = looked(whole, "--dump-dom", f"--screenshot={picture}")
    assert not errors and "3 calls of conv, d" in drawn and 'aria-label="all ops, Triton 3.2.0, sm75' in drawn
    empty, broken = looked(whole.replace("draw();\n</script>", "nothing();\n</script>"), "--dump-dom",
                           f"--screenshot={tmp_path / 'empty.png'}")
    assert broken and "3 calls of conv, d" not in empty
    assert picture.stat().st_size > 2 * (tmp_path / "empty.png").stat().st_size
