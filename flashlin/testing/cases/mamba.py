"""Cases of Mamba and Mamba2.

They cover the scans with groups, gates, limits and packed rows, Mamba2's fused layer, decoding steps that
update a state in place, and gated norms.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin.kernels.conv.reference import convolve
from flashlin.kernels.mamba.reference import scan, selective, silu, step, window
from flashlin.kernels.norm.reference import normalise
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, Values, times
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors

SCAN = {"*": 0.005, "d*": 0.008, "ddt": 0.02, "dA": 0.02, "dD": 0.02, "ddt_bias": 0.02, "ddelta_bias": 0.02,
        "dzxbcdt": 0.02, "dconv1d_weight": 0.02, "dconv1d_bias": 0.02, "drmsnorm_weight": 0.02,
        "dweight": 0.02, "dbias": 0.02}
# x, B and C are rounded between the convolution and the scan, y before its norm and its projection.
LAYER = {**SCAN, "*": 0.01, "d*": 0.016}
# A constant that is added to dt before its softplus, by kind of step. ``usual``: about 0.1 after the
# softplus, as layers initialise dt. ``large``: decays down to e^-50. ``tiny``: about 1e-4 after the softplus.
# ``positive``: for calls without softplus. ``forgetting``: usual steps, but some heads or channels keep
# nothing.
STEPS = {"usual": -2.0, "large": 3.0, "tiny": -9.0, "positive": 0.0, "forgetting": -2.0}
UPDATE = ("y", "y_of_the_kernel", "state", "state_too")


def numbers(draw: Draw, _: str) -> Tensor:
    """Return seq_idx [B, T] for rows that contain sequences of the lengths in the case's setting ``seq``.

    In row i the first sequence is i tokens longer, and the last one is i tokens shorter. With the setting
    ``padding``, the tokens of the second sequence have number -1.
    """
    lengths = draw["seq"]
    rows = [torch.tensor([lengths[0] + i, *lengths[1:-1], lengths[-1] - i]) for i in range(draw["B"])]
    numbered = torch.stack([torch.arange(len(lengths)).repeat_interleave(row) for row in rows])
    return torch.where(numbered == 1, -1, numbered).int() if draw.facts.get("padding") else numbered.int()


def channels_last(*names: str) -> Callable[[Tensors, Draw], Tensors]:
    """Return a function that stores the named tensors [B, channels, T] with contiguous channels.

    It does so only with the case's setting ``last``. A projection returns tensors with this layout.
    """
    return lambda made, draw: made | {name: made[name].mT.contiguous().mT for name in names
                                      if name in made and draw["last"]}


def steps(draw: Draw, shape: str) -> Tensor:
    """Return dt of the kind in the case's setting ``step``, before its softplus."""
    made = draw(shape) + STEPS[draw["step"]]
    return made.abs() if draw["step"] == "positive" else made


def rates(draw: Draw, shape: str) -> Tensor:
    """Return A in -4 .. -1. With the step ``forgetting``, some heads or channels have -1e6 or -1e30."""
    A = -(1 + 3 * draw.uniform(shape))
    if draw["step"] == "forgetting" and A.ndim == 1:
        A[1:3] = torch.tensor([-1e6, -1e30])
    elif draw["step"] == "forgetting":
        A[::3, ::2], A[1::3] = -1e6, -1e30
    return A


def divided(name: str) -> Values:
    """Return a function that makes normal numbers divided by the square root of the size ``name``."""
    return lambda draw, shape: draw(shape) / draw[name] ** 0.5


SEQ_IDX = Input("B T", numbers, when="seq")
# V: width of a head. K: columns of a state (other makers use the same letters). G: groups. step: a key of
# STEPS. others: dtype of dt and of tensors with one number per head. seq: lengths of the sequences in each
# row. of_D: "V" if D has one number per channel.
make_scan = Maker(
    {"x": Input("B T H V"), "dt": Input("B T H", steps, "others"), "A": Input("H", rates, "others"),
     "B": Input("B T G K"), "C": Input("B T G K", divided("K")),
     "D": Input("H of_D", dtype="others", when="given"),
     "z": Input("B T H V", when="given"), "dt_bias": Input("H", dtype="others", when="given"),
     "initial_states": Input("B H V K", dtype=FLOAT32, when="given"), "seq_idx": SEQ_IDX},
    {"B": 2, "T": 150, "H": 4, "V": 32, "G": 2, "K": 64, "of_D": None, "step": "usual", "seq": (),
     "others": FLOAT32})
# D: channels. N: columns of a state. G: groups; None for B and C without groups. others: dtype of tensors
# with one number per channel. last: channels are contiguous.
make_selective = Maker(
    {"u": Input("B D T"), "delta": Input("B D T", steps), "A": Input("D N", rates, "others"),
     "D": Input("D", dtype="others", when="given"), "z": Input("B D T", when="given"),
     "delta_bias": Input("D", dtype="others", when="given"), "B": Input("B G N T"),
     "C": Input("B G N T", divided("N"))},
    {"B": 2, "D": 40, "T": 75, "N": 16, "G": None, "step": "usual", "others": FLOAT32, "last": False},
    finish=channels_last("u", "z", "B"))


def widths(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of the projections, the scan and the convolution, computed from a case's settings."""
    D, M = facts["H"] * facts["V"], facts["M"]
    C = D + 2 * facts["G"] * facts["K"]
    return {"D": D, "C": C, "rows": 2 * M + D + C + facts["H"], "inner": D + M}


# The same settings as for the scan. M: half the columns of the MLP that runs in parallel with the scan. W:
# filter width of the convolution.
make_layer = Maker(
    {"zxbcdt": Input("B T rows"), "conv1d_weight": Input("C W", divided("W")),
     "conv1d_bias": Input("C", when="given"),
     "dt_bias": Input("H", times(1, -2), FLOAT32), "A": Input("H", rates, FLOAT32),
     "D": Input("H of_D", dtype=FLOAT32), "initial_states": Input("B H V K", dtype=FLOAT32, when="given"),
     "rmsnorm_weight": Input("D", times(0.1, 1), when="given"),
     "outproj_weight": Input("out inner", divided("D"), when="given"),
     "outproj_bias": Input("out", when="given"), "seq_idx": SEQ_IDX},
    {"B": 2, "T": 90, "H": 4, "V": 16, "G": 2, "K": 16, "M": 0, "W": 4, "of_D": None, "step": "usual",
     "out": 24, "seq": (), "given": ("conv1d_bias", "rmsnorm_weight", "outproj_weight")}, widths)


def layer_reference(
    zxbcdt: Tensor, conv1d_weight: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
    conv1d_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None,
    *,
    headdim: int, ngroups: int,
    rmsnorm_eps: float, activation: str | None = "silu",
    norm_before_gate: bool = True) -> tuple[Tensor, Tensor]:
    """Compute Mamba2's fused layer in float64: convolution, scan, norm, gates and projection."""
    dim, G, heads = len(D) * (D.shape[1] if D.ndim == 2 else headdim), ngroups, len(D)
    states = len(conv1d_weight) - dim  # columns of B and C together
    M = (zxbcdt.shape[2] - 2 * dim - states - heads) // 2
    gate, value, z, xBC, dt = torch.split(zxbcdt, [M, M, dim, dim + states, heads], 2)
    xBC = convolved(xBC, conv1d_weight, conv1d_bias, None, seq_idx, activation)
    x, B, C = torch.split(xBC, [dim, states // 2, states // 2], 2)
    x, B, C = (m.reshape(*m.shape[:2], n, -1) for m, n in ((x, heads), (B, G), (C, G)))
    y, ht, _ = scan(x, dt, A, B, C, D=D, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
                    dt_softplus=True)
    y = y.flatten(2)
    y = y * silu(z) if rmsnorm_weight is None else norm_reference(
        y, rmsnorm_weight, z=z, group_size=dim // G, eps=rmsnorm_eps, norm_before_gate=norm_before_gate,
        kind="rms")
    y = torch.cat([silu(gate) * value, y], 2)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias), ht


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, seq_idx: Tensor | None,
              activation: str | None) -> Tensor:
    """Return the convolution y [b, T, D] of x [b, T, D], computed sequence by sequence.

    state: inputs before the first token, [b, D, W - 1].
    seq_idx: sequence numbers [b, T]. y is zero for negative numbers.
    """
    T, rows = x.shape[1], []
    for i, row in enumerate(torch.split(x, 1)):
        changes = torch.zeros(T - 1) if seq_idx is None else seq_idx[i, 1:] != seq_idx[i, :-1]
        edges = torch.tensor([0, *(changes.nonzero().flatten() + 1).tolist(), T])
        # Initial state: that of the first sequence, padded to W columns; zeros for the other sequences.
        h0 = None if state is None else F.pad(state[i:i + 1], (1, 0, 0, 0, 0, len(edges) - 2))
        y, _ = convolve(row, weight, bias, None, h0, activation, edges)
        rows.append(y if seq_idx is None else y * (seq_idx[i] >= 0)[:, None])
    return torch.cat(rows)


# seq: lengths of the sequences in each row. padding: the second of them is padding. others: dtype of all
# tensors except x. last: channels are contiguous, as in layers.
make_fn = Maker(
    {"x": Input("B D T"), "weight": Input("D W", dtype="others"),
     "bias": Input("D", dtype="others", when="given"),
     "initial_states": Input("B D past", dtype="others", when="given"), "seq_idx": SEQ_IDX},
    {"B": 2, "D": 20, "T": 70, "W": 4, "seq": (), "padding": False, "others": "same", "last": True},
    lambda facts: {"past": facts["W"] - 1}, channels_last("x"))


def fn_reference(
    x: Tensor, weight: Tensor,
    bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    activation: str | None = "silu", return_final_states: bool = True) -> tuple[Tensor, Tensor | None]:
    """Compute causal_conv1d_fn in float64: y, and the final states if they are requested."""
    y = convolved(x.mT, weight, bias, initial_states, seq_idx, activation).mT
    before = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if initial_states is None else initial_states
    return y, torch.cat([before, x], 2)[:, :, x.shape[2]:] if return_final_states else None


def in_place(function: Callable[..., Tensor], name: str, **given: Any) -> tuple[Tensor, ...]:
    """Call a function that updates a state in place, first without gradients (its kernel), then with them.

    Returns (y with gradients, y without, state after the call without, state after the call with). The first
    call gets a non-contiguous view of a state, through which it must write.

    name: the function's argument that is the state.
    """
    behind, after = given[name].mT.contiguous(), given[name].clone()
    with torch.no_grad():
        without = function(**{**given, name: behind.mT})
    return function(**{**given, name: after}), without, behind.mT, after


def stepped(pool: Tensor, indices: Tensor | None,
            step_of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return what ``in_place`` returns, for a reference that updates states out of place.

    pool: the states.
    indices: entry of the pool for each row; a negative index means no state, and a y of zeros. None: row i
        has entry i.
    step_of: takes the states of the rows and returns (y, new states).
    """
    rows = torch.arange(len(pool)) if indices is None else indices.long()
    known = rows >= 0
    y, new = step_of(pool[rows.clamp(min=0)])
    after = pool.detach().clone()
    after[rows[known]] = new.detach()[known]
    y = torch.stack([row if here else torch.zeros_like(row) for row, here in zip(y, known, strict=True)])
    return y, y.detach(), after, after


def drawn_from_pool(draw: Draw, shape: str) -> Tensor:
    """Return a random index into a pool of states for each row; the second row has -1, for no state."""
    indices = torch.randperm(draw["pool"], generator=draw.generator)[:draw["B"]].int()
    indices[1] = -1
    return indices


def states(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of states, as a setting: the size of the pool, or one per row without a pool."""
    return {"states": facts["pool"] or facts["B"]}


# L: tokens that a state stores. ring: the state is a ring buffer. pool: number of states in the pool, 0 for
# no pool. others: dtype of all tensors except x.
make_window = Maker(
    {"x": Input("B D T"), "conv_state": Input("states D L", dtype="others"),
     "weight": Input("D W", dtype="others"), "bias": Input("D", dtype="others", when="bias"),
     "cache_seqlens": Input("B", lambda draw, shape: draw.integers(100, shape).int(), when="ring"),
     "conv_state_indices": Input("B", drawn_from_pool, when="pool")},
    {"B": 5, "D": 20, "T": 1, "W": 4, "L": 4, "bias": True, "ring": False, "pool": 0, "others": "same"},
    states)


def window_reference(x: Tensor, conv_state: Tensor, conv_state_indices: Tensor | None = None,
                     **given: Any) -> tuple[Tensor, ...]:
    """Compute mamba_causal_conv1d_update in float64."""
    return stepped(conv_state, conv_state_indices, lambda state: window(x, state, **given))


def tied(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes that depend on a case's settings `tied` and H.

    With `tied`, parameters have one number per head, otherwise one per channel. H = 0 leaves out heads and
    groups.
    """
    return {**states(facts), "H": facts["H"] or None, "G": facts["G"] if facts["H"] else None,
            **{f"{name}_each": None if facts["tied"] else facts[name] for name in "PN"}}


# tied: dt, A, D and dt_bias have one number per head, as in Mamba2; the call expands them. H = 0: a state
# without heads, as in Mamba1. P: width of a head. N: columns of a state.
make_step = Maker(
    {"state": Input("states H P N", dtype="state_dtype"), "x": Input("B H P"), "dt": Input("B H P_each"),
     "A": Input("H P_each N_each", lambda draw, shape: -draw(shape).abs(), FLOAT32), "B": Input("B G N"),
     "C": Input("B G N"), "D": Input("H P_each", dtype=FLOAT32, when="given"),
     "z": Input("B H P", when="given"),
     "dt_bias": Input("H P_each", dtype=FLOAT32, when="given"),
     "state_batch_indices": Input("B", drawn_from_pool, when="pool")},
    {"B": 3, "H": 4, "P": 20, "G": 2, "N": 24, "tied": True, "state_dtype": FLOAT32, "pool": 0}, tied)


def expanded(state: Tensor, given: Tensors) -> Tensors:
    """Return the tensors with dt, D, dt_bias and A expanded from heads to channels, as the op needs them.

    A is also expanded to the columns of the state. Tensors that already have channels are returned unchanged.
    """
    if given["dt"].ndim == given["x"].ndim:
        return given
    P, N = state.shape[-2:]
    return given | {name: given[name][..., None].expand(*given[name].shape, P)
                    for name in ("dt", "D", "dt_bias") if name in given} | {
        "A": given["A"][:, None, None].expand(-1, P, N)}


def call_step(state: Tensor, dt_softplus: bool, **given: Tensor) -> tuple[Tensor, ...]:
    """Call selective_state_update twice on expanded tensors, see ``in_place``."""
    return in_place(flashlin.selective_state_update, "state", state=state, **expanded(state, given),
                    dt_softplus=dt_softplus)


def step_reference(state: Tensor, state_batch_indices: Tensor | None = None, dt_softplus: bool = True,
                   **given: Tensor) -> tuple[Tensor, ...]:
    """Compute selective_state_update in float64, for states with or without heads."""
    given, heads = expanded(state, given), state.ndim == 4
    if not heads:  # compute one head, and drop its dimension from the results
        state = state.unsqueeze(1)
        given = {name: x.unsqueeze(0 if name in ("A", "D", "dt_bias") else 1) for name, x in given.items()}
    results = stepped(state, state_batch_indices, partial(step, **given, softplus=dt_softplus))
    return results if heads else tuple(x.squeeze(1) for x in results)


# others: dtype of weight and bias.
_make_norm = Maker({"x": Input("rows D"), "weight": Input("D", dtype="others"),
                    "bias": Input("D", dtype="others", when="given"), "z": Input("rows D", when="given")},
                   {"rows": (3, 37), "D": 96, "given": ("z",), "others": "same"})


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, z: Tensor | None = None,
    *,
    kind: str, is_rms_norm: bool = False, group_size: int | None = None,
    eps: float = 1e-6, norm_before_gate: bool = True) -> Tensor:
    """Compute a gated norm in float64.

    kind: ``rms`` or ``layer``, the kind of the op.
    """
    if z is not None and not norm_before_gate:
        x, z = x * silu(z), None
    groups = x.shape[-1] // (group_size or x.shape[-1])
    return normalise("rms" if is_rms_norm else kind, x, None, weight, bias, eps, groups, z)[0]


_scan = Op("mamba_chunk_scan_combined", make_scan, partial(scan, dt_softplus=True), SCAN,
           ("y", "ht", "states"), {"dt_softplus": True, "return_final_states": True, "chunk_size": 64})
_selective = Op("selective_scan_fn", make_selective.having(last=True),
                partial(selective, delta_softplus=True), SCAN, ("y", "ht"),
                {"delta_softplus": True, "return_last_state": True})
_SIZES: dict[str, Any] = {"headdim": 16, "ngroups": 2, "rmsnorm_eps": 1e-5}
_layer = Op("mamba_split_conv1d_scan_combined", make_layer, partial(layer_reference, **_SIZES), LAYER,
            ("y", "ht"), {**_SIZES, "conv1d_bias": None, "chunk_size": 64, "return_final_states": True})
_fn = Op("causal_conv1d_fn", make_fn, fn_reference, SCAN, ("y", "ht"),
         {"activation": "silu", "return_final_states": True})
_window = Op("mamba_causal_conv1d_update", make_window, window_reference, SCAN, UPDATE,
             {"activation": "silu"}, partial(in_place, flashlin.mamba_causal_conv1d_update, "conv_state"),
             ("conv_state",))
_step = Op("selective_state_update", make_step, step_reference, SCAN, UPDATE, {"dt_softplus": True},
           call_step, ("state",))
_rmsnorm, _layernorm = (
    Op(name, _make_norm, partial(norm_reference, kind=kind), SCAN, {"y": "rows D"}, {"bias": None})
    for name, kind in (("rmsnorm_fn", "rms"), ("layernorm_fn", "layer")))
VARLEN, ONLY_Y = {"return_varlen_states": True}, {"return_final_states": False}
# The case gate-first has 16 heads, so eight per group, because the norm enlarges rounding errors. At the
# first tokens of a sequence, y is little more than D x. With the usual two heads per group and small values
# of D, the norm divides by nearly 0, which enlarges the rounding of B and C to 16 bits. Over 12 seeds, the
# error of dconv1d_weight is then up to 0.019 (up to 0.034 if a head has 64 columns). With eight heads per
# group, it is up to 0.005.
GATE_FIRST, LINEAR = {"norm_before_gate": False}, {"activation": None}
CASES: list[Case] = [
    _scan("random", quick=True), _scan("bare", given=(), T=70),
    _scan("wide-D", {"dt_limit": (0.05, 0.2)}, of_D="V", T=70), _scan("one-group", G=1, H=6, T=70),
    _scan("no-groups", G=4, T=70), _scan("no-gate", given=("D", "initial_states"), T=70),
    _scan("no-softplus", {"dt_softplus": False}, step="large", T=70), _scan("large-steps", step="large"),
    _scan("tiny-steps", step="tiny", T=70), _scan("forgetting", step="forgetting", seq=(5, 1, 40, 24), T=70),
    _scan("sequences", seq=(5, 1, 60, 70, 14)), _scan("in-parts", B=1, T=1600),
    _scan("in-parts-wide", B=1, T=1600, H=24, V=64, G=1, K=128),
    _scan("token-each", seq=(1,) * 66, B=1, T=66, given=("initial_states",)), _scan("one-token", T=1),
    _scan("packed", VARLEN, edges=(0, 1, 1, 66, 130, 150)),
    _scan("packed-no-state", VARLEN, edges=(0, 40, 40), given=("z",)),
    _scan("packed-and-numbered", VARLEN, edges=(0, 30, 70), seq=(10, 20, 40)),
    _scan("same-dtype", others="same", T=70), _scan("odd", V=36, K=100, T=70),
    _scan("real", B=1, T=70, H=16, V=64, G=1, K=128), _scan("whole-chunks", T=192, H=4, V=64, G=2, K=128),
    _scan("whole-chunks-many-heads", B=2, T=128, H=20, V=64, G=1, K=128),
    _scan("real-eight-groups", B=1, T=9, H=80, V=64, G=8, K=128), _selective("random", quick=True),
    _selective("tokens-together", last=False), _selective("bare", given=(), T=33),
    _selective("one-token", T=1), _selective("groups", G=2, D=70), _selective("a-group-each", G=3, D=3, T=40),
    _selective("no-gate", given=("D",), T=64),
    _selective("no-softplus", {"delta_softplus": False}, step="positive", given=("D", "z")),
    _selective("large-steps", step="large"), _selective("tiny-steps", step="tiny"),
    _selective("forgetting", step="forgetting", T=40), _selective("same-dtype", others="same"),
    _selective("one-state", N=1, T=40), _selective("odd-states", N=23, T=40),
    _selective("many-states", N=130, D=5, T=40), _selective("one-channel", D=1, N=3),
    _selective("real", B=1, D=256, T=200), _layer("random", quick=True, of_D="V"),
    _layer("gate-first", GATE_FIRST, seq=(30, 2, 58), H=16), _layer("bare", LINEAR, given=(), T=40),
    _layer("everything", {"ngroups": 1}, given=None, M=12, T=40, G=1),
    _fn("random", quick=True), _fn("channels-first", last=False), _fn("bare", LINEAR, given=()),
    _fn("sequences", ONLY_Y, seq=(1, 2, 40, 27), given=("bias",)),
    _fn("sequences-state", ONLY_Y, seq=(2, 40, 28)),
    _fn("sequences-channels-first", ONLY_Y, last=False, seq=(3, 40, 27)),
    _fn("padding", ONLY_Y, seq=(20, 3, 47), padding=True),
    _fn("one-token", T=1), _fn("short", T=2), _fn("W=2", W=2), _fn("W=1", W=1, given=("bias",)),
    _fn("fp32-others", others="float32"), _window("random", quick=True), _window("W-1", L=3),
    _window("long-state", L=7, D=130), _window("bare", LINEAR, bias=False), _window("ring", L=3, ring=True),
    _window("ring-long", L=9, ring=True), _window("pool", pool=9, L=3),
    _window("pool-ring", pool=9, L=5, ring=True), _window("tokens", T=3), _window("many-tokens", T=9, L=3),
    _window("tokens-ring", T=3, L=5, ring=True), _window("many-tokens-ring", T=9, L=4, ring=True),
    _window("fp32-state", others="float32"), _window("W=2", W=2, L=1), _window("W=1", W=1, L=1),
    _step("random", quick=True), _step("general", tied=False), _step("no-heads", tied=False, H=0),
    _step("bare", {"dt_softplus": False}, given=()), _step("pool", pool=7),
    _step("pool-general", pool=7, tied=False, H=0), _step("same-dtype", state_dtype="same"),
    _step("no-bias", given=("D",)), _step("mamba1", tied=False, H=0, P=130, N=16),
    _step("real", B=2, H=80, P=64, G=8, N=128), _step("real-one-group", B=2, H=8, P=64, G=1, N=128),
    _rmsnorm("random", quick=True), _rmsnorm("gate-first", GATE_FIRST),
    _rmsnorm("no-gate", given=()),
    _rmsnorm("groups", {"group_size": 24, "eps": 1e-5}, others="float32"),
    _rmsnorm("groups-gate-first", {"group_size": 24, **GATE_FIRST}),
    _layernorm("random", quick=True, given=("z", "bias")),
    _layernorm("groups-gate-first", {"group_size": 32, **GATE_FIRST}, given=("z", "bias")),
    _layernorm("rms", {"is_rms_norm": True})]
