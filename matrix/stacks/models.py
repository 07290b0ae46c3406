"""Define the models of the stacks, with a small configuration for each.

A model has two layers, at least one of them linear, and is as small as its package allows. Most models of fla
have one layer, because their reference results come from Triton's slow interpreter.
"""
from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

# Names of sizes in configurations, with small values. Each model gets the names that its configuration
# accepts.
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_head_dim": 16,
    "attention_hidden_size": 64, "max_position_embeddings": 256, "num_heads": 2, "expand_k": 1, "expand_v": 1,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_ssm": 64, "chunk_size": 16, "mamba_chunk_size": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4,
    "rel_extent": 64, "unpadded_vocab_size": None}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # so generation never ends early


class Model(NamedTuple):
    """One model of a package, with its configuration.

    classes: names of the class of the model and of its configuration. A layer has no configuration.
    options: options in addition to those of TINY.
    plain: options with which the package uses plain torch instead of refusing a CPU.
    """
    name: str
    package: str
    classes: tuple[str, str]
    options: Mapping[str, Any]
    plain: Mapping[str, Any] = MappingProxyType({})


def _transformers(name: str, base: str, **options: Any) -> Model:
    return Model(name, "transformers", (f"{base.removesuffix('Text')}ForCausalLM", f"{base}Config"), options,
                 {"use_mamba_kernels": False, "experts_implementation": "eager"})


def _fla(base: str, **options: Any) -> Model:
    return Model(base, "fla", (f"{base}ForCausalLM", f"{base}Config"),
                 {"head_dim": 16, "expand_v": 1.0, "num_hidden_layers": 1, **options})


def _layer(name: str, module: str, **options: Any) -> Model:
    return Model(f"{name} (layer)", "fla", (f"{module}.{name}", ""),
                 {"hidden_size": TINY["hidden_size"], "num_heads": 2, **options})


def _mamba_ssm(layer: str, **options: Any) -> Model:
    return Model(f"MambaLMHeadModel ({layer})", "mamba_ssm", ("MambaLMHeadModel", "MambaConfig"),
                 {"layer": layer, "d_state": 8, **options})


GDN: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
KDA: dict[str, Any] = {**GDN, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
DENSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
MODELS: tuple[Model, ...] = (
    _transformers("qwen3_next", "Qwen3Next", **GDN),
    _transformers("qwen3_5", "Qwen3_5Text", **GDN),
    _transformers("qwen3_5_moe", "Qwen3_5MoeText", **GDN),
    _transformers("qwen4_exp", "Qwen4ExpText", **GDN, ple_layer_ids=[], indexer_n_heads=2,
                  indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=64, indexer_compress_ratio=4),
    _transformers("olmo_hybrid", "OlmoHybrid", **GDN),
    _transformers("lara_mini", "LaraMini", layer_types=["linear_attention", "sliding_attention"]),
    _transformers("kimi_linear", "KimiLinear", **KDA, **DENSE, q_lora_rank=None),
    _transformers("bailing_hybrid", "BailingHybrid", **KDA, **DENSE, qk_rope_head_dim=4),
    _transformers("glm5_next", "Glm5NextText", **KDA, **DENSE, qk_rope_head_dim=0, index_n_heads=2,
                  index_head_dim=16, index_topk=64, index_kpool=4)._replace(
        classes=("Glm5NextTextModel", "Glm5NextTextConfig")),  # the whole model also requires images
    _transformers("mamba", "Mamba"),
    _transformers("falcon_mamba", "FalconMamba"),
    _transformers("jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1),
    _transformers("zamba", "Zamba", num_hidden_layers=4, attn_layer_period=1, attn_layer_offset=0,
                  num_key_value_heads=4, attention_head_dim=16),
    _transformers("mamba2", "Mamba2", num_heads=8, n_groups=2),
    _transformers("bamba", "Bamba", attn_layer_indices=[1]),
    _transformers("falcon_h1", "FalconH1"),
    _transformers("granitemoehybrid", "GraniteMoeHybrid", layer_types=["mamba", "attention"]),
    _transformers("nemotron_h", "NemotronH", layers_block_type=["mamba", "attention"], n_groups=2),
    _transformers("zamba2", "Zamba2", layers_block_type=["mamba", "hybrid"], num_key_value_heads=4,
                  n_mamba_heads=4, attention_head_dim=16),
    _transformers("lfm2", "Lfm2", **CONV),
    _transformers("lfm2_moe", "Lfm2Moe", **CONV),
    _transformers("lfm3", "Lfm3", **CONV),
    _transformers("inkling", "InklingText"),
    _transformers("inkling2", "Inkling2Text", unpadded_vocab_size=TINY["vocab_size"]),
    _transformers("inkling2_loop", "Inkling2LoopText", unpadded_vocab_size=TINY["vocab_size"],
                  num_hidden_layers=3, loop_layer_index_start=1, loop_layer_index_end=2,
                  n_layers_per_attn_res_block=1),
    _fla("GatedDeltaNet"), _fla("DeltaNet"), _fla("RetNet"), _fla("GLA"), _fla("KDA"), _fla("HGRN"),
    _fla("HGRN2", expand_ratio=16), _fla("LinearAttention"), _fla("Mom"), _fla("RWKV6"),
    _fla("RWKV7", num_hidden_layers=2,
         **dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), 8)),
    _fla("Mamba"), _fla("Mamba2", head_dim=16), _fla("GatedDeltaProduct"), _fla("Comba"),
    _fla("GSA", num_slots=16), _fla("ABC", num_slots=16),
    _fla("YOCO", num_hidden_layers=2, num_self_decoder_layers=1, self_decoder_attn={"num_heads": 2},
         cross_decoder_attn={"num_heads": 2}),
    _fla("Samba", num_hidden_layers=2, attn=None), _fla("Mamba3", state_size=16),
    _fla("LogLinearMamba2", hidden_size=32, num_heads=4, vocab_size=64), _fla("CAT"), _fla("LightNet"),
    _fla("MesaNet"), _fla("PrecondGatedDeltaNet"), _fla("PrecondKDA"), _fla("Raven"),
    _fla("Rodimus", ska_attn={"num_heads": 2}), _fla("CyclicFlowAttention"), _fla("DeltaFormer"),
    _fla("ForgettingTransformer"), _fla("PaTHAttention"), _fla("Parallax"), _fla("WallTransformer"),
    _fla("StickBreakingAttention"), _fla("NSA", num_heads=32, num_kv_heads=2), _fla("MoBA"), _fla("BitNet"),
    _fla("MLA", qk_head_dim=16), _fla("Transformer"),
    _layer("SimpleGatedLinearAttention", "simple_gla"),
    _layer("BasedLinearAttention", "based", num_key_value_heads=2, feature_dim=8),
    _layer("ReBasedLinearAttention", "rebased", num_key_value_heads=2, feature_dim=8),
    _mamba_ssm("Mamba1"), _mamba_ssm("Mamba2", headdim=8, chunk_size=16),
)
# Recurrent models of transformers that ``patch("transformers")`` does not change.
UNPATCHED: tuple[Model, ...] = (
    _transformers("minimax", "MiniMax", layer_types=["linear_attention", "full_attention"]),
    _transformers("recurrent_gemma", "RecurrentGemma", block_types=["recurrent", "attention"]),
    _transformers("zaya", "Zaya", num_experts_per_tok=1))
# mamba_ssm has no torch path. transformers has the same models; only one parameter has another name.
COUNTERPARTS = {
    "MambaLMHeadModel (Mamba1)": _transformers("MambaLMHeadModel (Mamba1)", "Mamba"),
    "MambaLMHeadModel (Mamba2)": _transformers("MambaLMHeadModel (Mamba2)", "Mamba2", num_heads=8,
                                               n_groups=1, tie_word_embeddings=True)}

# (model, quantity) -> why the model itself mixes rows or documents. In these models no function of flashlin
# gets the bounds of rows or documents, or the right cache. ``excuse`` uses a reason only if the raw program
# raises an error. Such a program has no results that could show the same difference. In Triton's interpreter,
# raw fla 0.6.0 had the same errors to four digits.
_CUT = "in training, its convolutions continue from one row, document or memory into the next"
_ACROSS = "its attention looks across documents"
_KEPT = "its layers ignore cu_seqlens"
LEAKS: dict[tuple[str, str], str] = {
    ("zamba", "packed: seq_idx"): "its layers scan without seq_idx",
    ("granitemoehybrid", "packed: seq_idx"): _ACROSS,
    ("glm5_next", "packed: seq_idx"): _ACROSS,
    ("LinearAttention", "packed: cu_seqlens"): "its forward drops cu_seqlens before the layers",
    ("Mamba", "packed: cu_seqlens"): _KEPT,
    ("Mamba2", "packed: cu_seqlens"): _KEPT,
    ("Samba", "packed: cu_seqlens"): _KEPT,
    ("Mom", "padding"): _CUT,
    ("Mom", "packed: cu_seqlens"): _CUT}

# (model, beginning of an error) -> explanation of an error of the model itself whose message is unclear.
RAISES: dict[tuple[str, str], str] = {
    ("Mom", "IndexError: index "): "its cache has a state for each memory of a row, and is read as if it had "
                                   "one for each row",
    ("Mom", "AssertionError: Only chunk mode"):
        "before fla 0.6.0, it cannot train rows of 64 tokens or fewer",
    ("Mom", "AttributeError: 'NoneType' object has no attribute 'detach'"):
        "before fla 0.6.0, it returns no logits in training"}

# For transformers before 5.15: model -> sizes with which its torch functions and its branch for GPUs compute
# the same. In mamba2, the norm has groups only in one of these two implementations. The torch functions of
# the other two models join chunks wrongly, so a single chunk must contain the whole row. These torch
# functions also have a minimal time step, which is set close to 0 here.
_ONE_CHUNK = {"chunk_size": 128, "time_step_min": 1e-9}
BEFORE_5_15: dict[str, dict[str, Any]] = {
    "mamba2": {"n_groups": 1}, "nemotron_h": _ONE_CHUNK, "zamba2": _ONE_CHUNK}
# (model, quantity, verdict of its torch functions) -> why the model's own branch for GPUs has another
# verdict. In these entries, the torch functions are right, or wrong in another way. The same happens on a
# real GPU.
_ONE = "it continues from a cache only one token at a time"
ON_CUDA: dict[tuple[str, str, str], str] = {
    ("mamba", "padding", "agrees"): "its fused function supports no mask",
    ("falcon_mamba", "padding", "agrees"): "its fused function supports no mask",
    **{(name, "padding", "agrees"): "its fused function applies no mask after the convolution"
       for name in ("mamba2", "bamba", "falcon_h1", "granitemoehybrid")},
    ("bamba", "packed: seq_idx", "raises"): _ACROSS,  # used for transformers 5.0.0 and 4.57.6
    **{(name, "pieces", "raises"): "its scan starts from zero for each piece" for name in ("jamba", "zamba")},
    **{(name, "pieces", "differs"): _ONE for name in ("mamba2", "nemotron_h", "zamba2", "lfm2", "lfm2_moe")}}
# Models of these versions that look up no functions of another package, so that patching changes nothing.
UNTOUCHED = {"inkling": "its convolution is its own function, which only kernels of the hub can replace"}


def excuse(model: str, quantity: str, verdict: str, before: str, on_cuda: bool = False) -> str:
    """Return the reason why a patched model may have a worse verdict than the raw model.

    Return "" if there is no such reason.

    verdict: the verdict of the patched model.
    before: the verdict of the raw model.
    on_cuda: True if the patched model runs its branch for GPUs.
    """
    if verdict not in ("differs", "raises", "not patched") or verdict == before:
        return ""
    if on_cuda and verdict == "not patched":
        return UNTOUCHED.get(model, "")
    found = ON_CUDA.get((model, quantity, before), "") if on_cuda else ""
    if (verdict, before) == ("differs", "raises"):
        found = found or LEAKS.get((model, quantity), "")
    return found


def in_words(model: str, answer: str) -> str:
    """Return the explanation of an error of the model itself, or "" if ``RAISES`` has none."""
    return next((why for (name, begins), why in RAISES.items()
                 if name == model and answer.startswith(f"raises: {begins}")), "")


def in_mamba_ssm(name: str) -> str:
    """Return the name in mamba_ssm of a parameter of the model of transformers."""
    return name.replace("backbone.embeddings.", "backbone.embedding.")


class NoSuchModel(LookupError):
    """Raised if the installed version of a package does not have a model."""


def named(name: str) -> Model:
    return next(one for one in MODELS if one.name == name)


def build(model: Model, plain: bool = False) -> nn.Module:
    """Build a model with random weights that are not 0 or 1.

    A weight of 0 or 1 would hide an error in the computation with this weight.

    plain: use the options with which the package computes in plain torch.
    """
    torch.manual_seed(0)
    if plain:
        model = model._replace(options={**model.options, **model.plain})
    made = BUILDERS[model.package](model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.train()


def known(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options that the constructor of a class accepts."""
    names = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__annotations__", {}))
    return {name: value for name, value in options.items() if name in names}


def _class(module: str, name: str) -> Any:
    home = importlib.import_module(module)
    if not hasattr(home, name):
        raise NoSuchModel(f"{module} has no {name}")
    return getattr(home, name)


class WithHead(nn.Module):
    """A text model of transformers with an output head.

    The text model returns hidden states, and this class adds a linear layer that computes the logits.
    """

    def __init__(self, model: nn.Module, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None,
                past_key_values: Any = None, use_cache: Any = None, **options: Any) -> Any:
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache,
                         **options)
        return SimpleNamespace(logits=self.head(out.last_hidden_state), past_key_values=out.past_key_values)


def _of_a_configuration(home: str) -> Callable[[Model], nn.Module]:
    def build(model: Model) -> nn.Module:
        kind, config = (_class(home, name) for name in model.classes)
        given = {**known(config, TINY), **model.options, **TOKENS}
        made: nn.Module = kind(config(**given))
        headless = model.classes[0].endswith("TextModel")
        return WithHead(made, TINY["hidden_size"], TINY["vocab_size"]) if headless else made
    return build


class OneLayer(nn.Module):
    """A model of an embedding, one layer and a linear layer that computes logits."""

    def __init__(self, layer: nn.Module, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layer, self.head = layer, nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.layer(self.embedding(input_ids))
        return SimpleNamespace(logits=self.head(x[0] if isinstance(x, tuple) else x))


def _fla_program(model: Model) -> nn.Module:
    if model.classes[1]:
        return _of_a_configuration("fla.models")(model)
    module, _, name = model.classes[0].partition(".")
    layer = _class(f"fla.layers.{module}", name)(**model.options)
    return OneLayer(layer, TINY["vocab_size"], TINY["hidden_size"])


def _of_mamba_ssm(model: Model) -> nn.Module:
    kind = _class("mamba_ssm.models.mixer_seq_simple", model.classes[0])
    config = _class("mamba_ssm.models.config_mamba", model.classes[1])
    made: nn.Module = kind(config(d_model=TINY["hidden_size"], n_layer=2, vocab_size=TINY["vocab_size"],
                                  ssm_cfg=dict(model.options), pad_vocab_size_multiple=8))
    return made


BUILDERS: dict[str, Callable[[Model], nn.Module]] = {
    "transformers": _of_a_configuration("transformers"), "fla": _fla_program, "mamba_ssm": _of_mamba_ssm}
