"""A mark for tests of direct starts and of replays.

flashlin makes them only on Triton releases with ``Release.direct``, on which they have been compared.
"""
from __future__ import annotations

import pytest
import triton

from flashlin.compat.releases import nearest

needs_direct_starts = pytest.mark.skipif(
    not nearest(triton.__version__).direct,
    reason=f"direct starts have not been compared on Triton {triton.__version__}, so flashlin makes none")
