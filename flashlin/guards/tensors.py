"""Checks of the tensors themselves: shape, dtype, device, cu_seqlens. Wrong arguments are ValueError or
TypeError that name the argument, what it got and what it needs. Metadata is always checked; values only where
no GPU has to be waited for, or in debug mode."""
from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch

from flashlin.compat.launch_cache import TENSORS
from flashlin.compat.suggestions import did_you_mean
from flashlin.compat.tracing import numbers

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_STRIDED = torch.strided

# Copies of lazily negated or conjugated arguments, by id.
_copies: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def resolved(x: Any) -> Any:
    """Return an argument with lazily negated and conjugated tensors replaced by copies, also inside a tuple
    or a list. Other arguments are returned unchanged."""
    if isinstance(x, (tuple, list)):
        return type(x)([resolved(one) for one in x]) if type(x) in (tuple, list) else x
    if not isinstance(x, torch.Tensor) or not (x.is_neg() or x.is_conj()):
        return x
    copy = x.resolve_conj().resolve_neg()
    _copies[id(copy)] = copy
    return copy


def check_no_copy(name: str, x: torch.Tensor, because: str) -> None:
    """Raise a ValueError if x, which the op overwrites, is a copy made by ``resolved``. Values written to the
    copy would be lost."""
    if _copies and _copies.get(id(x)) is x:
        raise ValueError(f"{name}: got a lazily negated or conjugated tensor, need {name}.resolve_neg(), "
                         f"since {because} overwrites it")


def shown(shape: Any) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def check_dense(name: str, x: Any, need: str, distributed: bool = False) -> None:
    """``x`` is a tensor whose elements lie in memory by strides: it has a shape, and kernels can read it.
    need: what an error asks for. distributed: accept a DTensor too, which kernels cannot read."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, need {need}")
    if x.is_nested or x.layout is not _STRIDED:
        got = "nested" if x.is_nested else str(x.layout).rpartition(".")[2].strip("_")
        raise TypeError(f"{name}: got a {got} tensor, need {need.replace('tensor', 'dense tensor', 1)}")
    if not distributed and type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: got a DTensor, need {need.replace('tensor', 'plain tensor', 1)}: pass "
                        f"{name}.to_local(), a shard of whole heads or of whole rows")


def check_floats(name: str, x: Any, meaning: str, dims: int | None = None) -> None:
    """``x`` is a dense floating-point tensor of so many dimensions (None: any), whose sizes, as ``meaning``
    says, have still to be looked at."""
    check_dense(name, x, f"a tensor of shape {meaning}")
    if dims is not None and x.ndim != dims:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning}")
    if x.dtype not in FLOATS:
        check_dtype(name, x.dtype, "dtype ")


def check_dtype(name: str, dtype: Any, prefix: str = "") -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(f"{name}: got {prefix}{dtype}, need bfloat16, float16, float32 or float64")


def check_integers(name: str, x: Any, shape: tuple[int | None, ...], meaning: str, device: torch.device,
                   beside: str) -> None:
    """``x`` is a dense int32 or int64 tensor of that shape (None: any size) on that device."""
    _check_integer(name, x, meaning)
    _check_shape(name, x, shape, meaning)
    check_device(name, x, device, beside)


def _check_integer(name: str, x: Any, meaning: str) -> None:
    need = f"an int32 or int64 tensor of shape {meaning}"
    check_dense(name, x, need)
    if x.dtype not in INTEGERS:
        raise TypeError(f"{name}: got {x.dtype}, need {need}")


def need_tensor(name: str, x: Any, shape: tuple[int | None, ...], meaning: str, device: torch.device,
                beside: str = "q") -> None:
    """``x`` is a dense floating-point tensor of that shape (None: any size) on that device. ``meaning``
    spells the shape out in the error; ``beside`` is the argument whose device that is."""
    if (type(x) in TENSORS and not x.is_nested and x.layout is _STRIDED and x.dtype in FLOATS
            and x.shape == shape and x.device == device):
        return  # as nearly always; the checks below find out what is wrong
    check_floats(name, x, meaning)
    _check_shape(name, x, shape, meaning)
    check_device(name, x, device, beside)


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    if x.shape == shape:
        return
    if x.ndim != len(shape) or any(want is not None and want != got
                                   for want, got in zip(shape, x.shape, strict=False)):
        sizes = shown("any" if size is None else size for size in shape)
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning} = {sizes}")


def check_device(name: str, x: torch.Tensor, device: torch.device, beside: str) -> None:
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, need {device}, where {beside} is")


def check_qkv(q: Any, k: Any, v: Any, grouped: bool = False, first: str = "q") -> None:
    """q, k [B, T, H, K] and v [B, T, H, V] agree; grouped: v may have several heads to each of q's. Heads of
    size zero are refused; empty batches and sequences are fine. first: q's public name, RWKV's being r."""
    for x in (q, k, v):
        if (type(x) not in TENSORS or x.is_nested or x.layout is not _STRIDED or x.dtype not in FLOATS
                or x.ndim != 4 or x.device != q.device):
            break
    else:
        if k.shape == q.shape and v.shape[:3] == q.shape[:3] and q.shape[3] > 0 and v.shape[3] > 0:
            return  # as nearly always; the checks below find out what is wrong, or that v has more heads
    check_floats(first, q, "[B, T, H, K]")
    _check_shape(first, q, (None, None, None, None), "[B, T, H, K]")
    need_tensor("k", k, tuple(q.shape), "[B, T, H, K]", q.device, first)
    if grouped:
        need_tensor("v", v, (*q.shape[:2], None, None), "[B, T, HV, V]", q.device, first)
        if not shareable(v.shape[2], q.shape[2]):
            raise ValueError(f"v: got {v.shape[2]} heads, need a multiple of the {q.shape[2]} heads of "
                             f"{first} and k")
    else:
        need_tensor("v", v, (*q.shape[:3], None), "[B, T, H, V]", q.device, first)
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"{first if q.shape[3] == 0 else 'v'}: got a head dimension of 0, need at least 1")


def shareable(heads: int, groups: int) -> bool:
    """Return True if every group can have the same number of heads. Without heads there must be no groups.

    Each comparison is a statement of its own, because torch.compile cannot compare two conditions on symbolic
    sizes."""
    if groups == 0:
        return heads == 0
    return heads > 0 and heads % groups == 0


def check_cu_seqlens(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, rows: torch.Size,
                     device: torch.device, debug: bool, packed: str = "q") -> torch.Tensor:
    """The bounds that kernels may trust: rising, within 0 .. T.

    Values that can be read without waiting for a GPU (cu_seqlens_cpu, CPU tensors), or that debug mode
    insists on, must start at 0, never fall and end at T, else ValueError. Other values are brought into order
    on the device, so that a wrong table cannot reach outside the tensors; rows it does not cover are zeros in
    outputs and gradients. packed: the name of the tensor whose rows are meant.
    """
    B, T = rows[0], rows[1]
    if B != 1:
        raise ValueError(f"{packed}: The batch size is expected to be 1 rather than {B} when using "
                         "`cu_seqlens`; pack the sequences along T")
    given: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    if cu_seqlens_cpu is not None:
        given["cu_seqlens_cpu"] = cu_seqlens_cpu
    for name, x in given.items():
        _check_integer(name, x, "[N + 1]")
        if x.ndim != 1 or x.numel() == 0:
            raise ValueError(f"{name}: got shape {shown(x.shape)}, need [N + 1]")
    check_device("cu_seqlens", cu_seqlens, device, packed)
    if cu_seqlens_cpu is not None:
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu: got device {cu_seqlens_cpu.device}, need cpu")
        if cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ValueError(f"cu_seqlens_cpu: got shape {shown(cu_seqlens_cpu.shape)}, need "
                             f"{shown(cu_seqlens.shape)}, as cu_seqlens")
    readable = cu_seqlens if debug or device.type == "cpu" else cu_seqlens_cpu
    if readable is not None and not torch.compiler.is_compiling():
        check_values("cu_seqlens" if readable is cu_seqlens else "cu_seqlens_cpu", readable)
        check_bounds(numbers(readable), T)
        if readable is cu_seqlens:
            return cu_seqlens.contiguous()  # kernels walk it with a stride of 1
    return cu_seqlens.clamp(0, T).cummax(0).values  # also beside cu_seqlens_cpu, which need not say the same


def without_values(x: torch.Tensor) -> str:
    """Return the kind of a tensor whose values this process cannot read (on meta, FakeTensor, DTensor), as a
    phrase; empty for a tensor with values."""
    if x.device.type == "meta":
        return "a tensor on meta"
    plain = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return "" if plain else f"a {type(x).__name__}"


def check_values(name: str, x: torch.Tensor) -> None:
    """``x`` has values. Of other tensors an op on ``meta`` asks for shapes only."""
    if not torch.compiler.is_compiling() and (kind := without_values(x)):
        raise ValueError(f"{name}: got {kind}, need one with values: how long sequences are decides what is "
                         "computed")


def check_bounds(edges: list[int], T: int) -> None:
    """Raises ValueError that names the first entry that is wrong."""
    if edges[0] != 0:
        raise ValueError(f"cu_seqlens: got a first value of {edges[0]}, need 0")
    for n, (before, edge) in enumerate(pairwise(edges), 1):
        if edge < before:
            raise ValueError(f"cu_seqlens: got {edge} after {before} at position {n}, need values that never "
                             "fall")
    if edges[-1] != T:
        raise ValueError(f"cu_seqlens: got a last value of {edges[-1]}, need T = {T}: sequences must cover "
                         "the packed tensor")


def check_state(
    name: str,
    state: torch.Tensor,
    N: int,
    H: int,
    K: int,
    V: int,
    v_first: bool,
    device: torch.device,
    packed: bool,
    first: str = "q",
) -> None:
    meaning = "[N, H, V, K]" if v_first else "[N, H, K, V]"
    if packed:
        check_dense(name, state, f"a tensor of shape {meaning}")
        if state.ndim > 0 and state.shape[0] != N:
            raise ValueError(f"{name}: The number of initial states is expected to be equal to the number of "
                             "input sequences, "
                             f"got {state.shape[0]} states, need {N}")
    need_tensor(name, state, (N, H, V, K) if v_first else (N, H, K, V), meaning, device, first)


def check_pool(
    name: str,
    pool: torch.Tensor | None,
    N: int | None,
    H: int,
    K: int,
    V: int,
    v_first: bool,
    device: torch.device,
    because: str,
) -> None:
    """States that are to be overwritten: [N, H, K, V] (N None: any number), each one contiguous and apart
    from the others."""
    if pool is None:
        raise ValueError(f"{name}: got None, need the states that {because} reads and overwrites")
    meaning = ("[N" if N is not None else "[P") + (", H, V, K]" if v_first else ", H, K, V]")
    need_tensor(name, pool, (N, H, V, K) if v_first else (N, H, K, V), meaning, device)
    check_no_copy(name, pool, because)
    if pool.shape[0] and not (pool[0].is_contiguous()
                              and (pool.shape[0] == 1 or pool.stride(0) >= H * K * V)):
        raise ValueError(f"{name}: got strides {shown(pool.stride())}, need each {meaning[4:-1]} block "
                         "contiguous and apart from the others, "
                         f"since {because} overwrites it")


def check_apart(name: str, x: torch.Tensor, because: str) -> None:
    """x, which is to be overwritten, has a place of its own for each element: none expanded (stride 0), no
    overlapping windows, and it is not lazily negated."""
    check_no_copy(name, x, because)
    if x.is_contiguous() or x.numel() == 0:
        return
    reach = 0  # of the dimensions so far, from the first element to the last
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(f"{name}: got strides {shown(x.stride())} for shape {shown(x.shape)}, need "
                             "every element in a place of its own, "
                             f"since {because} overwrites it")
        reach += (size - 1) * stride


def check_indices(indices: torch.Tensor, N: int, P: int, device: torch.device, readable: bool) -> None:
    """state_indices [N]: one row of the pool for each sequence, negative ones for none. Values are only
    looked at where that is free."""
    check_integers("state_indices", indices, (N,), "[N]", device, "q")
    if readable and N and int(indices.max()) >= P:
        raise ValueError(f"state_indices: got {int(indices.max())}, need less than {P}, the number of states "
                         "in initial_state")


def check_chunk_size(chunk_size: int) -> None:
    """chunk_size is a power of two of at least 16, as fla takes it. It changes nothing but rounding, so our
    ops only have to accept it."""
    if not isinstance(chunk_size, int) or chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: got {chunk_size}, need a power of two of at least 16")


def no_unknown(op: str, known: Collection[str], given: Collection[str]) -> None:
    """Raise a TypeError for the first keyword of a call that is not among the known ones. fla ignores unknown
    keywords, so a misspelt gate runs ungated."""
    if "head_first" in given:
        raise TypeError(f"{op}: head_first is gone; pass [B, T, H, D] tensors (x.transpose(1, 2) if yours "
                        "are [B, H, T, D])")
    unknown = sorted({*given} - {*known})
    raise TypeError(f"{op}: got unexpected keyword {', '.join(unknown)}{did_you_mean(unknown[0], known)}")
