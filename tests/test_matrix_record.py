"""Tests of the child processes of scripts that run kernels on a GPU: their messages and how they end."""
from __future__ import annotations

from pathlib import Path

import pytest

from matrix import record


@pytest.mark.parametrize(("end", "ending", "code"), [
    ("", "", 0), ("print('{\"half\": ', end='')", "", 0), ("os.abort()", "ended by SIGABRT", -6),
    ("import time; time.sleep(60)", "gave no answer in 5 s and was ended", None)])
def test_a_child_says_what_it_has_found_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         end: str, ending: str, code: int | None) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trying.py").write_text("import os, sys\nprint('a word')\nprint('{\"found\": 1}', flush=True)\n"
                                        f"print(os.environ['PLACE'], sys.argv[1:], file=sys.stderr)\n{end}\n")
    child = record.child("trying", "--one", "x", seconds=5.0, PLACE="here")
    # The failure text continues with the child's last message.
    assert (child.messages, child.failure.partition(":")[0], child.code) == ([{"found": 1}], ending, code)
    assert "['--one', 'x']" in child.stderr or code is None
