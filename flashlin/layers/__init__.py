"""What a search for ``fla.layers`` and a replacement of ``fla.`` lead to: flashlin has functions, norms, a
convolution, rotary positions and losses, and no layers. fla's run on them."""
raise ImportError(
    "flashlin has no layers of its own: keep `from fla.layers import ...` (or `import fla.layers`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's layers run on flashlin's functions", name=__name__)
