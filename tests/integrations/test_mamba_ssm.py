"""patch("mamba_ssm") and patch("causal_conv1d") for every kind of installation.

The packages are written by small_mamba.py. If the Python files of the real packages are on PYTHONPATH, with
einops and transformers and without an extension, their layers and models are tested as well.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin import mamba
from flashlin.integrations import adapters, calling, extensions
from flashlin.integrations.mamba_ssm import REMEMBERED, forget_what_is_available
from flashlin.kernels.mamba import reference
from flashlin.testing.compare import judge
from matrix.stacks.cuda import no_events
from tests.integrations import small_mamba

PACKAGES = ("mamba_ssm", "causal_conv1d")
REAL = all(importlib.util.find_spec(package) is not None for package in PACKAGES)
Make = Callable[[str], None]


def loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, *small_mamba.EXTENSIONS)]


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make an installation of small_mamba.SITUATIONS, and remove it afterwards."""
    def make(situation: str) -> None:
        small_mamba.write(tmp_path, situation)
        monkeypatch.syspath_prepend(str(tmp_path))  # this also reverts the next line
        sys.path[1:] = [one for one in sys.path[1:] if not any((Path(one) / package).is_dir()
                                                               for package in PACKAGES)]
        importlib.invalidate_caches()
    calling._told.clear()
    finders = list(sys.meta_path)
    yield make
    flashlin.unpatch(*PACKAGES)
    for name in loaded():
        del sys.modules[name]
    assert not [one for one in sys.meta_path
                if one not in finders and type(one).__module__.startswith("flashlin")]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not REAL:
        pytest.skip("needs the Python files of mamba_ssm and causal_conv1d on the path")
    yield
    flashlin.unpatch(*PACKAGES)
    for name in loaded():
        del sys.modules[name]


def scan_inputs() -> dict[str, Tensor]:
    return {"u": torch.randn(1, 4, 5), "delta": torch.rand(1, 4, 5), "A": -torch.rand(4, 3),
            "B": torch.randn(1, 3, 5), "C": torch.randn(1, 3, 5)}


# --- installed ---

def every_binding(program: types.ModuleType) -> list[Any]:
    interface = sys.modules["mamba_ssm.ops.selective_scan_interface"]
    simple = sys.modules["mamba_ssm.modules.mamba_simple"]
    return [vars(interface)["selective_scan_fn"], vars(sys.modules["mamba_ssm"])["selective_scan_fn"],
            vars(simple)["selective_scan_fn"], vars(program)["scan"], vars(program)["TABLE"]["scan"],
            vars(program)["layer"].scan]


def test_a_function_is_replaced_wherever_it_is_bound_and_comes_back(installation: Make) -> None:
    installation("working")
    importlib.import_module("mamba_ssm.modules.mamba_simple")
    original = sys.modules["mamba_ssm"].selective_scan_fn
    program = types.ModuleType("program")
    layer = torch.nn.Module()
    layer.scan = original
    vars(program).update(scan=original, TABLE={"scan": original}, layer=layer)
    sys.modules["program"] = program
    try:
        with flashlin.patched("mamba_ssm") as report:
            functions = every_binding(program)
            assert all(one is not original for one in functions) and len(set(functions)) == 1
            given = scan_inputs()
            assert torch.equal(program.scan(**given), mamba.selective_scan_fn(**given))
            assert pickle.loads(pickle.dumps(program.scan)) is program.scan
            assert "flashlin.mamba.selective_scan_fn" in str(report) and not report.left
        assert all(one is original for one in every_binding(program))
        assert program.scan(**given) == "raw selective_scan_fn"
    finally:
        del sys.modules["program"]


@pytest.mark.parametrize("before", [True, False])
def test_what_only_theirs_has_runs_theirs(installation: Make, before: bool) -> None:
    """A call with an argument that only the package's function has runs the package's function.

    before: imports the package before the patch instead of under it.
    """
    installation("working")
    if before:
        importlib.import_module("mamba_ssm")
    with flashlin.patched("mamba_ssm"):
        layers = importlib.import_module("mamba_ssm.modules.mamba_simple")
        given = scan_inputs()
        with pytest.warns(UserWarning, match="selective_scan_fn: got theirs"):
            assert layers.selective_scan_fn(**given, theirs=1) == "raw selective_scan_fn"
        assert isinstance(layers.selective_scan_fn(*given.values(), theirs=None), Tensor)
        with pytest.raises(TypeError, match="nobodys"):
            layers.selective_scan_fn(**given, nobodys=1)


def test_an_extension_that_loads_is_left_alone(installation: Make) -> None:
    installation("working")
    with flashlin.patched(*PACKAGES):
        for name in small_mamba.EXTENSIONS:
            assert str(importlib.import_module(name).__file__).endswith(".py")
    assert "causal_conv1d_cuda" in sys.modules


# --- an extension that is missing or does not load ---

@pytest.mark.parametrize("situation", ["missing", "does not load"])
@pytest.mark.alternate
def test_a_package_can_be_imported_without_its_extension(installation: Make, situation: str) -> None:
    installation(situation)
    for package in PACKAGES:
        with pytest.raises(ImportError):
            importlib.import_module(package)
    with flashlin.patched(*PACKAGES) as report:
        why = "No module named" if situation == "missing" else "undefined symbol"
        assert all(why in report.left[name] for name in small_mamba.EXTENSIONS)
        package = importlib.import_module("mamba_ssm")
        assert package.__version__ == "9.9"
        assert isinstance(package.selective_scan_fn(**scan_inputs()), Tensor)
        conv = importlib.import_module("causal_conv1d_cuda")
        assert not hasattr(conv, "causal_conv1d_fwd")
        with pytest.raises(AttributeError, match=f"does not load.*{why}"):
            _ = conv.causal_conv1d_fwd
        assert importlib.util.find_spec("selective_scan_cuda") is not None
    assert not set(small_mamba.EXTENSIONS) & set(sys.modules)
    with pytest.raises(ImportError):
        importlib.import_module("selective_scan_cuda")
    assert sys.modules["mamba_ssm"] is package  # it is still imported
    assert package.selective_scan_fn(**scan_inputs()) == "raw selective_scan_fn"


@pytest.mark.alternate
def test_patching_again_reaches_layers_built_before(installation: Make) -> None:
    installation("missing")
    with flashlin.patched(*PACKAGES):
        layer = importlib.import_module("mamba_ssm.modules.mamba_simple").Mamba(8)
        x = torch.randn(1, 5, 8)
        y = layer(x)
    assert layer(x) == "raw mamba_inner_fn"
    with flashlin.patched("mamba_ssm"):
        assert torch.equal(layer(x), y)


# --- a release before 2.3.0, which imports classes that transformers 5 no longer has ---

REMOVED = ("GreedySearchDecoderOnlyOutput", "SampleDecoderOnlyOutput")


def older(folder: Path) -> None:
    """Make the package import what mamba_ssm before 2.3.0 imports from transformers."""
    (folder / "mamba_ssm/utils").mkdir()
    (folder / "mamba_ssm/utils/__init__.py").touch()
    (folder / "mamba_ssm/utils/generation.py").write_text(
        f"from transformers.generation import {', '.join(REMOVED)}, TextStreamer\n")
    with (folder / "mamba_ssm/__init__.py").open("a") as file:
        file.write("from mamba_ssm.utils.generation import TextStreamer\n")


@pytest.mark.parametrize("situation", ["working", "missing"])
def test_an_older_release_can_be_imported(installation: Make, tmp_path: Path, situation: str) -> None:
    generation = pytest.importorskip("transformers.generation")
    had = [hasattr(generation, name) for name in REMOVED]
    installation(situation)
    older(tmp_path)
    if situation == "working" and not any(had):
        with pytest.raises(ImportError, match="GreedySearchDecoderOnlyOutput"):
            importlib.import_module("mamba_ssm")
    with flashlin.patched("mamba_ssm") as report:
        importlib.import_module("mamba_ssm.ops.selective_scan_interface")
        module = importlib.import_module("mamba_ssm.utils.generation")
        assert all(vars(module)[name] is generation.GenerateDecoderOnlyOutput for name in REMOVED)
        lines = [f"transformers.generation.{name}: a class of transformers" for name in REMOVED]
        assert had == [True, True] or [line for line in report.lines() if line in lines] == lines
        assert vars(module)[REMOVED[0]](sequences=torch.zeros(1, 2), scores=None).sequences.shape == (1, 2)
    assert [hasattr(generation, name) for name in REMOVED] == had
    assert vars(module)[REMOVED[0]] is generation.GenerateDecoderOnlyOutput  # the module stays imported


def test_other_imports_need_no_transformers(installation: Make, tmp_path: Path) -> None:
    """Only the module that needs the classes makes the patch import transformers."""
    installation("working")
    older(tmp_path)
    (tmp_path / "mamba_ssm/__init__.py").write_text("")
    program = ("import sys, flashlin; flashlin.patch('mamba_ssm'); import mamba_ssm.modules.mamba2\n"
               "assert 'transformers' not in sys.modules and 'mamba_ssm.utils.generation' not in sys.modules")
    path = os.pathsep.join([str(Path(flashlin.__file__).parent.parent), str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


def test_without_transformers_the_error_is_that_of_the_package(installation: Make, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    installation("working")
    older(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.generation", None)
    with flashlin.patched("mamba_ssm"), pytest.raises(ImportError, match=r"transformers\.generation"):
        importlib.import_module("mamba_ssm")


# --- layers, of these packages and of the real ones ---

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("mamba_ssm.modules.mamba_simple", {"d_state": 4}),
    "Mamba2": ("mamba_ssm.modules.mamba2", {"d_state": 8, "headdim": 8, "ngroups": 2})}


def convolved(x: Tensor, conv: torch.nn.Conv1d) -> Tensor:
    """Return silu of the causal convolution of x [b, D, T]."""
    assert conv.bias is not None
    padded = F.pad(x, (conv.weight.shape[2] - 1, 0))
    return reference.silu(F.conv1d(padded, conv.weight, conv.bias, groups=x.shape[1]))


def eager_mamba(layer: Any, u: Tensor) -> Tensor:
    """Compute the layer in plain torch, one step per token. Its parameters are float64."""
    x, z = (u @ layer.in_proj.weight.T).transpose(1, 2).chunk(2, 1)
    x = convolved(x, layer.conv1d)
    rank, N = layer.dt_proj.weight.shape[1], layer.A_log.shape[1]
    dt, B, C = (x.transpose(1, 2) @ layer.x_proj.weight.T).split([rank, N, N], -1)
    dt = (dt @ layer.dt_proj.weight.T).transpose(1, 2)
    y, _ = reference.selective(x, dt, -layer.A_log.exp(), B.transpose(1, 2), C.transpose(1, 2), layer.D, z,
                               layer.dt_proj.bias, True)
    return y.transpose(1, 2) @ layer.out_proj.weight.T


def eager_mamba2(layer: Any, u: Tensor) -> Tensor:
    H, G, inner = layer.A_log.shape[0], layer.ngroups, layer.norm.weight.shape[0]
    N = layer.d_state
    z, xBC, dt = (u @ layer.in_proj.weight.T).split([inner, inner + 2 * G * N, H], -1)
    xBC = convolved(xBC.transpose(1, 2), layer.conv1d).transpose(1, 2)
    x, B, C = xBC.split([inner, G * N, G * N], -1)
    y, _, _ = reference.scan(x.unflatten(-1, (H, -1)), dt, -layer.A_log.exp(), B.unflatten(-1, (G, N)),
                             C.unflatten(-1, (G, N)), layer.D, None, layer.dt_bias, dt_softplus=True)
    gated = (y.flatten(2) * reference.silu(z)).unflatten(-1, (G, -1))
    normed = gated / (gated.pow(2).mean(-1, keepdim=True) + layer.norm.eps).sqrt()
    return normed.flatten(2) * layer.norm.weight @ layer.out_proj.weight.T


EAGER = {"Mamba": eager_mamba, "Mamba2": eager_mamba2}


def layer_agrees(name: str) -> None:
    """Compare forward, every gradient and decoding of a layer of the installed package."""
    module, facts = LAYERS[name]
    torch.manual_seed(0)
    layer = getattr(importlib.import_module(module), name)(32, layer_idx=0, **facts)
    u = torch.randn(2, 21, 32, requires_grad=True)
    y = layer(u)
    upstream = torch.randn_like(y)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(y, [u, *parameters.values()], upstream)
    layer.double()
    v = u.detach().double().requires_grad_()
    wanted = EAGER[name](layer, v)
    of_wanted = torch.autograd.grad(wanted, [v, *layer.parameters()], upstream.double())
    verdicts = [judge("y", y, wanted, 1e-4)]
    verdicts += [judge(f"d{which}", *pair, 1e-4)
                 for which, *pair in zip(["u", *parameters], grads, of_wanted, strict=True)]
    layer.float()
    cache = types.SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        pieces = [layer(u[:, :9], inference_params=cache)]
        for t in range(9, 21):
            cache.seqlen_offset = t
            pieces.append(layer(u[:, t:t + 1], inference_params=cache))
    verdicts.append(judge("decoding", torch.cat(pieces, 1), wanted, 1e-4))
    assert all(one.ok for one in verdicts), verdicts


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("situation", ["working", "missing"])
@pytest.mark.alternate
def test_layers_train_and_decode(installation: Make, situation: str, name: str) -> None:
    installation(situation)
    with flashlin.patched(*PACKAGES):
        layer_agrees(name)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_real_files(real: None, name: str) -> None:
    with flashlin.patched(*PACKAGES) as report:
        layer_agrees(name)
        assert len({by for _, _, by in report.replaced}) > 12


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["Mamba1", "Mamba2"])
def test_a_model_of_the_real_files_writes(real: None, kind: str, fused: bool) -> None:
    """Greedy tokens with the cache are those of the whole sequence, in float64."""
    with flashlin.patched(*PACKAGES), no_events():
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
        torch.manual_seed(0)
        facts = {"layer": kind, "d_state": 8, **({"headdim": 8} if kind == "Mamba2" else {})}
        model = MambaLMHeadModel(MambaConfig(
            d_model=32, n_layer=2, vocab_size=40, ssm_cfg=facts, rms_norm=True, fused_add_norm=fused,
            residual_in_fp32=True, pad_vocab_size_multiple=8)).eval()
        prompt = torch.randint(40, (2, 7))
        out = model.generate(prompt, max_length=20, cg=False, return_dict_in_generate=True,
                             output_scores=True)
        written = out.sequences.clone()  # a tensor made in inference mode
        logits = model(written).logits
        assert torch.equal(logits[:, 6:-1].argmax(-1), written[:, 7:])
        torch.testing.assert_close(torch.stack(out.scores, 1), logits[:, 6:-1], rtol=1e-3, atol=1e-4)
        loss = model(prompt).logits.logsumexp(-1).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.isfinite(one).all() and one.any() for one in grads)

        model.double()
        hidden, residual = model.backbone.embedding(prompt), 0
        for block in model.backbone.layers:
            residual = hidden + residual
            hidden = EAGER[kind.removesuffix("1")](block.mixer, normed(residual, block.norm))
        wanted = normed(hidden + residual, model.backbone.norm_f) @ model.lm_head.weight.T
        assert judge("logits", logits[:, :7], wanted, 1e-4).ok


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def test_packed_prompts_of_the_real_mamba2(real: None) -> None:
    """Packed prompts and one decoding step give the results of each sequence alone.

    The step continues from the convolution states and the scan states of the packed prompts.
    """
    with flashlin.patched(*PACKAGES):
        from mamba_ssm.modules.mamba2 import Mamba2
        torch.manual_seed(0)
        layer = Mamba2(32, d_state=8, headdim=8, layer_idx=0)
        u, edges, seq_idx = torch.randn(1, 12, 32), torch.tensor([0, 2, 12], dtype=torch.int32), torch.tensor(
            [[0] * 2 + [1] * 10], dtype=torch.int32)
        token = torch.randn(2, 1, 32)
        packed = types.SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        with torch.no_grad():
            y = layer(u, cu_seqlens=edges, seq_idx=seq_idx, inference_params=packed)
            packed.seqlen_offset = 1
            after = layer(token, inference_params=packed)
            for row, (first, end) in enumerate(((0, 2), (2, 12))):
                longer = layer(torch.cat([u[:, first:end], token[row:row + 1]], 1))
                torch.testing.assert_close(y[:, first:end], longer[:, :-1], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(after[row:row + 1], longer[:, -1:], rtol=1e-4, atol=1e-5)


def test_the_real_mamba3_reads_prompts(real: None) -> None:
    """Packed prompts give the results and gradients of single prompts.

    Decoding continues from the kept state.
    """
    with flashlin.patched(*PACKAGES):
        from mamba_ssm.modules import mamba3 as module
        torch.manual_seed(0)
        layer, u = module.Mamba3(32, d_state=16, headdim=8, layer_idx=0), torch.randn(1, 12, 32)
        y = layer(u, cu_seqlens=torch.tensor([0, 2, 12], dtype=torch.int32))
        torch.testing.assert_close(y, torch.cat([layer(u[:, :2]), layer(u[:, 2:])], 1), rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        assert all(grad.isfinite().all() and grad.any() for grad in grads)
        cache = types.SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        with torch.no_grad():
            layer(u[:, :7], inference_params=cache)
            states = cache.key_value_memory_dict[0]
            kept = (*states[:2], states[2].squeeze(1), states[3])
            whole = layer(u)

            def going_on(**given: Any) -> Any:
                return mamba.mamba3_siso_combined(**{**given, "Input_States": kept})
            module.mamba3_siso_combined = going_on
            torch.testing.assert_close(layer(u[:, 7:]), whole[:, 7:], rtol=1e-4, atol=1e-5)


def test_the_real_files_above_the_extension(real: None) -> None:
    """The functions of the real packages work on the stub modules of the extensions.

    Their outputs and gradients must equal those of flashlin.
    """
    torch.manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).requires_grad_()
    b, D, T, N, R, W = 2, 6, 17, 4, 3, 4
    A = (-torch.rand(D, N)).requires_grad_()
    calls: dict[str, list[Any]] = {
        "mamba_inner_fn": [leaf(b, 2 * D, T), leaf(D, 1, W), leaf(D), leaf(R + 2 * N, D), leaf(D, R),
                           leaf(5, D), None, A, None, None, leaf(D), leaf(D), leaf(N), leaf(N)],
        "selective_scan_fn": [leaf(b, D, T), leaf(b, D, T), A, leaf(b, N, T), leaf(b, N, T), leaf(D),
                              leaf(b, D, T), leaf(D), True],
        "causal_conv1d_fn": [leaf(b, T, D).transpose(1, 2), leaf(D, W), leaf(D), None,
                             leaf(b, W - 1, D).transpose(1, 2), True, None, "silu"]}
    with flashlin.patched(*PACKAGES):
        interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
        for name, given in calls.items():
            theirs = getattr(interface, name).__wrapped__
            leaves = [x for x in given if isinstance(x, Tensor)]
            outputs = [function(*given) for function in (theirs, getattr(mamba, name))]
            pairs = list(zip(*(one if isinstance(one, tuple) else (one,) for one in outputs), strict=True))
            upstream = [torch.randn_like(right) for _, right in pairs]
            grads = [torch.autograd.grad(one, leaves, upstream) for one in zip(*pairs, strict=True)]
            for got, right in [*pairs, *zip(*grads, strict=True)]:
                verdict = judge(name, got, right, 1e-5)
                assert verdict.ok, verdict


# --- what extensions compute ---

@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("groups", [False, True])
def test_the_scan_of_the_extension(gated: bool, groups: bool) -> None:
    torch.manual_seed(0)
    given: dict[str, Tensor] = {name: x.double() for name, x in scan_inputs().items()}
    if groups:
        given |= {name: given[name][:, None] for name in "BC"}
    options = {"D": torch.randn(4).double(), "z": torch.randn(1, 4, 5).double() if gated else None,
               "delta_bias": torch.randn(4).double()}
    leaves = {name: x.clone().requires_grad_() for name, x in {**given, **options}.items() if x is not None}
    wanted, last = mamba.selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True)
    upstream = torch.randn_like(wanted)
    grads = dict(zip(leaves, torch.autograd.grad(wanted, list(leaves.values()), upstream), strict=True))
    inputs = [*given.values(), *options.values()]

    out, kept, *behind = extensions.fwd(*inputs, True)
    ungated = mamba.selective_scan_fn(*given.values(), options["D"], None, options["delta_bias"], True)
    torch.testing.assert_close(out, ungated)
    assert kept.shape == (1, 4, 1, 6) and torch.equal(kept[:, :, -1, 1::2], last.detach())
    assert len(behind) == gated and not out.requires_grad
    # callers pass dx and dz in one tensor
    dz = torch.empty(1, 8, 5).double()[:, 4:] if gated else None
    found = extensions.bwd(*inputs, upstream, kept, out, dz, True, True)
    for name, x in zip(("u", "delta", "A", "B", "C", "D", "delta_bias"), found, strict=False):
        torch.testing.assert_close(x, grads[name])
    if gated:
        torch.testing.assert_close(behind[0], wanted.detach())
        assert found[7] is dz and dz is not None
        torch.testing.assert_close(dz, grads["z"])
        torch.testing.assert_close(found[8], wanted.detach())
    else:
        assert len(found) == 7


@pytest.mark.parametrize("state", [None, "initial", "both"])
def test_the_convolution_of_the_extension(state: str | None) -> None:
    torch.manual_seed(0)
    b, D, T, W = 2, 3, 6, 4
    given = {"x": torch.randn(b, D, T), "weight": torch.randn(D, W), "bias": torch.randn(D)}
    initial = torch.randn(b, D, W - 1) if state else None
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    of_initial = None if initial is None else initial.clone().requires_grad_()
    y, final = mamba.causal_conv1d_fn(**leaves, initial_states=of_initial, return_final_states=True,
                                      activation="silu")
    dy, dfinal = torch.randn_like(y), torch.randn_like(final) if state == "both" else None
    everything = [*leaves.values(), *([] if of_initial is None else [of_initial])]
    wanted = torch.autograd.grad([y, final], everything,
                                 [dy, torch.zeros_like(final) if dfinal is None else dfinal])

    kept = torch.empty_like(final)
    out = extensions.causal_conv1d_fwd_function(*given.values(), None, initial, kept, True)
    assert torch.equal(out, y) and torch.equal(kept, final)
    dx = torch.empty(b, 2 * D, T)[:, :D]
    found = extensions.causal_conv1d_bwd_function(*given.values(), dy, None, initial, dfinal, dx,
                                                  initial is not None, True)
    assert found[0] is dx
    for got, right in zip(found, wanted, strict=False):
        torch.testing.assert_close(got, right)
    assert (found[3] is None) == (initial is None)

    window, same = torch.randn(b, D, W), torch.empty(b, D, W)
    same.copy_(window)
    stepped = extensions.causal_conv1d_update_function(given["x"], window, given["weight"], None, False, None,
                                                       None)
    assert torch.equal(stepped, mamba.causal_conv1d_update(given["x"], same, given["weight"]))
    assert torch.equal(window, same)


# --- not installed ---

IMPORTS = """
from mamba_ssm import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn as inner, selective_scan_fn as scan
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
from mamba_ssm.ops.triton.layernorm import RMSNorm as before, layer_norm_fn as older
from mamba_ssm.ops.triton.layernorm_gated import LayerNorm, RMSNorm as gated, layernorm_fn, rmsnorm_fn
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as conv
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
"""


@pytest.mark.alternate
def test_a_package_that_is_absent_has_modules(installation: Make) -> None:
    installation("absent")
    with flashlin.patched(*PACKAGES) as report:
        assert report.left["mamba_ssm"].startswith("not installed")
        names: dict[str, Any] = {}
        exec(IMPORTS, names)
        for name in ("mamba_inner_fn", "selective_state_update", "causal_conv1d_fn", "rms_norm_fn"):
            assert names[name] is getattr(mamba, name)
        third = importlib.import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")
        assert third.mamba3_siso_combined is mamba.mamba3_siso_combined
        assert names["gated"] is mamba.RMSNorm and names["RMSNorm"](8)(torch.ones(8)).allclose(torch.ones(8))
        for package, least in (("mamba_ssm", (2, 0, 4)), ("causal_conv1d", (1, 4, 0))):
            spec = importlib.util.find_spec(package)
            module = importlib.import_module(package)
            assert spec is not None and module.__spec__ is not None and spec.name == package
            assert tuple(map(int, module.__version__.split("+")[0].split("."))) >= least
        assert importlib.util.find_spec("mamba_ssm.ops.triton.ssd_combined") is not None
        assert importlib.util.find_spec("mamba_ssm.modules") is None
        assert not hasattr(sys.modules["mamba_ssm"], "Mamba2")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("mamba_ssm.modules.mamba2")
    assert not loaded() and all(importlib.util.find_spec(package) is None for package in PACKAGES)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mamba_ssm")
    assert isinstance(names["scan"](**scan_inputs()), Tensor)  # imported functions continue to work


STATEMENTS = {
    "from mamba_ssm import Mamba2": "mamba_ssm.Mamba2",
    "from mamba_ssm.modules.mamba2 import Mamba2": "mamba_ssm.modules",
    "import mamba_ssm.models.mixer_seq_simple": "mamba_ssm.models",
    "from mamba_ssm.ops.selective_scan_interface import selective_scan_ref":
        "mamba_ssm.ops.selective_scan_interface.selective_scan_ref",
    "from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref":
        "causal_conv1d.causal_conv1d_interface.causal_conv1d_ref"}


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("first", PACKAGES)
def test_what_flashlin_lacks_of_an_absent_package(installation: Make, statement: str, first: str) -> None:
    """An import of a layer says that the package is not installed, what flashlin has, and what to install.

    first: the package that is patched first. The import hook of the second patch calls the finder of the
        first one.
    """
    installation("absent")
    package, function, variable = (
        ("mamba_ssm", "selective_scan_fn", "MAMBA") if "mamba_ssm" in statement
        else ("causal_conv1d", "causal_conv1d_fn", "CAUSAL_CONV1D"))
    with flashlin.patched(first, PACKAGES[first == PACKAGES[0]]):
        with pytest.raises(ModuleNotFoundError) as failed:
            exec(statement, {})
        assert failed.value.name == package
        said = str(failed.value)
        assert said.startswith(f"{STATEMENTS[statement]}: {package} is not installed")
        assert function in said
        install = f"pip install --no-build-isolation {package.replace('_', '-')}"
        assert said.endswith(f"{variable}_SKIP_CUDA_BUILD=TRUE {install}")
        assert not hasattr(sys.modules[package], "Mamba2")
        for name in ("modules", "Mamba2", "models"):
            assert importlib.util.find_spec(f"{package}.{name}") is None
    assert importlib.util.find_spec(package) is None
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{package}'$"):
        exec(statement, {})


@pytest.mark.alternate
def test_none_where_an_import_failed_becomes_the_function(installation: Make) -> None:
    """A name that is None because its import failed becomes flashlin's function.

    Programs set such names to None to work without a package. Norms stay None, because other packages have
    functions with the same names.
    """
    installation("absent")
    program = types.ModuleType("program")
    exec("try:\n    from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn\n"
         "    from causal_conv1d import causal_conv1d_fn\nexcept ImportError:\n"
         "    RMSNorm = layer_norm_fn = causal_conv1d_fn = None", vars(program))
    sys.modules["program"] = program
    try:
        with flashlin.patched(*PACKAGES):
            x, weight = torch.randn(1, 4, 5), torch.randn(4, 3)
            assert torch.equal(program.causal_conv1d_fn(x, weight), mamba.causal_conv1d_fn(x, weight))
            assert program.layer_norm_fn is None
            layer = torch.nn.Module()
            layer.convolve = program.causal_conv1d_fn
        assert program.causal_conv1d_fn is None and layer.convolve is None
    finally:
        del sys.modules["program"]


@pytest.mark.alternate
def test_what_transformers_remembers_is_asked_again(installation: Make,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils
    installation("absent")
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)

    def available() -> list[bool]:
        return [bool(getattr(import_utils, name)()) for name in REMEMBERED]
    try:
        forget_what_is_available()
        assert available() == [False] * 3
        with flashlin.patched(*PACKAGES):
            assert available() == [True] * 3
        assert available() == [False] * 3
    finally:
        forget_what_is_available()


def test_falcon_mamba_trains_as_it_decodes() -> None:
    """The replaced fused function of Falcon Mamba computes dt as the torch code does that decodes.

    The torch code applies the norm of dt before the projection, and the original fused function after it.
    """
    torch.manual_seed(0)
    D, N, R, T, eps = 8, 4, 3, 9, 1e-3
    conv = torch.nn.Conv1d(D, D, 4, groups=D)
    xz, A = torch.randn(2, 2 * D, T), -torch.rand(D, N)
    x_proj, dt_proj, out_proj = torch.randn(R + 2 * N, D), torch.randn(D, R), torch.randn(5, D)
    skip, bias = torch.randn(D), torch.randn(D)
    out = adapters.mamba_inner_fn(
        xz, conv.weight, conv.bias, x_proj, dt_proj, out_proj, None, A, None, None, skip, delta_bias=bias,
        delta_softplus=True, b_rms_weight=torch.ones(N), c_rms_weight=torch.ones(N),
        dt_rms_weight=torch.ones(D), b_c_dt_rms_eps=eps)
    x, z = xz.double().chunk(2, 1)
    x = convolved(x, conv.double())
    columns = (x.transpose(1, 2) @ x_proj.double().T).split([R, N, N], -1)
    dt, B, C = (one / (one.pow(2).mean(-1, keepdim=True) + eps).sqrt() for one in columns)
    y, _ = reference.selective(x, (dt @ dt_proj.double().T).transpose(1, 2), A.double(), B.transpose(1, 2),
                               C.transpose(1, 2), skip.double(), z, bias.double(), True)
    assert judge("out", out, y.transpose(1, 2) @ out_proj.double().T, 1e-4).ok


# --- order, threads, processes ---

@pytest.mark.parametrize("first", PACKAGES)
@pytest.mark.parametrize("situation", ["working", "missing", "absent"])
@pytest.mark.alternate
def test_patches_end_in_any_order(installation: Make, situation: str, first: str) -> None:
    installation(situation)
    second = PACKAGES[first == PACKAGES[0]]
    if situation == "working":
        importlib.import_module("mamba_ssm.modules.mamba2")
        before = [vars(sys.modules[name])["causal_conv1d_fn"]
                  for name in ("causal_conv1d", "mamba_ssm.modules.mamba2")]
    flashlin.patch(*PACKAGES)
    importlib.import_module("mamba_ssm")
    importlib.import_module("causal_conv1d")
    flashlin.unpatch(first)
    if situation == "absent":
        assert {name.partition(".")[0] for name in loaded()} == {second}
    flashlin.unpatch(second)
    if situation == "working":
        assert before == [vars(sys.modules[name])["causal_conv1d_fn"]
                          for name in ("causal_conv1d", "mamba_ssm.modules.mamba2")]
    else:
        assert not set(small_mamba.EXTENSIONS) & set(sys.modules)
    assert bool(loaded()) == (situation != "absent")


@pytest.mark.alternate
def test_threads_enter_and_leave_as_they_like(installation: Make) -> None:
    installation("missing")
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait()
            for turn in range(5):
                with flashlin.patched(*PACKAGES[::1 if (number + turn) % 2 else -1]):
                    package = importlib.import_module("mamba_ssm")
                    assert isinstance(package.selective_scan_fn(**scan_inputs()), Tensor)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sys.modules["mamba_ssm"].selective_scan_fn(**scan_inputs()) == "raw selective_scan_fn"


@pytest.mark.alternate
def test_a_program_runs_as_it_is(tmp_path: Path) -> None:
    """A program fails as users report, and the same program works under ``flashlin run``."""
    small_mamba.write(tmp_path, "missing")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom mamba_ssm.modules.mamba2 import Mamba2\n"
        "layer = Mamba2(16)\nlayer(torch.randn(1, 9, 16)).sum().backward()\n"
        "print('gradient', layer.in_proj.weight.grad.shape)\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(Path(flashlin.__file__).parent.parent), str(tmp_path)])
        return subprocess.run([sys.executable, *command, str(tmp_path / "train.py")], text=True,
                              capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    raw = run()
    assert raw.returncode and "No module named 'selective_scan_cuda'" in raw.stderr
    patched = run("-m", "flashlin", "run", "--patch", "mamba_ssm,causal_conv1d")
    assert patched.returncode == 0, patched.stderr
    assert "gradient torch.Size" in patched.stdout
    assert "mamba_split_conv1d_scan_combined: " in patched.stderr
