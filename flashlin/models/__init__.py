"""What a search for ``fla.models`` and a replacement of ``fla.`` lead to: flashlin has functions, norms, a
convolution, rotary positions and losses, and no models. fla's run on them."""
raise ImportError(
    "flashlin has no models of its own: keep `from fla.models import ...` (or `import fla.models`), and put "
    '`import flashlin; flashlin.patch("fla")` before it, or start the program with `flashlin run`: then '
    "fla's models run on flashlin's functions", name=__name__)
