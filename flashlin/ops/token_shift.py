"""The difference between the previous token and each token; mirrors ``fla.modules.token_shift``.

    y_t = x_{t - 1} - x_t        x_{-1}: the cache, or 0

This is the short convolution with the filter (1, -1), so the op uses the kernels, states and gradients of the
convolution. Under torch.compile it is plain torch, which the compiler fuses with the surrounding operations.
Source: Peng et al. 2023 (RWKV).
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
    """Compute x_{t - 1} - x_t for every token.

    Drop-in for ``fla.modules.token_shift.token_shift``.

    Args:
        x: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), never modified. If its rows
            are evenly spaced in memory, it is read without a copy. With cu_seqlens B is 1 and the sequences
            are packed along T.
        cu_seqlens: [N + 1] int32 or int64 on the device of x. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cache: [N, D] for N sequences, any float dtype: the token before the first token of each sequence. It
            gets a gradient; None means zeros.
        output_cache: also return the last token of each sequence, which can be the cache of the next call.
        chunk_indices: accepted for compatibility and not read.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``. In fla this is
            ``token_shift_cp``.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.

    Returns:
        y [B, T, D] in the dtype of x, or (y, cache [N, D]) in the dtype of x with output_cache. A sequence
        without tokens returns its old cache. cu_seqlens must cover all rows, else ValueError. The values are
        not checked in compiled code, nor on a GPU outside debug mode. Without the check, rows outside all
        sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: checked cu_seqlens, any T or B (no limit from the launch grid), a
    cache for every sequence, and gradients through the initial and the returned cache.
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
        # The state of the convolution has two slots. A filter of two taps reads only the second.
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
