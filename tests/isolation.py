"""Check for every op that NaN or inf in one token of one head and sequence does not reach unrelated results.

A run with finite numbers finds the unrelated results. It replaces a region of the inputs by other finite
numbers. Outputs and gradients that stay bitwise the same do not depend on the region. They must also stay
the same when a token of the region becomes NaN or inf. The region is

    for outputs
        the chunk of 64 tokens with the token, in its head and sequence (a chunk is a product of matrices)
    for gradients
        the whole head and sequence (dk of an early token depends on later tokens)
    for gradients, if NaN or inf is in the gradient of an output
        the chunk of the token, in the gradient of that output
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import flashlin
from flashlin.dispatch import OPS
from flashlin.testing.cases.op import facts_of, op_of
from tests.hostile import case_of

CHUNK = 64
SIZES = {"B": 2, "T": 130, "H": 2, "C": 6, "K": 8, "V": 8, "D": 6, "W": 4, "R": 3, "P": 200,
         "E": 16, "O": 1, "Z": 50, "M": 16, "F": 32}
EDGES = (0, 5, 5, 75, 175, 182)  # two long sequences, an empty one, and a short one at each end
# The sequence number of each token.
NUMBERS = [n for n, (first, last) in enumerate(pairwise(EDGES)) for _ in range(first, last)]
SEQUENCE = 2  # the packed sequence that receives NaN or inf
GATES = ("g", "gk", "gv", "w", "A", "ADT")

Tensors = dict[str, torch.Tensor]


class Call(NamedTuple):
    """One call of an op, with the layouts of its tensors.

    inputs: "name:LETTERS" for each tensor, one letter for each dimension. NaN must not spread along B, N
        (sequences), T, H and C (independent channels); it may spread along other dimensions. "*name" has no
        gradient.
    outputs: the letters of each output.
    extra: further arguments.
    packed: the sequences are packed by cu_seqlens.
    at_once: number of tokens in a region; NaN may reach all outputs of the region.
    function: replaces the op's function.
    numbered: seq_idx separates the sequences of a row. States then belong to the first and the last
        sequence, and NaN may reach all heads of its own sequence.
    shared: names of inputs where the first token after a region also affects the region. NaN in an output's
        gradient may therefore reach the gradients of that token.
    """
    op: str
    inputs: str
    outputs: str
    extra: Mapping[str, Any] = MappingProxyType({})
    packed: bool = False
    at_once: int = CHUNK
    function: Callable[..., Any] | None = None
    numbered: bool = False
    shared: str = ""

    def __str__(self) -> str:
        layout = "numbered" if self.numbered else "packed" if self.packed else "dense"
        return "-".join([self.op, layout, *(name for name in self.extra if name != "output_final_state")])

    def layouts(self) -> dict[str, str]:
        return dict(one.lstrip("*").split(":") for one in self.inputs.split())

    def shape(self, letters: str) -> tuple[int, ...]:
        N = len(EDGES) - 1 if self.packed else 1 if self.numbered else SIZES["B"]
        sizes = {**SIZES, "N": N, **({"B": 1, "T": EDGES[-1]} if self.packed or self.numbered else {})}
        return tuple(sizes[letter] for letter in letters)

    def make(self, seed: int) -> Tensors:
        """Return random inputs with weak decays, so that a change of one token affects all later tokens."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, letters in self.layouts().items():
            x = torch.randn(self.shape(letters), generator=generator,
                            device="cpu").to(torch.get_default_device())
            small = name in ("k", "kk", "a", "b", "B", "p") and letters.endswith("K")
            made[name] = (-0.02 * x.abs() if name in GATES else x.sigmoid() if name in ("beta", "dt", "DT")
                          else 0.3 * x if small else x)
        return made

    def cotangents(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return [torch.randn(self.shape(letters), generator=generator,
                            device="cpu").to(torch.get_default_device())
                for letters in self.outputs.split()]

    def place(self, letters: str, tokens: str) -> tuple[Any, ...]:
        """Return the index of the chosen tokens in a tensor with these dimension letters, in one head.

        tokens: "token" (the first token of a chunk; in packed calls, one inside of it), "part" (its chunk),
        "after" (the token after the chunk) or "all" (its whole sequence). In numbered calls, all but "token"
        select every head.
        """
        first, last = EDGES[SEQUENCE:SEQUENCE + 2] if self.packed or self.numbered else (0, SIZES["T"])
        at = CHUNK + 2 * self.packed
        begin = at // self.at_once * self.at_once
        token, part = first + at, slice(first + begin, min(first + begin + self.at_once, last))
        if self.extra.get("reverse"):  # a reverse op counts tokens and chunks from the end
            token, part = first + last - 1 - token, slice(first + last - part.stop, first + last - part.start)
        after = slice(part.stop, min(part.stop + 1, last))
        rows = {"token": token, "part": part, "after": after, "all": slice(first, last)}[tokens]
        index = {"T": rows, "B": 0, "N": SEQUENCE if self.packed else 0,
                 "H": slice(None) if self.numbered and tokens != "token" else 1, "C": 2}
        return tuple(index.get(letter, slice(None)) for letter in letters)

    def run(self, inputs: Tensors, cotangents: list[torch.Tensor]) -> tuple[list[torch.Tensor], Tensors]:
        """Return the outputs of the call, and its gradients by the name of the input."""
        constant = [one.split(":")[0][1:] for one in self.inputs.split() if one.startswith("*")]
        leaves = {name: x.clone().requires_grad_(name not in constant) for name, x in inputs.items()}
        bounds = {"cu_seqlens": torch.tensor(EDGES)} if self.packed else {
            "seq_idx": torch.tensor(NUMBERS)[None]} if self.numbered else {}
        found = (self.function or getattr(flashlin, self.op))(**leaves, **bounds, **self.extra)
        outputs = [found] if isinstance(found, torch.Tensor) else [x for x in found if x is not None]
        assert [tuple(x.shape) for x in outputs] == [tuple(x.shape) for x in cotangents]
        chosen = [(x, dx) for x, dx in zip(outputs, cotangents, strict=True) if x.requires_grad]
        names = [name for name, x in leaves.items() if x.requires_grad]
        if not chosen:
            return outputs, {}
        grads = torch.autograd.grad([x for x, _ in chosen], [leaves[name] for name in names],
                                    [dx for _, dx in chosen], materialize_grads=True, allow_unused=True)
        return [x.detach() for x in outputs], dict(zip(names, grads, strict=True))


def changed(x: torch.Tensor, place: tuple[Any, ...], value: Any) -> torch.Tensor:
    x = x.clone()
    x[place] = value[place] if isinstance(value, torch.Tensor) else value
    return x


def kept(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are equal before and after, and not zero.

    An element that is always zero may be a product with zero, which becomes NaN for a NaN input. An example
    is dg of the first token without an initial state.
    """
    return (before == after) & (before != 0)


def leaks(call: Call, briefly: bool = False) -> Iterator[str]:
    """Yield a description of each result that NaN or inf reaches although it must not.

    briefly: puts NaN into all inputs at once and does not try inf, for slow calls.
    """
    inputs, others, cotangents = call.make(0), call.make(1), call.cotangents(0)
    layouts, out_layouts = call.layouts(), call.outputs.split()
    tokens = [name for name, letters in layouts.items() if "T" in letters or "B" in letters]
    states = [name for name, letters in layouts.items() if "N" in letters]
    outputs, grads = call.run(inputs, cotangents)

    def with_(names: list[str], where: str, value: Any) -> Tensors:
        return {name: changed(x, call.place(layouts[name], where),
                              value if not isinstance(value, dict) else value[name]) if name in names else x
                for name, x in inputs.items()}
    outputs_free = [kept(x, y)
                    for x, y in zip(outputs, call.run(with_(tokens, "part", others), cotangents)[0],
                                    strict=True)]
    far_outputs, far_grads = call.run(with_(tokens + states, "all", others), cotangents)
    states_free = [kept(x, y) for x, y in zip(outputs, far_outputs, strict=True)]
    grads_free = {name: kept(grads[name], x) for name, x in far_grads.items()}
    # Check the check itself: most outputs must not depend on the region, but every output of its token must.
    assert outputs_free[0].float().mean() > 0.6 and not outputs_free[0][call.place(out_layouts[0],
                                                                                   "token")].any()

    one_by_one = [(torch.nan, [name]) for name in tokens + states]
    for value, names in [(torch.nan, tokens)] if briefly else [*one_by_one, (torch.inf, tokens)]:
        found, found_grads = call.run(with_(names, "token", value), cotangents)
        free = states_free if names[0] in states else outputs_free
        yield from (f"{value} in {', '.join(names)} reaches output {n}"
                    for n, (x, y, where) in enumerate(zip(outputs, found, free, strict=True))
                    if not x[where].equal(y[where]))
        yield from (f"{value} in {', '.join(names)} reaches d{name}" for name, where in grads_free.items()
                    if not grads[name][where].equal(found_grads[name][where]))
    if grads:
        for n, letters in enumerate(out_layouts):
            # The new gradients are much larger, so that rounding cannot hide their effect.
            other = [changed(dx, call.place(letters, "part"), 1000 * call.cotangents(1)[n]) if i == n else dx
                     for i, dx in enumerate(cotangents)]
            after = call.run(inputs, other)[1]
            free = {name: kept(dx, after[name]) for name, dx in grads.items()}
            for name in call.shared.split():
                free[name][call.place(layouts[name], "after")] = False
            for value in (torch.nan,) if briefly else (torch.nan, torch.inf):
                broken = [changed(dx, call.place(letters, "token"), value) if i == n else dx
                          for i, dx in enumerate(cotangents)]
                found_grads = call.run(inputs, broken)[1]
                yield from (f"{value} in the gradient of output {n} reaches d{name}"
                            for name, where in free.items()
                            if not grads[name][where].equal(found_grads[name][where]))


def in_place(op: str, state: str) -> Callable[..., Any]:
    """Return a function that calls an op that updates a state in place, and returns the new state."""
    def function(**tensors: Any) -> Any:
        after = tensors.pop(state).clone()
        y = getattr(flashlin, op)(**tensors, **{state: after})
        return (y[0] if isinstance(y, tuple) else y), after
    return function


def losses(logits: torch.Tensor, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return flashlin.cross_entropy_loss(logits, torch.arange(len(logits)) % logits.shape[1], **extra)


def two_steps(op: str) -> Callable[..., Any]:
    """Return a function that calls a delta product with two keys per token, k and kk."""
    def function(q: torch.Tensor, k: torch.Tensor, kk: torch.Tensor, v: torch.Tensor, beta: torch.Tensor,
                 **rest: Any) -> Any:
        k, v, beta = (torch.stack(pair, 2).flatten(1, 2)
                      for pair in ((k, kk), (v, v / 2), (beta, beta / 2)))
        return getattr(flashlin, op)(q, k, v, beta=beta, num_householder=2, **rest)
    return function


def with_states(**tensors: Any) -> Any:
    """Call Mamba-3's scan with its four states as separate arguments; the op takes them as one tuple."""
    names = ("angle", "state", "k", "v")
    others = {name: x for name, x in tensors.items() if name not in names}
    return flashlin.mamba3_siso_combined(**others, Input_States=tuple([tensors[name] for name in names]))


LAST = {"output_final_state": True}
QKV, STATE = "q:BTHK k:BTHK v:BTHV", "initial_state:NHKV"
# Letters for dimensions whose names in the cases are longer than one letter.
LETTERS = {"HV": "H", "H*K": "E", "rows": "BT", "C*of": "C", "one": "O", "of_beta": ""}
# Facts and options that differ from the first case of the op.
FACTS: dict[str, dict[str, Any]] = {"fused_recurrent_gated_delta_rule": {"g": "random", "gv": "random"},
                                    "layernorm_fn": {"given": None}, "rmsnorm_fn": {"given": None},
                                    "fused_kda_gate": {"without": ("dt_bias",)}}
WEAK = {"layer_idx": 399, "num_layers": 400}  # a late layer has weak decays
EXTRA: dict[str, list[dict[str, Any]]] = {
    **{f"{mode}_lightning_attn": [{**LAST, **WEAK}] for mode in ("chunk", "fused_recurrent")},
    "fused_recurrent_simple_gla": [LAST, {**LAST, "reverse": True}], "group_norm": [{"num_groups": 2}],
    "causal_conv1d": [{**LAST, "activation": "silu"}], "token_shift": [{"output_cache": True}]}
# Aliases of other ops: each is tested in one layout only. True: packed, False: dense.
ONCE = {"fused_recurrent_retention": False, "fused_recurrent_linear_attn": False,
        "fused_recurrent_lightning_attn": False, "chunk_hgrn": False, "fused_chunk_simple_gla": True,
        "fused_chunk_retention": True, "fused_chunk_linear_attn": True}


def _both(op: str, inputs: str, outputs: str, extra: dict[str, Any] = LAST, **facts: Any) -> list[Call]:
    return [Call(op, inputs, outputs, extra, packed, **facts) for packed in (False, True)]


def _letters(shape: str) -> str:
    return "".join(LETTERS.get(name, name) for name in shape.split())


def _declared(op: str) -> list[Call]:
    """Return the calls of an op with the tensors and outputs that its cases declare.

    For an op without sequences, a region is a single token, so NaN must not reach any other token.
    """
    case = case_of(op)
    declared, facts = op_of(case), {**facts_of(case), **FACTS.get(op, {})}
    if not isinstance(declared.outputs, Mapping):
        return []
    inputs = " ".join(f"{'*' * (name in declared.constant)}{name}:{_letters(one.shape)}"
                      for name, one in declared.make.inputs.items() if one.made(name, facts))
    outputs = " ".join(_letters(shape) for shape in declared.outputs.values() if shape)
    always = {name: value for name, value in declared.always.items() if value is not None}
    sequences = ":N" in inputs  # only ops over sequences have states [N, ...] among their inputs
    layouts = (ONCE[op],) if op in ONCE else (False, True) if sequences else (False,)
    return [Call(op, inputs, outputs, extra, packed, CHUNK if sequences else 1)
            for extra in EXTRA.get(op, [always]) for packed in layouts]


SPECIAL: list[Call] = [
    *(call for op in ("chunk_gated_delta_product", "fused_recurrent_gated_delta_product")
      for call in _both(op, f"{QKV} g:BTH beta:BTH {STATE} kk:BTHK", "BTHV NHKV", function=two_steps(op))),
    # Without a state, dg of the first token is only rounding noise, so g has no gradient here.
    Call("parallel_simple_gla", f"{QKV} *g:BTH", "BTHV", {}, True),
    Call("parallel_retention", QKV, "BTHV", {}, True),
    Call("parallel_simple_gla", f"{QKV} *g:BTH", "BTHV BHTT", {"output_attentions": True}),
    Call("parallel_retention", QKV, "BTHV BHTT", {"output_attentions": True}),
    Call("causal_conv1d_fn", "x:BCT weight:CW bias:C", "BCT", {"activation": "silu"}),
    Call("mamba_chunk_scan_combined", "x:BTHV dt:BTH A:H B:BTHK C:BTHK D:H z:BTHV initial_states:NHVK",
         "BTHV NHVK", {"chunk_size": 64, "return_final_states": True}),
    # A NaN in the gradient of the final states reaches the whole last sequence, even dC, which does not
    # depend on that gradient. So the sequence counts as one region, and C has no gradient.
    Call("mamba_chunk_scan_combined", "x:BTHV dt:BTH A:H B:BTHK *C:BTHK D:H z:BTHV", "BTHV NHVK",
         {"chunk_size": 64, "return_final_states": True}, at_once=EDGES[-1], numbered=True),
    Call("mamba_chunk_scan_combined", "x:BTHV dt:BTH A:H B:BTHK C:BTHK", "BTHV", {"chunk_size": 64},
         at_once=EDGES[-1], numbered=True),
    Call("mamba_split_conv1d_scan_combined", "zxbcdt:BTZ conv1d_weight:FW conv1d_bias:F dt_bias:H A:H D:HV",
         "BTM", {"chunk_size": 64}, at_once=EDGES[-1], numbered=True),
    *_both("mamba3_siso_combined",
           "Q:BTHK K:BTHK V:BTHV ADT:BHT DT:BHT Trap:BHT Q_bias:HK K_bias:HK Angles:BTHR D:H Z:BTHV "
           "angle:NHR state:NHVK k:NHK v:NHV", "BTHV NHR NHVK NHK NHV", {"return_final_states": True},
           function=with_states, shared="DT Trap"),
    Call("selective_scan_fn", "u:BCT delta:BCT A:CK B:BKT C:BKT D:C z:BCT", "BCT BCK",
         {"delta_softplus": True, "return_last_state": True}),
    Call("selective_state_update", "*state:NHVK *x:BHV *dt:BHV *A:HVK *B:BHK *C:BHK", "BHV NHVK",
         function=in_place("selective_state_update", "state")),
    Call("causal_conv1d_update", "*x:BC *cache:NCW *weight:CW", "BC NCW",
         function=in_place("causal_conv1d_update", "cache")),
    Call("mamba_causal_conv1d_update", "*x:BC *conv_state:NCW *weight:CW", "BC NCW",
         function=in_place("mamba_causal_conv1d_update", "conv_state")),
    Call("mamba_split_conv1d_scan_combined", "zxbcdt:BTZ conv1d_weight:FW conv1d_bias:F dt_bias:H A:H D:HV",
         "BTM NHVK", {"chunk_size": 64, "return_final_states": True}),
    *(Call("rotary_embedding", "x:BTHK *cos:PR *sin:PR", "BTHK", {}, packed, 1) for packed in (False, True)),
    Call("cross_entropy_loss", "logits:TV", "T T", {"lse_square_scale": 0.1}, at_once=1, function=losses),
]
OWN = {call.op for call in SPECIAL}
CALLS: list[Call] = SPECIAL + [call for op, (_, mode) in OPS.items() if mode != "auto" and op not in OWN
                               for call in _declared(op)]
