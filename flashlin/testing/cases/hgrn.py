"""Cases of HGRN's recurrence.

They vary extreme decays, states, packed sequences, odd numbers of channels, and lengths near the size of a
block.
"""
from __future__ import annotations

from flashlin.kernels.hgrn.reference import recurrence
from flashlin.testing.cases.inputs import FLOAT32, Input, Maker, decays
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02}


# B, T, C: batch, tokens, channels. gate: kind of g. own: dtype of g.
_make = Maker({"g": Input("B T C", decays(), "own"), "x": Input("B T C"),
               "initial_state": Input("N C", dtype=FLOAT32, when="state")},
              {"B": 2, "T": 37, "C": 24, "gate": "random", "own": "same", "state": True})
_chunk, _token = (Op(name, _make, recurrence, TOLERANCES, {"o": "B T C", "ht": "N C"})
                  for name in ("chunk_hgrn", "fused_recurrent_hgrn"))
CASES: list[Case] = [
    _chunk("random", quick=True), _chunk("no-state", state=False, B=1), _chunk("g=0", gate="0"),
    _chunk("strong", gate="strong"), _chunk("resets", gate="resets"),
    _chunk("wide-gate", own="float32", T=20), _chunk("odd", C=37, T=17),
    _chunk("strips", B=1, C=130, T=16), _chunk("segments", B=1, T=300, C=20),
    _chunk("packed", edges=(0, 0, 5, 21, 22, 40)),
    _chunk("segments-packed", edges=(0, 3, 3, 420), C=16, gate="resets"),
    _chunk("no-sequence-but-empty-ones", edges=(0, 0, 0)), _token("random", quick=True, T=20),
    _token("resets", gate="resets"), _token("packed", edges=(0, 7, 7, 30)), _token("one-token", T=1, B=3)]
