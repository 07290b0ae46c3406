"""The table of known flaws, KNOWN_FLAWS: slowdowns, wrong results and failures of other packages.

Add a flaw as one ``Flaw(...)`` literal, or in a shorter form such as ``_Patched(...)``. Doctor, ``flashlin
why``, docs/troubleshooting.md and the tests read the table.

A flaw is matched with the installed packages, the GPU and the functions to which the loaded models are bound.
It is never matched with the calls of a program, because flashlin cannot see them.
"""
from __future__ import annotations

from functools import partial

from flashlin.compat.known import FLA, Flaw

GDN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")
KDA = ("kimi_linear", "glm5_next", "bailing_hybrid")
MAMBA2 = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
MAMBA = ("mamba", "falcon_mamba", "jamba")
INKLING = ("inkling", "inkling2", "inkling2_loop")
CONV = ("lfm2", "lfm2_moe", "lfm3", *INKLING)
MODELS = (*GDN, *KDA, *MAMBA2, *MAMBA, "zamba", *CONV)
UNPATCHED = ("minimax", "recurrent_gemma", "zaya")  # recurrent models for which flashlin has no functions

_TF = "https://github.com/huggingface/transformers/"
_TRIED = "tested with transformers 5.23.0"
_READ = "found in the source of transformers {}"
_PATCH = 'flashlin.patch("transformers")'
# Shared fields of flaws. _OfFla, _OfTransformers: flaws of one package. _Patched: flaws that flashlin's patch
# of transformers removes. _InSplit: flaws of the fused kernel that models use for training.
_OfFla = partial(Flaw, package="fla")
_OfTransformers = partial(Flaw, package="transformers")
_Patched = partial(_OfTransformers, mended_by=("transformers",))
_InSplit = partial(_Patched, mended_from="5.15.0", kernels=("mamba_split_conv1d_scan_combined",),
                   bound=("mamba_ssm", "hub kernels", "flashlin"))


def _forgetful(id: str, models: tuple[str, ...], fixed_in: str | None, source: str) -> Flaw:
    return Flaw(
        id=id, package="transformers", models=models, fixed_in=fixed_in, proof=source,
        effect="if a call continues a cached prompt with several tokens at once, the state is dropped, with "
               "any kernel: the result is that of the new tokens alone, or an error",
        need="continue token by token, or run the whole prompt again"
             + (f', or pip install "transformers>={fixed_in}"' if fixed_in else ""))


KNOWN_FLAWS: tuple[Flaw, ...] = (
    # --- slow, or ends with an error ---
    _OfFla(
        id="fla-without-gpu", always=True, card="no gpu",
        effect="its Triton kernels cannot start without a GPU (RuntimeError: 0 active drivers), and models "
               "of transformers 5.15 and newer also call them on the CPU",
        need='flashlin.patch("fla", "transformers"), which runs plain torch here', mended_by=("fla",),
        symptoms=("RuntimeError: 0 active drivers ([]). There should only be one",),
        proof="tested with fla 0.6.0"),
    _OfFla(
        id="fla-gated-backward-hopper", always=True, card="hopper-gated-backward-640",
        effect="its gated chunked backward gives wrong gradients on this GPU with this Triton; fla 0.6.0 "
               "raises an exception instead, so training of Gated DeltaNet stops",
        need='flashlin.patch("fla", "transformers"), or Triton 3.7.1', mended_by=("fla",),
        symptoms=("on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg",), proof=FLA + "640"),
    _Patched(
        id="decoding-in-torch", always=True, since="5.15.0", fixed_in="5.16.0", beside=(("fla", None),),
        card="gpu",
        effect="Gated DeltaNet models decode in a torch loop although fla is installed: they look for a "
               "function recurrent_gated_delta_rule, which fla does not have",
        need=f'{_PATCH}, or pip install "transformers>=5.16"', proof=_TF + "pull/47625"),
    _Patched(
        id="fla-core-alone", always=True, since="5.15.0", fixed_in="5.17.0", beside=(("fla-core", None),),
        without=("flash-linear-attention",), card="gpu",
        effect="models look for fla's functions only in its root module, which has none of them if only "
               "fla-core is installed, and silently use their torch functions",
        need=f'{_PATCH}, or pip install flash-linear-attention, or pip install "transformers>=5.17"',
        proof=_READ.format("5.15.1")),
    _Patched(
        id="broken-called-missing", always=True, noise=True, since="5.15.0",
        broken=("fla", "mamba_ssm", "causal_conv1d"),
        effect='a package that is installed but cannot be imported is reported as "not installed" (before '
               "5.17 not at all), and models use their torch functions",
        need=f"{_PATCH}, or repair the import of that package",
        symptoms=("is falling back to its reference PyTorch implementation because",),
        proof=_TF + "issues/48718"),
    _Patched(
        id="hub-kernels-out-of-range", always=True, since="5.23.0", beside=(("kernels", "0.18.2"),),
        card="gpu",
        effect="it requires kernels 0.18.2 or newer, but the newest release of kernels is 0.17.2: "
               "use_kernels=True raises an ImportError, and models never use kernels of the hub or of "
               "flashlin.kernel_mapping()",
        need=f'{_PATCH}, or pip install "transformers<5.23"', proof=_READ.format("5.23.0 and 5.24.0")),
    _OfTransformers(
        id="fla-cache-swallowed", since="5.24.0", beside=(("fla", None),), mended_by=("fla",),
        effect="if a model of fla generates with its cache, transformers passes the cache as cache=, but the "
               "model's argument is called past_key_values: fla 0.6.0 drops the cache, and computes each new "
               "token after the first from one token alone; 0.5.2 reads all tokens again for each new one",
        need='flashlin.patch("fla"), or generate(..., use_cache=False)',
        symptoms=("FutureWarning: Both `past_key_values` and `cache` are set for",),
        proof="tested with transformers 5.24.0, fla 0.6.0 and 0.5.2"),
    _OfTransformers(
        id="fla-prompt-dropped", since="5.5.0", fixed_in="5.24.0", beside=(("fla", "0.6.0"),),
        mended_by=("fla",),
        effect="if a model of fla before 0.6 generates with its cache, it needs cache_position, which "
               "transformers no longer passes: many models silently read only the last token of the prompt",
        need='flashlin.patch("fla"), or pip install "flash-linear-attention>=0.6", or '
             "generate(..., use_cache=False)",
        proof="tested with fla 0.5.2 and transformers 5.0.0 to 5.24.0"),
    _OfFla(
        id="fla-beams", fixed_in="0.6.0", mended_by=("fla",),
        effect="if a model of fla generates with beams and its cache, it raises an error: transformers "
               "reorders the keys and values of the cache by beam, but fla's cache has neither",
        need='flashlin.patch("fla"), or pip install "flash-linear-attention>=0.6"',
        symptoms=("AttributeError: 'NoneType' object has no attribute 'index_select'",),
        proof="tested with fla 0.4.2 and 0.5.2"),
    _OfTransformers(
        id="cuda-weights-only", since="5.0.0", fixed_in="5.15.0", models=(*MAMBA2, *MAMBA, "zamba"),
        effect="if the weights are not on CUDA, or torch.compile traces the model, Mamba layers use their "
               "torch code, which stores a tensor for each pair of tokens; a warning says so at construction",
        need='pip install "transformers>=5.15", and then ' + _PATCH, proof=_READ.format("5.14.1")),
    # --- wrong if a tensor is used again ---
    _OfFla(
        id="rwkv7-input-overwritten", since="0.2.0", card="gpu", mended_by=("fla",),
        effect="if an RWKV-7 layer's input is read again after backward, it contains gradients: "
               "fused_addcmul_rwkv7 overwrites the input with them",
        need='flashlin.patch("fla"), or pass the layer a clone()',
        proof="seen on an H200 with fla 0.6.0; found in the source of 0.2.0, 0.4.2 and 0.5.2"),
    # --- wrong after a CUDA graph that could not be captured ---
    _OfFla(
        id="fla-capture-failed", card="gpu", mended_by=("fla",),
        effect="if a CUDA graph is captured around the first call with a cu_seqlens, or around any call of a "
               "packed delta product, the capture fails, because the call waits for the GPU. Lengths that "
               "fla cached for this tensor are then never computed; a later call with it reads out of bounds",
        need='flashlin.patch("fla"), whose calls do not wait, or call it once before the capture, and pass '
             "cu_seqlens.clone() after a capture that failed",
        proof="seen on an H100 with fla 0.6.0"),
    # --- wrong because a token depends on later tokens ---
    _OfFla(
        id="fla-mom-sees-ahead",
        effect="if the model Mom trains, its convolutions run from one memory, row or document into the "
               "next: the result of a token depends on later tokens, on other rows and on other documents",
        need="train it in eval() mode (before fla 0.6.0: with rows of over 64 tokens)",
        proof="tested with fla 0.6.0, also on an H200; found in the source of 0.4.2 and 0.5.2"),
    _OfFla(
        id="fla-mom-order", mended_by=("fla",),
        effect="if a call of the model Mom has up to 32 tokens, where each token counts once for every "
               "memory that it goes to, its sort puts the tokens of a memory into any order: results depend "
               "on later tokens",
        need='flashlin.patch("fla")',
        proof="tested with fla 0.6.0 (CPU; sort: H200, torch 2.11); found in the source of 0.4.2 and 0.5.2"),
    # --- wrong if documents are packed into a row ---
    _OfFla(
        id="fla-packed-models",
        effect="if documents are packed, with cu_seqlens, they leak into each other in the models "
               "LinearAttention, Mamba, Mamba2 and Samba: LinearAttention passes cu_seqlens to no layer, and "
               "the layers of the others do not keep documents apart",
        need="one document per row, padded", proof="tested with fla 0.4.2 and 0.6.0"),
    _Patched(
        id="packing-ignored", since="5.15.0", fixed_in="5.20.0", models=(*GDN, *MAMBA2), bound=("torch",),
        effect="if documents are packed, the torch functions accept cu_seqlens or seq_idx but ignore them: "
               "the state of one document leaks into the next",
        need=_PATCH, proof=_READ.format("5.15.1 and 5.19.0")),
    _Patched(
        id="kda-packing-dropped", since="5.15.0", models=KDA,
        effect="if documents are packed, they leak into each other even with fla: the call passes "
               "cu_seq_lens_q, but the function's argument is called cu_seqlens, so it is dropped",
        need=_PATCH, proof=_TRIED),
    _Patched(
        id="position-ids-alone",
        models=tuple(name for name in MODELS if name not in (*MAMBA, "zamba", "inkling")),
        mended_from="5.15.0",
        effect="if documents are packed and only position_ids or a mask tell them apart, as with sdpa, they "
               "leak into each other: nothing computes cu_seq_lens_q or seq_idx from these",
        need=f"{_PATCH}, or a collator that returns cu_seq_lens_q and seq_idx "
             "(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True))",
        proof=_TRIED),
    _OfTransformers(
        id="mamba-without-seq-idx", models=MAMBA,
        effect="if documents are packed, they leak into each other: these models have no seq_idx, whatever "
               "kernel they call",
        need="one document per row, padded", proof=_TRIED),
    _Patched(
        id="mamba2-drops-arguments", models=("mamba2",), mended_from="5.15.0",
        effect="if documents are packed, they leak into each other: Mamba2ForCausalLM does not pass seq_idx "
               "to its layers",
        need=f"{_PATCH}, or one document per row, padded", proof=_TRIED),
    _Patched(
        id="granite-packed-attention", models=("granitemoehybrid",), mended_from="5.15.0",
        effect="if documents are packed, the model's Mamba layers keep them apart, but its attention layers "
               "do not: their mask ignores documents",
        need=f"{_PATCH}, or one document per row, padded", proof=_TRIED),
    _OfTransformers(
        id="own-mask-packed-attention", fixed_in="5.2.0", models=("bamba", "falcon_h1", "zamba", "zamba2"),
        effect="if documents are packed, attention reads across them, unless it is flash attention: the "
               "model computes its own mask, from attention_mask alone",
        need='one document per row, padded, or pip install "transformers>=5.2"',
        proof="tested with transformers 5.0.0; found in the source of 5.1.0 and 5.2.0"),
    _OfTransformers(
        id="zamba-packed-convolution", models=("zamba",),
        effect="if documents are packed, only the model's convolution keeps them apart; its scan does not",
        need="one document per row, padded", proof=_TRIED),
    _Patched(
        id="packed-attention-beside-mask-or-cache", mended_from="5.15.0",
        models=tuple(name for name in MODELS if name not in ("mamba", "falcon_mamba", "mamba2", "glm5_next")),
        effect="if documents are packed, and the call has an attention_mask [B, T] or leaves use_cache on, "
               "attention ignores position_ids: it reads across documents, unless it is flash attention",
        need=f"{_PATCH}, or use_cache=False and no attention_mask", proof="tested with transformers 5.24.0"),
    _OfTransformers(
        id="indexed-packed-attention", models=("glm5_next",),
        effect="if documents are packed, the model's attention selects tokens by an index that ignores "
               "documents, so it reads across documents with any mask",
        need="one document per row, padded", proof="tested with transformers 5.24.0"),
    _OfTransformers(
        id="recurrent-not-patched", models=UNPATCHED,
        effect="if documents are packed, the model's recurrent layers carry state from one document into the "
               "next, and flashlin has no functions to replace them",
        need="one document per row, padded", proof="tested with transformers 5.24.0"),
    _OfTransformers(
        id="inkling-packed-convolution", models=("inkling",),
        effect="if documents are packed, the model's attention may keep them apart, but its convolutions do "
               "not: they get no seq_idx",
        need="one document per row, padded", proof=_TRIED),
    # --- wrong if rows are padded or continued ---
    _OfFla(
        id="fla-mom-cache",
        effect="if the model Mom generates with beams, it raises an error; if a call continues its cached "
               "prompt with several tokens at once, and a memory gets fewer of these than its convolution is "
               "wide, the convolution reads zeros in place of earlier tokens, or the call raises an error",
        need="one beam, and continue token by token, or use_cache=False",
        proof="tested with fla 0.6.0; the beams and the errors also with 0.4.2 and 0.5.2"),
    _forgetful("mamba-continuation", (*MAMBA, "zamba"), None, _TRIED),
    _forgetful("gdn-continuation", GDN, "5.7.0",
               "tested with transformers 4.57.6 to 5.8.0; found in the source of 5.7.0"),
    _forgetful("mamba2-continuation", MAMBA2, "5.13.0",
               "tested with transformers 4.57.6 to 5.13.0; found in the source of 5.12.0"),
    _forgetful("lfm-continuation", ("lfm2", "lfm2_moe"), "5.15.0",
               "tested with transformers 4.57.6 to 5.15.1"),
    _OfTransformers(
        id="bamba-positions", models=("bamba",),
        effect="if a call continues from a cache without position_ids, attention counts positions from 0 "
               "again: the logits are wrong by 2e-2 (generate passes the positions)",
        need="pass position_ids",
        proof="tested with transformers 5.15.1 and 5.23.0; found in the source of 5.5.0"),
    _OfTransformers(
        id="sum-over-wrong-chunks", fixed_in="5.15.0", models=("zamba2", "nemotron_h"),
        effect="if the Mamba layers use their torch code and rows are longer than chunk_size, the states of "
               "the chunks are summed over the wrong axis: the logits are wrong by 1e-3, and the gradients "
               "of A_log and dt_bias by 60 % or more",
        need=f'pip install "transformers>=5.15"; with weights on CUDA also {_PATCH}',
        proof="tested with transformers 4.57.6 to 5.14.1"),
    _OfTransformers(
        id="padding-at-batch-1", fixed_in="5.15.0", models=(*GDN, *MAMBA2),
        effect="if a batch of one row is padded, the padding is not masked, and changes the state",
        need="no padding at batch size 1", proof=_TF + "pull/46773"),
    _InSplit(
        id="split-left-padding", models=MAMBA2,
        effect="if training rows are padded on the left, the fused kernel ignores the mask after the "
               "convolution: the gradients are wrong by 2 to 90 %",
        need=f"padding on the right; with transformers 5.15 or newer also {_PATCH}",
        proof="tested with transformers 5.14.1 to 5.23.0"),
    _InSplit(
        id="falcon-h1-norm-order", models=("falcon_h1",),
        effect="if mamba_rms_norm is on, the fused kernel, which is used for training, applies the gate "
               "before the norm, whatever mamba_norm_before_gate says: the loss is wrong by 5e-2",
        need=f"{_PATCH} with transformers 5.15 or newer", proof=_TRIED),
    _InSplit(
        id="mamba2-groups-in-split", fixed_in="5.20.0", models=("mamba2",),
        effect="if n_groups is above 1, the fused kernel, which is used for training, normalises each group, "
               "but the model's own code normalises the whole row: their gradients have nothing in common",
        need=f"{_PATCH} with transformers 5.15 or newer", proof="tested with transformers 4.57.6 to 5.19.0"),
)
