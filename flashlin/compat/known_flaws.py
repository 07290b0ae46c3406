"""Silent slowdowns and wrong results of other packages, as data. Adding one is one ``Flaw(...)`` literal in
KNOWN_FLAWS, or a shorter form such as ``_Patched(...)``. Doctor and the tests read that tuple.

A flaw is matched on the installed packages, on the card, and on the functions that the loaded models are
bound to. It is never matched on what a program does with them, because flashlin cannot see that.
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
_TRIED = "tried with transformers 5.23.0"
_READ = "read in transformers {}"
_PATCH = 'flashlin.patch("transformers")'
# Flaws that have facts in common: of one package, of those that its patch mends, and of the fused kernel of
# models that train.
_OfFla = partial(Flaw, package="fla")
_OfTransformers = partial(Flaw, package="transformers")
_Patched = partial(_OfTransformers, mended_by=("transformers",))
_InSplit = partial(_Patched, mended_from="5.15.0", kernels=("mamba_split_conv1d_scan_combined",),
                   bound=("mamba_ssm", "hub kernels", "flashlin"))


def _forgetful(id: str, models: tuple[str, ...], fixed_in: str | None, source: str) -> Flaw:
    return Flaw(
        id=id, package="transformers", models=models, fixed_in=fixed_in, proof=source,
        effect="if a cached prompt goes on with several tokens at once, the state is dropped, with any "
               "kernel: the result is that of the new tokens alone, or an error",
        need="go on token by token, or run the whole prompt again"
             + (f', or pip install "transformers>={fixed_in}"' if fixed_in else ""))


KNOWN_FLAWS: tuple[Flaw, ...] = (
    # --- slow, or stopped ---
    _OfFla(
        id="fla-without-gpu", always=True, card="no gpu",
        effect="its Triton kernels cannot start without a GPU (RuntimeError: 0 active drivers), and models "
               "of transformers 5.15 and newer call them on the CPU, too",
        need='flashlin.patch("fla", "transformers"), which runs plain torch here', mended_by=("fla",),
        symptoms=("RuntimeError: 0 active drivers ([]). There should only be one",),
        proof="tried with fla 0.6.0"),
    _OfFla(
        id="fla-gated-backward-hopper", always=True, card="hopper-gated-backward-640",
        effect="its gated chunked backward gives wrong gradients on this card with this Triton, which fla "
               "0.6.0 answers with an exception: training Gated DeltaNet stops",
        need='flashlin.patch("fla", "transformers"), or Triton 3.7.1', mended_by=("fla",),
        symptoms=("on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg",), proof=FLA + "640"),
    _Patched(
        id="decoding-in-torch", always=True, since="5.15.0", fixed_in="5.16.0", beside=(("fla", None),),
        card="gpu",
        effect="Gated DeltaNet models decode in a torch loop although fla is there: they ask it for "
               "recurrent_gated_delta_rule, which it does not have",
        need=f'{_PATCH}, or pip install "transformers>=5.16"', proof=_TF + "pull/47625"),
    _Patched(
        id="fla-core-alone", always=True, since="5.15.0", fixed_in="5.17.0", beside=(("fla-core", None),),
        without=("flash-linear-attention",), card="gpu",
        effect="models look for fla's functions in its root module only, where fla-core alone has none, and "
               "take their torch functions without a word",
        need=f'{_PATCH}, or pip install flash-linear-attention, or pip install "transformers>=5.17"',
        proof=_READ.format("5.15.1")),
    _Patched(
        id="broken-called-missing", always=True, since="5.15.0", broken=("fla", "mamba_ssm", "causal_conv1d"),
        effect='a package that is there and cannot be imported is told as "not installed" (before 5.17 not '
               "at all), and models take their torch functions",
        need=f"{_PATCH}, or repair the import that is told above",
        symptoms=("is falling back to its reference PyTorch implementation because",),
        proof=_TF + "issues/48718"),
    _Patched(
        id="hub-kernels-out-of-range", always=True, since="5.23.0", beside=(("kernels", "0.18.2"),),
        card="gpu",
        effect="it requires kernels 0.18.2 or newer, but the newest release is 0.17.2, so "
               "use_kernels=True raises an ImportError, and models never use kernels of the hub or of "
               "flashlin.kernel_mapping()",
        need=f'{_PATCH}, or pip install "transformers<5.23"', proof=_READ.format("5.23.0 and 5.24.0")),
    _OfTransformers(
        id="fla-cache-swallowed", since="5.24.0", beside=(("fla", None),), mended_by=("fla",),
        effect="if a model of fla generates with its cache, it gets that as cache=, and its own is called "
               "past_key_values: fla 0.6.0 swallows it and from the second new token on goes on from one "
               "token alone, 0.5.2 reads everything again for each token",
        need='flashlin.patch("fla"), or generate(..., use_cache=False)',
        symptoms=("FutureWarning: Both `past_key_values` and `cache` are set for",),
        proof="tried with transformers 5.24.0, fla 0.6.0 and 0.5.2"),
    _OfTransformers(
        id="fla-prompt-dropped", since="5.5.0", fixed_in="5.24.0", beside=(("fla", "0.6.0"),),
        mended_by=("fla",),
        effect="if a model of fla before 0.6 generates with its cache, it waits for cache_position, which "
               "transformers hands on no more: many read nothing of the prompt but its last token, in silence",
        need='flashlin.patch("fla"), or pip install "flash-linear-attention>=0.6", or '
             "generate(..., use_cache=False)",
        proof="tried with fla 0.5.2 and transformers 5.0.0 to 5.24.0"),
    _OfFla(
        id="fla-beams", fixed_in="0.6.0", mended_by=("fla",),
        effect="if a model of it generates with beams and its cache, it raises: transformers puts keys and "
               "values in the order of the beams, and its cache has neither",
        need='flashlin.patch("fla"), or pip install "flash-linear-attention>=0.6"',
        symptoms=("AttributeError: 'NoneType' object has no attribute 'index_select'",),
        proof="tried with fla 0.4.2 and 0.5.2"),
    _OfTransformers(
        id="cuda-weights-only", since="5.0.0", fixed_in="5.15.0", models=(*MAMBA2, *MAMBA, "zamba"),
        effect="if the weights are not on CUDA, or torch.compile traces the model, Mamba layers take their "
               "torch way, which keeps a tensor for each pair of tokens; it is told once, when the model is "
               "built",
        need='pip install "transformers>=5.15", and then ' + _PATCH, proof=_READ.format("5.14.1")),
    # --- wrong where a tensor is used again ---
    _OfFla(
        id="rwkv7-input-overwritten", since="0.2.0", card="gpu", mended_by=("fla",),
        effect="if an RWKV-7 layer's input is read again after backward, it holds gradients: "
               "fused_addcmul_rwkv7 writes them over it",
        need='flashlin.patch("fla"), or hand the layer a clone()',
        proof="seen on an H200 with fla 0.6.0, read in 0.2.0, 0.4.2 and 0.5.2"),
    # --- wrong after a CUDA graph that could not be captured ---
    _OfFla(
        id="fla-capture-failed", card="gpu", mended_by=("fla",),
        effect="if a CUDA graph is captured around the first call with a cu_seqlens, or any of a packed delta "
               "product, that fails, because the call waits for the card; lengths that it cached for this "
               "tensor are never computed, and with it a later call reads outside of memory",
        need='flashlin.patch("fla"), whose calls do not wait; or call it once before, and after a capture '
             "that failed hand it cu_seqlens.clone()",
        proof="seen on an H100 with fla 0.6.0"),
    # --- wrong where a token sees what comes later ---
    _OfFla(
        id="fla-mom-sees-ahead",
        effect="if the model Mom trains, its convolutions run from one memory, row or document into the "
               "next: what a token gets depends on later ones, on the rows beside it and on other documents",
        need="train it in eval() (before fla 0.6.0 with rows of more than 64 tokens)",
        proof="tried with fla 0.6.0, on an H200, too, read in 0.4.2 and 0.5.2"),
    _OfFla(
        id="fla-mom-order", mended_by=("fla",),
        effect="if a call of the model Mom has up to 32 tokens, each counted for every memory that it goes "
               "to, its sort leaves a memory's tokens in any order: what a token gets depends on later ones",
        need='flashlin.patch("fla")',
        proof="tried with fla 0.6.0 on a CPU, the sort on an H200 with torch 2.11; read in 0.4.2 and 0.5.2"),
    # --- wrong where documents are packed into a row ---
    _OfFla(
        id="fla-packed-models",
        effect="if documents are packed, with cu_seqlens, they leak into each other in the models "
               "LinearAttention, Mamba, Mamba2 and Samba: the first hands it on to no layer, the layers of "
               "the others do not keep documents apart",
        need="one document a row, padded", proof="tried with fla 0.4.2 and 0.6.0"),
    _Patched(
        id="packing-ignored", since="5.15.0", fixed_in="5.20.0", models=(*GDN, *MAMBA2), bound=("torch",),
        effect="if documents are packed, the torch functions take cu_seqlens or seq_idx and ignore them: one "
               "document's state leaks into the next",
        need=_PATCH, proof=_READ.format("5.15.1 and 5.19.0")),
    _Patched(
        id="kda-packing-dropped", since="5.15.0", models=KDA,
        effect="if documents are packed, they leak into each other even with fla: the call carries "
               "cu_seq_lens_q, which the function knows as cu_seqlens, so it is dropped",
        need=_PATCH, proof=_TRIED),
    _Patched(
        id="position-ids-alone",
        models=tuple(name for name in MODELS if name not in (*MAMBA, "zamba", "inkling")),
        mended_from="5.15.0",
        effect="if documents are packed and only position_ids or a mask tell them apart, as with sdpa, they "
               "leak into each other: nothing makes cu_seq_lens_q or seq_idx of them",
        need=f"{_PATCH}, or a collator that returns cu_seq_lens_q and seq_idx "
             "(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True))",
        proof=_TRIED),
    _OfTransformers(
        id="mamba-without-seq-idx", models=MAMBA,
        effect="if documents are packed, they leak into each other: these models have no seq_idx, whatever "
               "kernel they call",
        need="one document a row, padded", proof=_TRIED),
    _Patched(
        id="mamba2-drops-arguments", models=("mamba2",), mended_from="5.15.0",
        effect="if documents are packed, they leak into each other: Mamba2ForCausalLM hands seq_idx on to "
               "nobody",
        need=f"{_PATCH}, or one document a row, padded", proof=_TRIED),
    _Patched(
        id="granite-packed-attention", models=("granitemoehybrid",), mended_from="5.15.0",
        effect="if documents are packed, its Mamba layers keep them apart and its attention layers do not: "
               "their mask knows no documents",
        need=f"{_PATCH}, or one document a row, padded", proof=_TRIED),
    _OfTransformers(
        id="own-mask-packed-attention", fixed_in="5.2.0", models=("bamba", "falcon_h1", "zamba", "zamba2"),
        effect="if documents are packed, attention looks across them, unless it is flash attention: the "
               "model makes its mask itself, from attention_mask alone",
        need='one document a row, padded, or pip install "transformers>=5.2"',
        proof="tried with transformers 5.0.0, read in 5.1.0 and 5.2.0"),
    _OfTransformers(
        id="zamba-packed-convolution", models=("zamba",),
        effect="if documents are packed, only its convolution keeps them apart, its scan does not",
        need="one document a row, padded", proof=_TRIED),
    _Patched(
        id="packed-attention-beside-mask-or-cache", mended_from="5.15.0",
        models=tuple(name for name in MODELS if name not in ("mamba", "falcon_mamba", "mamba2", "glm5_next")),
        effect="if documents are packed, and the call has an attention_mask [B, T] or leaves use_cache on, "
               "attention does not look at position_ids: it looks across documents, unless it is flash "
               "attention",
        need=f"{_PATCH}, or use_cache=False and no attention_mask", proof="tried with transformers 5.24.0"),
    _OfTransformers(
        id="indexed-packed-attention", models=("glm5_next",),
        effect="if documents are packed, its attention chooses tokens by an index that ignores documents, so "
               "it looks across them with any mask",
        need="one document a row, padded", proof="tried with transformers 5.24.0"),
    _OfTransformers(
        id="recurrent-not-patched", models=UNPATCHED,
        effect="if documents are packed, its recurrent layers carry state from one into the next, and "
               "flashlin has no functions to replace them",
        need="one document a row, padded", proof="tried with transformers 5.24.0"),
    _OfTransformers(
        id="inkling-packed-convolution", models=("inkling",),
        effect="if documents are packed, its attention may keep them apart, its convolutions do not: nobody "
               "hands seq_idx on to them",
        need="one document a row, padded", proof=_TRIED),
    # --- wrong where rows are padded or continued ---
    _OfFla(
        id="fla-mom-cache",
        effect="if the model Mom generates with beams, it raises; if its cached prompt goes on with several "
               "tokens at once, a memory that gets fewer of them than its convolution is wide sees zeros in "
               "place of what came before, or it raises",
        need="one beam, and go on token by token, or use_cache=False",
        proof="tried with fla 0.6.0, beams and errors with 0.4.2 and 0.5.2, too"),
    _forgetful("mamba-continuation", (*MAMBA, "zamba"), None, _TRIED),
    _forgetful("gdn-continuation", GDN, "5.7.0", "tried with transformers 4.57.6 to 5.8.0, read in 5.7.0"),
    _forgetful("mamba2-continuation", MAMBA2, "5.13.0",
               "tried with transformers 4.57.6 to 5.13.0, read in 5.12.0"),
    _forgetful("lfm-continuation", ("lfm2", "lfm2_moe"), "5.15.0",
               "tried with transformers 4.57.6 to 5.15.1"),
    _OfTransformers(
        id="bamba-positions", models=("bamba",),
        effect="if a call goes on from a cache without position_ids, attention counts from 0 again: logits "
               "are off by 2e-2 (generate hands positions over)",
        need="hand it position_ids", proof="tried with transformers 5.15.1 and 5.23.0, read in 5.5.0"),
    _OfTransformers(
        id="sum-over-wrong-chunks", fixed_in="5.15.0", models=("zamba2", "nemotron_h"),
        effect="if the Mamba layers take their torch way and rows are longer than chunk_size, it adds up the "
               "states of chunks over the wrong axis: logits are off by 1e-3, the gradients of A_log and "
               "dt_bias by 60 % and more",
        need=f'pip install "transformers>=5.15"; with weights on CUDA also {_PATCH}',
        proof="tried with transformers 4.57.6 to 5.14.1"),
    _OfTransformers(
        id="padding-at-batch-1", fixed_in="5.15.0", models=(*GDN, *MAMBA2),
        effect="if a batch of one row is padded, the padding is not masked and goes into the state",
        need="no padding at batch size 1", proof=_TF + "pull/46773"),
    _InSplit(
        id="split-left-padding", models=MAMBA2,
        effect="if training rows are padded on the left, the fused kernel ignores the mask behind the "
               "convolution: gradients are off by 2 to 90 %",
        need=f"padding on the right; from 5.15 on also {_PATCH}", proof="tried with 5.14.1 to 5.23.0"),
    _InSplit(
        id="falcon-h1-norm-order", models=("falcon_h1",),
        effect="if mamba_rms_norm is on, training by the fused kernel gates before the norm, whatever "
               "mamba_norm_before_gate says: the loss is off by 5e-2",
        need=f"from 5.15 on {_PATCH}", proof=_TRIED),
    _InSplit(
        id="mamba2-groups-in-split", fixed_in="5.20.0", models=("mamba2",),
        effect="if n_groups is above 1, the fused kernel, which trains, normalises each group and the "
               "model's own way the whole row: their gradients have nothing in common",
        need=f"from 5.15 on {_PATCH}", proof="tried with 4.57.6 to 5.19.0"),
)
