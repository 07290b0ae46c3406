"""Placeholder for ``fla.layers``: importing it raises an error, because flashlin has no layers.

A program imports it if every ``fla.`` in its source was replaced by ``flashlin.``. flashlin has functions,
norms, a convolution, rotary embeddings and losses; fla's layers can run on them.
"""
raise ImportError(
    "flashlin has no layers of its own: keep `from fla.layers import ...` (or `import fla.layers`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's layers run on flashlin's functions", name=__name__)
