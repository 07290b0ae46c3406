"""Cases of the rotary embedding.

They vary the number of rotated pairs, the columns that are not rotated, offsets (one, several, negative) and
packed sequences.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashlin
from flashlin.kernels.rotary.reference import rotate
from flashlin.testing.cases.inputs import Draw, Input, Maker
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.005}


def _cosines(draw: Draw, shape: str) -> Tensor:
    draw.kept["angles"] = 6.3 * draw.uniform(shape)
    return draw.kept["angles"].cos()


# R: rotated pairs. TR: rows of the tables. offsets: seqlen_offsets. bounds: dtype of cu_seqlens.
_make = Maker({"cos": Input("TR R", _cosines, "tables"),
               "sin": Input("TR R", lambda draw, _: draw.kept["angles"].sin(), "tables"),
               "x": Input("B T H D"),
               "seqlen_offsets": Input("N", lambda draw, _: torch.tensor(draw["offsets"]), when="offsets")},
              {"B": 2, "T": 35, "H": 3, "D": 32, "R": 16, "TR": 70, "tables": "same", "offsets": (),
               "bounds": torch.int32})


def call(x: Tensor, **given: Any) -> Tensor:
    """Call rotary_embedding; with ``inplace``, on a copy of x, because the op may then overwrite it."""
    # An in-place op may not write to a leaf.
    return flashlin.rotary_embedding(x * 1 if given.get("inplace") else x, **given)


_rotary = Op("rotary_embedding", _make, rotate, TOLERANCES, ("y",), {}, call, ("cos", "sin"))
PAIRS = {"interleaved": True}
CASES: list[Case] = [
    _rotary("random", quick=True), _rotary("interleaved", PAIRS), _rotary("partial", D=40, R=12),
    _rotary("partial-interleaved", PAIRS, D=41, R=13), _rotary("one-pair", D=3, R=1, H=5),
    _rotary("D=300", D=300, R=150, T=9), _rotary("D=1300", D=1300, R=600, T=5, H=2),
    _rotary("D=1300-interleaved", PAIRS, D=1300, R=650, T=5, H=2),
    _rotary("one-token", B=3, T=1, offsets=(0, 69, 7)), _rotary("many-heads", B=1, T=4, H=300, D=8, R=4),
    _rotary("one-head", B=1, T=70, H=1), _rotary("fp32-tables", tables="float32"),
    _rotary("offset", {"seqlen_offsets": 5}), _rotary("negative-offset", {"seqlen_offsets": -5}),
    _rotary("offsets", B=3, T=20, offsets=(3, -7, 50)), _rotary("in-place", {"inplace": True}),
    _rotary("in-place-partial", {"inplace": True, "interleaved": True}, D=40, R=12),
    _rotary("packed", B=1, T=50, edges=(0, 7, 7, 8, 50)),
    _rotary("packed-offsets", B=1, T=50, edges=(0, 7, 7, 8, 50), offsets=(60, 3, -1, 28)),
    _rotary("packed-one", B=1, T=33, edges=(0, 33), bounds=torch.int64), _rotary("no-tokens", T=0),
    _rotary("no-batch", B=0)]
