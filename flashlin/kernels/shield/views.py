"""Tensors that remedies pass to a user's own kernel: slices of the batch, and copies in another dtype."""
from __future__ import annotations

import torch
from torch import Tensor


def part_of(tensor: Tensor, dimension: int, whole: int, begin: int, count: int) -> Tensor:
    """Return the view of a tensor for ``count`` sequences of the batch, starting at sequence ``begin``.

    dimension: the dimension that contains the batch.
    whole: size of the whole batch. The dimension has a multiple of this length, or whole + 1 for boundaries.
    """
    length = tensor.shape[dimension]
    if length == whole + 1 and whole > 1:  # boundaries: each sequence needs two
        return tensor.narrow(dimension, begin, count + 1)
    return tensor.narrow(dimension, length // whole * begin, length // whole * count)


def fp32_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return fp32 copies of the tensors that have 16 bits, by name.

    The copies have the strides of the originals, and share memory if the originals do. A kernel computes
    addresses from strides, and may access elements outside the view that it receives. Whole storages are
    therefore converted.
    """
    copies: dict[str, Tensor] = {}
    storages: dict[tuple[int, torch.dtype], Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            continue
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in storages:
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            storages[key] = flat.to(torch.float32)
        copies[name] = storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copies
