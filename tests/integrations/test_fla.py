"""patch("fla") on the real package.

The tests cover the replaced names, models that run without a GPU and decode as they read a
prompt, and the end of a patch.
"""
from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationMixin

import flashlin
from flashlin.integrations.fla import AHEAD, MIXES
from flashlin.integrations.on_a_cpu import RUNNING, explaining
from flashlin.kernels.families import PUBLIC
from matrix.stacks import models as stacks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    import fla.layers
    import fla.models
    import fla.modules
    import fla.ops
    from fla.models.utils import FLAGenerationMixin

VOCABULARY = 67


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """Disable torch.compile in RWKV's layers, where it takes half a minute on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_layer_without_mamba_ssm_takes_its_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    home = ModuleType("fla.layers.of_a_test")
    vars(home).update(causal_conv1d_fn=None, is_fast_path_available=False)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    with flashlin.patched("fla"):
        assert vars(home)["is_fast_path_available"] is True and callable(vars(home)["causal_conv1d_fn"])
    assert vars(home)["is_fast_path_available"] is False and vars(home)["causal_conv1d_fn"] is None


def test_what_flashlin_has_is_replaced_and_the_rest_is_named() -> None:
    theirs = {name: vars(package)[name] for package in (fla.ops, fla.modules)
              for name in package.__all__ if inspect.isroutine(vars(package).get(name))}
    with flashlin.patched("fla") as report:
        now = {name: vars(package)[name] for package in (fla.ops, fla.modules)
               for name in package.__all__ if name in theirs and name in vars(package)}
        kept = {name for name in now if now[name] is theirs[name]}
        assert not kept & set(PUBLIC)
        assert {name for name in kept if name in fla.ops.__all__} <= set(report.left)
        assert {"chunk_gsa", "parallel_based"} <= set(report.left)
        assert "of its own kernels are launched through flashlin.shield" in str(report)
        assert type(sys.modules["fla.ops.gsa.chunk"].chunk_gsa).__name__ == "function"


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_retention", "fused_recurrent_rwkv6"])
def test_signatures_stay_fla_s_own(name: str) -> None:
    original = inspect.signature(getattr(fla.ops, name))
    with flashlin.patched("fla"):
        assert inspect.signature(getattr(fla.ops, name)) == original
        assert getattr(fla.ops, name).__module__.startswith("fla.ops")


def test_an_older_release_binds_apply_of_an_autograd_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch replaces a function that is the ``apply`` of an autograd function.

    gate_output_correction is such a function in fla 0.4.2. RWKV7 needs the replacement to run on a CPU.
    """
    older = ModuleType("fla.ops.rwkv7.older")
    kind = type("GateOutputCorrection", (torch.autograd.Function,), {
        "forward": staticmethod(lambda ctx, o, r, k, r_k, v, g: o), "__module__": older.__name__})
    older.gate_output_correction = apply = kind.apply  # type: ignore[attr-defined]
    importer = ModuleType("fla.layers.older")  # a module that imported it
    importer.gate_output_correction = apply  # type: ignore[attr-defined]
    for module in (older, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    o, g = torch.randn(2, 1, 5, 8).unbind()
    r, k, v = torch.randn(3, 1, 5, 2, 4).unbind()
    given = dict(o=o, r=r, k=k, r_k=torch.randn(2, 4), v=v, g=g)
    with flashlin.patched("fla"):
        for module in (older, importer):
            ours: Any = vars(module)["gate_output_correction"]
            assert [*inspect.signature(ours).parameters] == [*given]
            right = flashlin.gate_output_correction(**given)
            assert torch.equal(ours(*given.values()), right) and torch.equal(ours(**given), right)
            assert (ours.__module__, ours.__name__) == (older.__name__, "gate_output_correction")
    assert vars(older)["gate_output_correction"] is vars(importer)["gate_output_correction"] is apply


def test_without_a_gpu_what_flashlin_has_not_says_so() -> None:
    q = torch.randn(1, 32, 2, 16)
    with flashlin.patched("fla"), pytest.raises(flashlin.UnsupportedError, match="cpu"):
        fla.ops.chunk_gsa(q, q, q, q)


REFUSED = [one.name for one in stacks.MODELS
           if one.package == "fla" and one.classes[1] and one.name not in RUNNING]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.alternate
def test_what_does_not_run_on_a_cpu_says_so_in_one_sentence(name: str) -> None:
    """The error names the layer or model, the missing function, and what to do."""
    ids = torch.randint(2, 64, (1, 12))
    with flashlin.patched("fla"), pytest.raises(NotImplementedError) as caught:
        made = stacks.build(stacks.named(name))
        (made.bfloat16() if name == "Parallax" else made)(ids)
    found = re.fullmatch(r"\w+ cannot run this call on a CPU: (.+)\. Use an NVIDIA GPU, or a model of fla "
                         rf"that runs on a CPU: {', '.join(RUNNING)}\.", str(caught.value))
    assert found and re.match(r"flashlin has no CPU version of fla\.\w+|it needs flash-attn|fla ", found[1])
    assert caught.value.__cause__ is not None


def test_an_error_of_a_call_on_another_device_stays_as_it_is() -> None:
    """An error on another device keeps its class, even if some tensors are on the CPU.

    Training loops catch OutOfMemoryError by its class.
    """
    class Layer(torch.nn.Module):
        @explaining
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        Layer()(torch.empty(1, device="meta"), torch.ones(1))
    with pytest.raises(NotImplementedError):
        Layer()(torch.empty(1), torch.ones(1))


def test_the_errors_of_a_call_that_is_wrong_stay_as_they_are() -> None:
    """Errors of wrong calls are not replaced, even for a layer that cannot run on a CPU."""
    layer, gsa = (getattr(fla.layers, name)(hidden_size=32, num_heads=2, layer_idx=0)
                  for name in ("GatedLinearAttention", "GatedSlotAttention"))
    with flashlin.patched("fla"):
        for wrong in (torch.randn(1, 5, 31), torch.randn(1, 5, 32).int()):
            with pytest.raises(RuntimeError, match=r"shape|dtype"):
                layer(wrong)
        with pytest.raises(AssertionError):
            gsa(torch.randn(1, 5, 32), attention_mask=torch.ones(1, 1, 5, 5))
        explained = fla.layers.GatedSlotAttention.forward
    assert fla.layers.GatedSlotAttention.forward is not explained


MODELS = {"GatedDeltaNet": {"num_heads": 2, "head_dim": 16}, "DeltaNet": {"num_heads": 2},
          "GatedDeltaProduct": {"num_heads": 2, "head_dim": 16}, "Comba": {"num_heads": 2, "head_dim": 16},
          "RetNet": {"num_heads": 2}, "RWKV6": {"num_heads": 2}, "RWKV7": {"head_dim": 16},
          "Mamba2": {"num_heads": 4, "head_dim": 16, "expand": 1, "state_size": 16}}
# These models mix tokens that should stay apart, always or only in training
MIXING = {"LinearAttention": {"num_heads": 2}, "Mamba": {"state_size": 8}, "Samba": {"attn": None},
          "Mom": {"num_heads": 2, "head_dim": 16, "num_memories": 4, "topk": 2}}


def model(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(fla.models, f"{name}Config")(
        hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY, **{**MODELS, **MIXING}[name], **more)
    return getattr(fla.models, f"{name}ForCausalLM")(config).float()


@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_generate_on_a_cpu(name: str) -> None:
    """Raw models raise. With the patch they run.

    A prompt in one call agrees with a prompt token by token with a cache, and a training step lowers the
    loss.
    """
    tokens = torch.randint(0, VOCABULARY, (2, 40))
    net = model(name)
    if name != "Mamba2":  # its layer has a plain torch path
        with pytest.raises(Exception, match=r"active drivers|Triton|Pointer|cuda|CUDA"):
            net(tokens)
    with flashlin.patched("fla"):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = net(tokens, labels=tokens).loss
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters()
                       if p.requires_grad and p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        net.eval()
        with torch.no_grad():
            whole = net(tokens).logits
            given = net(tokens[:, :33], use_cache=True)
            steps, cache = [given.logits], given.past_key_values
            for at in range(33, 40):
                out = net(tokens[:, at:at + 1], past_key_values=cache, use_cache=True)
                steps.append(out.logits)
                cache = out.past_key_values
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
        greedy = net.generate(tokens[:1, :9], max_new_tokens=6, do_sample=False)
        again = net.generate(tokens[:1, :9], max_new_tokens=6, do_sample=False, use_cache=False)
        assert greedy.tolist() == again.tolist()


RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
HYBRID = {"attn": {"layers": [1], "num_heads": 2}}


def attention(q: Any, k: Any, v: Any, **_: Any) -> Any:
    """Replace flash_attn's function, which needs a GPU: [B, T, H, D].

    The last query belongs to the last key.
    """
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), seen).transpose(1, 2)


def written(net: Any, prompt: Any, **options: Any) -> list[list[int]]:
    """Return the tokens that the model generates greedily."""
    found = net.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, **options)
    return found[:, prompt.shape[1]:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name, more", [("GatedDeltaNet", {}), ("DeltaNet", {}), ("RWKV7", {}),
                                        ("Mamba2", {}), ("GatedDeltaNet", HYBRID)],
                         ids=["GatedDeltaNet", "DeltaNet", "RWKV7", "Mamba2", "hybrid"])
@pytest.mark.alternate
def test_what_a_model_writes_with_its_cache_it_writes_without(name: str, more: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched model generates the same tokens with and without its cache.

    Since 5.24, transformers passes the cache as ``cache``, which the raw models of fla ignore. They then
    compute each token after the first from a single token.
    """
    monkeypatch.setattr("fla.layers.attn.flash_attn_func", attention)
    net, prompt = model(name, **more).eval(), torch.randint(3, VOCABULARY, (2, 9))
    with torch.no_grad():
        for weight in net.parameters():  # else it repeats its last token for any input
            weight.add_(0.2 * torch.randn_like(weight))
        with monkeypatch.context() as patch:
            patch.setattr("flashlin.integrations.fla.prepares_by", lambda name: False)
            with flashlin.patched("fla"):  # fla's functions run without a GPU, and its models are raw
                raw = written(net, prompt)
        with flashlin.patched("fla"):
            right = written(net, prompt, use_cache=False)
            assert written(net, prompt) == right
            assert written(net, prompt, num_beams=2) == written(net, prompt, num_beams=2, use_cache=False)
    assert [row[0] for row in raw] == [row[0] for row in right]
    assert (raw != right) is RENAMED


@pytest.mark.skipif(not RENAMED, reason="this transformers names a cache as fla does")
def test_a_cache_goes_by_both_names() -> None:
    """A cache may be passed as ``cache`` or as ``past_key_values``.

    The test passes it to a model, to the model inside it, and to generate.
    """
    net, tokens = model("GatedDeltaNet").eval(), torch.randint(3, VOCABULARY, (1, 40))
    with torch.no_grad(), flashlin.patched("fla"):
        for called in (net, net.model):
            whole = called(tokens)[0]
            for name in ("cache", "past_key_values"):
                given = called(tokens[:, :33], use_cache=True)
                out = called(tokens[:, 33:], use_cache=True, **{name: given.cache})
                torch.testing.assert_close(out[0], whole[:, 33:], rtol=1e-4, atol=1e-4)
        right = written(net, tokens, use_cache=False)
        for name in ("cache", "past_key_values"):
            begun = net(tokens[:, :33], use_cache=True).cache
            assert written(net, tokens, **{name: begun}) == right


@pytest.mark.skipif(not RENAMED, reason="this transformers names a cache as fla does")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_program_s_own_forward_is_given_the_name_that_it_knows(name: str) -> None:
    class Own(fla.models.DeltaNetForCausalLM):  # type: ignore[misc,name-defined]  # fla has no types
        def forward(self, input_ids: Any, **given: Any) -> Any:
            cache = given.pop(name, None)
            seen.append(cache is not None and len(cache) == 2)
            return super().forward(input_ids, past_key_values=cache, **given)
    forward = Own.forward
    vars(forward)["__signature__"] = inspect.Signature([
        *(inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD)
          for one in ("self", "input_ids", name)),
        inspect.Parameter("given", inspect.Parameter.VAR_KEYWORD)])
    torch.manual_seed(0)
    seen: list[bool] = []
    net = Own(model("DeltaNet").config).eval()
    with torch.no_grad(), flashlin.patched("fla"):
        written(net, torch.randint(3, VOCABULARY, (1, 9)))
    assert seen == [False, *11 * [True]]


@pytest.mark.parametrize("pieces", [(9, 1, 1), (9, 4)])
def test_an_older_release_is_told_which_tokens_are_new(pieces: tuple[int, ...],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 0.6 need cache_position, which transformers no longer passes.

    Without it they use only the last token of the input.
    """
    def prepare(self: Any, input_ids: Any = None, past_key_values: Any = None, cache_position: Any = None,
                **given: Any) -> Any:
        new = input_ids[:, -1:] if cache_position is None else input_ids[:, cache_position]
        return {"input_ids": new, "past_key_values": past_key_values}
    kind = type("OlderMixin", (GenerationMixin,), {"prepare_inputs_for_generation": prepare,
                                                   "__module__": "fla.models.older"})
    home = ModuleType("fla.models.older")
    vars(home)["OlderMixin"] = kind
    monkeypatch.setitem(sys.modules, home.__name__, home)
    with flashlin.patched("fla") as report:
        assert [by for where, _, by in report.replaced if where == "OlderMixin"]
        past = 0
        for piece in pieces:
            cache = SimpleNamespace(get_seq_length=lambda past=past: past)
            ids = torch.arange(past + piece)[None]
            given = kind().prepare_inputs_for_generation(ids, past_key_values=cache)
            assert given["input_ids"].tolist() == [[*range(past, past + piece)]]
            past += piece
    assert vars(kind)["prepare_inputs_for_generation"] is prepare


def test_a_cache_s_name_is_undone() -> None:
    def bound() -> list[Any]:
        mixin, model = FLAGenerationMixin, fla.models.RWKV7ForCausalLM
        return [vars(mixin)["prepare_inputs_for_generation"], vars(model)["forward"]]
    before = bound()
    with flashlin.patched("fla") as report:
        assert [now is then for now, then in zip(bound(), before, strict=True)] == 2 * [not RENAMED]
        by = {f"{where}.{name}" for where, name, by in report.replaced if by.endswith("takes cache=")}
        replaced = {"FLAGenerationMixin.prepare_inputs_for_generation", "RWKV7ForCausalLM.forward"}
        assert by & replaced == (replaced if RENAMED else set())
    assert [now is then for now, then in zip(bound(), before, strict=True)] == 2 * [True]


@pytest.mark.parametrize("name", ["GatedDeltaNet", "LinearAttention", "Mamba", "Mamba2", "Mom", "Samba"])
def test_a_model_that_mixes_packed_documents_says_so_once(name: str) -> None:
    """Models that keep documents apart do not warn."""
    first, other = torch.randint(0, VOCABULARY, (2, 1, 13))
    second = torch.randint(0, VOCABULARY, (1, 27))
    edges, net = torch.tensor([0, 13, 40]), model(name).eval()
    with flashlin.patched("fla"), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, two = (net(torch.cat([before, second], 1), cu_seqlens=edges, use_cache=False).logits[:, 13:]
                    for before in (first, other))
        net(first, use_cache=False)
    said = [str(one.message) for one in caught if "cu_seqlens" in str(one.message)]
    if name in MIXES:
        assert not torch.allclose(one, two, atol=1e-4), "then nobody has to be warned"
        assert said == [f"{name}ForCausalLM got cu_seqlens, and {MIXES[name]}: documents of one row run into "
                        "each other. Give it a document a row, padded. It is so with every kernel."]
    else:
        assert torch.allclose(one, two, atol=1e-5) and not said


@pytest.mark.parametrize("tokens", [12, 70])
def test_mom_sees_no_later_token_in_evaluation(tokens: int) -> None:
    """Later tokens do not change the logits of Mom in evaluation.

    The sort of the raw model is not stable, so it may change the order of the tokens of a memory.
    """
    first, other = torch.randint(0, VOCABULARY, (2, 2, tokens))
    half, net = tokens // 2, model("Mom").eval()
    other[:, :half] = first[:, :half]
    with flashlin.patched("fla"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two, alone = (net(x, use_cache=False).logits[:, :half] for x in (first, other, first[:, :half]))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_mom_sees_later_tokens_in_training_and_says_so_once(training: bool) -> None:
    """In training mode Mom reads later tokens, and one warning says so; in eval() mode it does not."""
    tokens, net = torch.randint(0, VOCABULARY, (1, 70)), model("Mom").train(training)
    with flashlin.patched("fla"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = net.get_input_embeddings()(tokens).detach().requires_grad_()
        net(inputs_embeds=x).logits[0, 30].square().sum().backward()
        net(tokens, labels=tokens).loss.backward()
    assert x.grad is not None and x.grad[0, :31].any() and bool(x.grad[0, 31:].any()) is training
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    said = [str(one.message) for one in caught if "later" in str(one.message)]
    assert said == [f"MomForCausalLM: {AHEAD['Mom']}. It is so with every kernel."] * training


def test_an_older_release_generates_with_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam search works with a cache of an older fla, which has no reorder_cache.

    The patch adds the method, which transformers calls to reorder the states.
    """
    cache = sys.modules["fla.models.cache_utils"]
    monkeypatch.delattr(cache.FLALayer, "reorder_cache")
    monkeypatch.delattr(cache.FLACache, "reorder_cache")
    tokens, net = torch.randint(0, VOCABULARY, (2, 9)), model("GatedDeltaNet").eval()
    given = dict(attention_mask=torch.ones_like(tokens), max_new_tokens=8, num_beams=3, do_sample=False)
    with flashlin.patched("fla"):
        found = net.generate(tokens, **given)
        assert found.tolist() == net.generate(tokens, **given, use_cache=False).tolist()
        layer = cache.FLALayer()
        layer.update(recurrent_state=SimpleNamespace(state=tokens))
        with pytest.raises(TypeError, match="the cache contains a SimpleNamespace"):
            layer.reorder_cache(torch.tensor([1, 0]))
    assert "reorder_cache" not in vars(cache.FLALayer)


def test_the_layer_of_gdn2_reads_a_prompt_as_it_decodes() -> None:
    """Prompts and decoding agree in the layer; fla has no GDN-2 model.

    With gradients the layer runs chunk by chunk. Without gradients and for few tokens, it runs token by
    token.
    """
    torch.manual_seed(0)
    layer = fla.layers.GatedDeltaNet2(64, head_dim=16, num_heads=2, num_v_heads=4, layer_idx=0)
    x = torch.randn(2, 40, 64)
    with flashlin.patched("fla"):
        by_chunks = layer(x)[0]
        by_chunks.square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
        with torch.no_grad():
            torch.testing.assert_close(layer.eval()(x)[0], by_chunks, rtol=1e-4, atol=1e-5)


def test_threads_enter_and_leave_in_any_order() -> None:
    tokens, net = torch.randint(0, VOCABULARY, (1, 20)), model("GatedDeltaNet")
    barrier, seen = threading.Barrier(2), []

    def run(first: bool) -> None:
        with flashlin.patched("fla"):
            barrier.wait(60)
            if not first:
                one.join(60)  # the other thread has left its block
            seen.append(net(tokens).logits)
    one = threading.Thread(target=run, args=(True,))
    two = threading.Thread(target=run, args=(False,))
    one.start(), two.start()
    one.join(60), two.join(60)
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mom_trains_under_autocast(dtype: torch.dtype) -> None:
    tokens, net = torch.randint(0, VOCABULARY, (2, 12)), model("Mom")
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with flashlin.patched("fla"), torch.autocast("cpu", dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
