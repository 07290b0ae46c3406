"""Placeholder for ``fla.models``: importing it raises an error, because flashlin has no models.

A search for ``fla.models`` or a replacement of ``fla.`` by ``flashlin.`` leads here. flashlin has functions,
norms, a convolution, rotary embeddings and losses; fla's models can run on them.
"""
raise ImportError(
    "flashlin has no models of its own: keep `from fla.models import ...` (or `import fla.models`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's models run on flashlin's functions", name=__name__)
