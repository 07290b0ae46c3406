"""Placeholder for ``fla.models``: importing it raises an error, because flashlin has no models.

A program imports it if every ``fla.`` in its source was replaced by ``flashlin.``. flashlin has functions,
norms, a convolution, rotary embeddings and losses; fla's models can run on them.
"""
raise ImportError(
    "flashlin has no models of its own: keep `from fla.models import ...` (or `import fla.models`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's models run on flashlin's functions", name=__name__)
