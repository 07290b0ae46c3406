"""The difference to the token before; mirrors ``fla.modules.token_shift``. Source: Peng et al. 2023 (RWKV).

    y_t = x_{t - 1} - x_t        x_{-1}: the cache, or 0
That is the short convolution with the filter (1, -1), so it takes the same kernels, states and gradients.
Under torch.compile it is plain torch, which the compiler fuses with what is around it.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import need_tensor
from flashlin.kernels.conv import torch_path
from flashlin.ops import conv
from flashlin.ops._common.arguments import check_packed, check_rows
from flashlin.ops._common.entry import entry
from flashlin.ops._common.slopes import shift_filters


@entry
def token_shift(x: Tensor, cu_seqlens: Tensor | None = None, cache: Tensor | None = None,
                output_cache: bool = False, chunk_indices: Any = None, *, cp_context: Any = None,
                process_group: Any = None) -> Tensor | tuple[Tensor, Tensor]:
    """x_{t - 1} - x_t for every token. Drop-in for ``fla.modules.token_shift.token_shift``.

    Args:
        x: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), never modified. Rows that
            lie evenly spaced are read where they are. With cu_seqlens B is 1 and the sequences are packed
            along T.
        cu_seqlens: [N + 1] int32 or int64 on x's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cache: [N, D] (N sequences) of any float dtype: the token before each sequence's first; gets a
            gradient. None is zeros.
        output_cache: also return each sequence's last token, which may be the next call's cache.
        chunk_indices: accepted for compatibility; nothing is looked up in it.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule`` (fla has
            ``token_shift_cp`` for the first).

    Returns:
        y [B, T, D] in x's dtype; with output_cache (y, cache [N, D] in x's dtype). A sequence without tokens
        hands its cache on. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: checks cu_seqlens, has no limit on T or B from the grid, writes the
    cache of every sequence, and the cache has a gradient, going in and coming out.
    """
    output_cache = scalars.flag("output_cache", output_cache)
    check_rows("x", x, "[B, T, D]", 3)
    D, state, shard = x.shape[2], None, None
    if cp_context is not None or process_group is not None:
        from flashlin.ops._common import ranks
        shard = ranks.shard_of("token_shift", x, (D,), cp_context, process_group, cu_seqlens,
                               cache=cache is not None, output_cache=output_cache)
        bounds, N = shard.bounds, shard.total
    else:
        bounds, N = check_packed(x, cu_seqlens)
    if cache is not None:
        need_tensor("cache", cache, (N, D), "[N, D]", x.device, "x")
        # the convolution's state has two slots, of which a filter of two taps sees the second
        state = F.pad(cache[..., None], (1, 0))
    if shard is not None:
        x = shard.there(x)
        state = shard.window(x, 2, state)
    given = conv.Tensors(x, shift_filters(D, x.device), initial_state=state, bounds=bounds)
    last: Tensor | None
    if torch.compiler.is_compiling():
        y, last = (wide.to(x.dtype) for wide in torch_path.compute(*given, False))
    else:
        y, last = conv.convolve("token_shift", given, False, output_cache)
    if shard is not None:
        y = shard.back(y)
    if not output_cache or last is None:
        return y
    last = last if shard is None else shard.share(last, x.shape[0])
    return y, last[..., 1].contiguous()
