"""What the remedies hand to a kernel of the user's own instead of its tensors: parts of the batch, copies of
another dtype."""
from __future__ import annotations

import torch
from torch import Tensor


def part_of(tensor: Tensor, dimension: int, whole: int, begin: int, count: int) -> Tensor:
    """The view of a tensor that belongs to ``count`` of the batch from ``begin`` on."""
    length = tensor.shape[dimension]
    if length == whole + 1 and whole > 1:  # boundaries: a sequence needs both of its own
        return tensor.narrow(dimension, begin, count + 1)
    return tensor.narrow(dimension, length // whole * begin, length // whole * count)


def fp32_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp32 copies of those tensors that have 16 bits, with the same strides, sharing memory where the
    originals do: a kernel computes addresses from strides, and may reach beyond the view that it is handed.
    So whole storages are converted."""
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
