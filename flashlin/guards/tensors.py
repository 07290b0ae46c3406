"""Checks of tensor arguments: shape, dtype, device and cu_seqlens.

A wrong argument raises ValueError or TypeError with the name of the argument, the given fact and the
requirement. Metadata is always checked. Values are checked only if that does not wait for a GPU, or in debug
mode.
"""
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
    """Return an argument after replacing lazily negated or conjugated tensors by resolved copies.

    Tensors inside a tuple or a list are also replaced. Other arguments are returned unchanged.
    """
    if isinstance(x, (tuple, list)):
        return type(x)([resolved(one) for one in x]) if type(x) in (tuple, list) else x
    if not isinstance(x, torch.Tensor) or not (x.is_neg() or x.is_conj()):
        return x
    copy = x.resolve_conj().resolve_neg()
    _copies[id(copy)] = copy
    return copy


def check_no_copy(name: str, x: torch.Tensor, because: str) -> None:
    """Raise ValueError if x, which the op overwrites, is a copy made by ``resolved``.

    Values written to the copy would be lost.
    because: the op or option that overwrites x, for the error.
    """
    if _copies and _copies.get(id(x)) is x:
        raise ValueError(f"{name}: got a lazily negated or conjugated tensor, need {name}.resolve_neg(), "
                         f"since {because} overwrites it")


def shown(shape: Any) -> str:
    """Return a shape as text, such as ``[2, 64, 4, 128]``."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def check_dense(name: str, x: Any, need: str, distributed: bool = False) -> None:
    """Raise TypeError unless x is a dense, strided, plain tensor, which kernels can read.

    need: the requirement, for the error.
    distributed: also accept a DTensor, which kernels cannot read.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, need {need}")
    if x.is_nested or x.layout is not _STRIDED:
        got = "nested" if x.is_nested else str(x.layout).rpartition(".")[2].strip("_")
        raise TypeError(f"{name}: got a {got} tensor, need {need.replace('tensor', 'dense tensor', 1)}")
    if not distributed and type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: got a DTensor, need {need.replace('tensor', 'plain tensor', 1)}: pass "
                        f"{name}.to_local(), a shard of whole heads or of whole rows")


def check_floats(name: str, x: Any, meaning: str, dims: int | None = None) -> None:
    """Raise TypeError or ValueError unless x is a dense floating-point tensor with ``dims`` dimensions.

    meaning: the required shape, for the error. This function does not check the sizes.
    dims: the number of dimensions; None accepts any number.
    """
    check_dense(name, x, f"a tensor of shape {meaning}")
    if dims is not None and x.ndim != dims:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning}")
    if x.dtype not in FLOATS:
        check_dtype(name, x.dtype, "dtype ")


def check_dtype(name: str, dtype: Any, prefix: str = "") -> None:
    """Raise TypeError unless a dtype is bfloat16, float16, float32 or float64."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(f"{name}: got {prefix}{dtype}, need bfloat16, float16, float32 or float64")


def check_integers(name: str, x: Any, shape: tuple[int | None, ...], meaning: str, device: torch.device,
                   beside: str) -> None:
    """Raise TypeError or ValueError unless x is a dense int32 or int64 tensor of a shape on a device.

    shape: the required sizes; None accepts any size.
    meaning: the shape in symbols such as ``[N]``, for the error.
    beside: the argument that determines the device, for the error.
    """
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
    """Raise TypeError or ValueError unless x is a dense floating-point tensor of a shape on a device.

    shape: the required sizes; None accepts any size.
    meaning: the shape in symbols such as ``[B, T, H, K]``, for the error.
    beside: the argument that determines the device, for the error.
    """
    if (type(x) in TENSORS and not x.is_nested and x.layout is _STRIDED and x.dtype in FLOATS
            and x.shape == shape and x.device == device):
        return  # the usual case; the checks below find the error
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
    """Raise ValueError unless x is on ``device``, the device of the argument named by ``beside``."""
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, need {device}, where {beside} is")


def check_qkv(q: Any, k: Any, v: Any, grouped: bool = False, first: str = "q") -> None:
    """Raise TypeError or ValueError unless q and k [B, T, H, K] and v [B, T, H, V] fit together.

    Head dimensions of 0 are rejected. Empty batches and empty sequences are accepted.
    grouped: the number of heads of v may be a multiple of the number of heads of q and k.
    first: the public name of q, which is r for RWKV.
    """
    for x in (q, k, v):
        if (type(x) not in TENSORS or x.is_nested or x.layout is not _STRIDED or x.dtype not in FLOATS
                or x.ndim != 4 or x.device != q.device):
            break
    else:
        if k.shape == q.shape and v.shape[:3] == q.shape[:3] and q.shape[3] > 0 and v.shape[3] > 0:
            return  # the usual case; the checks below find the error or accept more heads of v
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
    """Return True if every group can have the same number of heads. If heads or groups is 0, both must be.

    Each comparison has its own statement, because torch.compile cannot compare two conditions on symbolic
    sizes.
    """
    if groups == 0:
        return heads == 0
    return heads > 0 and heads % groups == 0


def check_cu_seqlens(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, rows: torch.Size,
                     device: torch.device, debug: bool, packed: str = "q") -> torch.Tensor:
    """Return sequence boundaries [N + 1] that kernels can trust: they never fall and lie between 0 and T.

    Values are read if that does not wait for a GPU (``cu_seqlens_cpu`` or CPU tensors), or in debug mode.
    They must start at 0, never fall and end at T; otherwise a ValueError is raised. Values that are not
    read are clamped to 0 .. T on the device, and a value that falls is replaced by the largest value before
    it. Kernels then never access memory outside the tensors.
    Tokens that they do not cover are zeros in outputs and gradients.
    rows: the shape of the packed tensor, which begins with [1, T].
    packed: the name of the packed tensor, for the error.
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
            return cu_seqlens.contiguous()  # kernels assume a stride of 1
    return cu_seqlens.clamp(0, T).cummax(0).values  # cu_seqlens_cpu may have other values than cu_seqlens


def without_values(x: torch.Tensor) -> str:
    """Return a phrase for a tensor whose values this process cannot read, or "" for a tensor with values.

    Such tensors are on ``meta`` or belong to a subclass such as FakeTensor or DTensor.
    """
    if x.device.type == "meta":
        return "a tensor on meta"
    return "" if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else f"a {type(x).__name__}"


def check_values(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if the values of x cannot be read, as on ``meta``; skipped under torch.compile."""
    if not torch.compiler.is_compiling() and (kind := without_values(x)):
        raise ValueError(f"{name}: got {kind}, need one with values: the lengths of the sequences decide "
                         "what is computed")


def check_bounds(edges: list[int], T: int) -> None:
    """Raise ValueError unless the sequence boundaries start at 0, never fall and end at T."""
    if edges[0] != 0:
        raise ValueError(f"cu_seqlens: got a first value of {edges[0]}, need 0")
    for n, (before, edge) in enumerate(pairwise(edges), 1):
        if edge < before:
            raise ValueError(f"cu_seqlens: got {edge} after {before} at position {n}, need values that never "
                             "fall")
    if edges[-1] != T:
        raise ValueError(f"cu_seqlens: got a last value of {edges[-1]}, need T = {T}: sequences must cover "
                         "the packed tensor")


def check_state(name: str, state: torch.Tensor, N: int, H: int, K: int, V: int, v_first: bool,
                device: torch.device, packed: bool, first: str = "q") -> None:
    """Raise TypeError or ValueError unless state is [N, H, K, V], or [N, H, V, K] with ``v_first``.

    packed: the sequences are packed, so that a wrong number of states has its own message.
    first: the argument that determines the device, for the error.
    """
    meaning = "[N, H, V, K]" if v_first else "[N, H, K, V]"
    if packed:
        check_dense(name, state, f"a tensor of shape {meaning}")
        if state.ndim > 0 and state.shape[0] != N:
            raise ValueError(f"{name}: The number of initial states is expected to be equal to the number of "
                             f"input sequences, got {state.shape[0]} states, need {N}")
    need_tensor(name, state, (N, H, V, K) if v_first else (N, H, K, V), meaning, device, first)


def check_pool(name: str, pool: torch.Tensor | None, N: int | None, H: int, K: int, V: int, v_first: bool,
               device: torch.device, because: str) -> None:
    """Raise TypeError or ValueError unless pool is a tensor of states that an op can overwrite.

    Its shape is [N, H, K, V], or [N, H, V, K] with ``v_first``; N may be None for any number of states. Each
    state must be contiguous and must not overlap the other states.
    because: the op or option that overwrites the states, for the error.
    """
    if pool is None:
        raise ValueError(f"{name}: got None, need the states that {because} reads and overwrites")
    meaning = ("[N" if N is not None else "[P") + (", H, V, K]" if v_first else ", H, K, V]")
    need_tensor(name, pool, (N, H, V, K) if v_first else (N, H, K, V), meaning, device)
    check_no_copy(name, pool, because)
    if pool.shape[0] and not (pool[0].is_contiguous()
                              and (pool.shape[0] == 1 or pool.stride(0) >= H * K * V)):
        raise ValueError(f"{name}: got strides {shown(pool.stride())}, need each {meaning[4:-1]} block "
                         f"contiguous and apart from the others, since {because} overwrites it")


def check_apart(name: str, x: torch.Tensor, because: str) -> None:
    """Raise ValueError unless every element of x has its own memory, so that an op can overwrite x.

    The check rejects expanded tensors (stride 0), overlapping windows and lazily negated tensors.
    because: the op or option that overwrites x, for the error.
    """
    check_no_copy(name, x, because)
    if x.is_contiguous() or x.numel() == 0:
        return
    reach = 0  # distance from the first to the last element over the dimensions so far
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(f"{name}: got strides {shown(x.stride())} for shape {shown(x.shape)}, need "
                             f"every element at its own address, since {because} overwrites it")
        reach += (size - 1) * stride


def check_indices(indices: torch.Tensor, N: int, P: int, device: torch.device, readable: bool) -> None:
    """Raise TypeError or ValueError unless indices [N] assigns a slot of a pool of P states to each sequence.

    A negative index means no slot. The values are checked only if ``readable`` says that this does not wait
    for a GPU.
    """
    check_integers("state_indices", indices, (N,), "[N]", device, "q")
    if readable and N and int(indices.max()) >= P:
        raise ValueError(f"state_indices: got {int(indices.max())}, need less than {P}, the number of states "
                         "in initial_state")


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError unless chunk_size is a power of two of at least 16, as fla requires.

    The chunk size changes only the rounding of results, so flashlin's ops accept it without using it.
    """
    if not isinstance(chunk_size, int) or chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: got {chunk_size}, need a power of two of at least 16")


def no_unknown(op: str, known: Collection[str], given: Collection[str]) -> None:
    """Raise a TypeError that lists the unknown keywords of a call and suggests a known name.

    fla ignores unknown keywords, so that a call with a misspelt gate runs without the gate.
    op: the name of the op.
    known: the keywords that the op accepts.
    given: the keywords of the call, of which at least one must be unknown.
    """
    if "head_first" in given:
        raise TypeError(f"{op}: head_first is gone; pass [B, T, H, D] tensors (x.transpose(1, 2) if yours "
                        "are [B, H, T, D])")
    unknown = sorted({*given} - {*known})
    raise TypeError(f"{op}: got unexpected keyword {', '.join(unknown)}{did_you_mean(unknown[0], known)}")
