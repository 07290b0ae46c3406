"""Placeholder for ``fla.layers``: importing it raises an error, because flashlin has no layers.

A search for ``fla.layers`` or a replacement of ``fla.`` by ``flashlin.`` leads here. flashlin has functions,
norms, a convolution, rotary embeddings and losses; fla's layers can run on them.
"""
raise ImportError(
    "flashlin has no layers of its own: keep `from fla.layers import ...` (or `import fla.layers`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's layers run on flashlin's functions", name=__name__)
