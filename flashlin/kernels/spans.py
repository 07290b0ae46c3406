"""Where the sequences of a batch lie: what the references share, which walk one sequence after another."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def spans_of(B: int, T: int, bounds: Iterable[int] | None) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, token after the last) of each sequence.

    B rows of T tokens are a sequence each; with bounds [N + 1], a list or a tensor, the one row holds
    sequence n in the tokens bounds[n] .. bounds[n + 1].
    """
    if bounds is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, first, end) for first, end in pairwise(map(int, bounds))]
