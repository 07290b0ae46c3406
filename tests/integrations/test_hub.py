"""flashlin.kernel_mapping meets the requirements of the package ``kernels``.

With TEST_WHOLE=1 the real package runs, with a transformers release that accepts it.
"""
from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import flashlin
from flashlin.integrations.hub import Repository
from flashlin.integrations.transformers import KERNEL, decorated
from flashlin.testing.environments import installed
from tests.share import WHOLE

FUNCTIONS = [(module, one) for module in (mamba2, qwen3_next) for one in decorated(module)]


def test_every_name_that_models_look_up_is_mapped() -> None:
    mapping = flashlin.kernel_mapping()
    assert set(mapping) == set(KERNEL)
    assert mapping == flashlin.kernel_mapping() and len({mapping[name]["cuda"] for name in mapping}) == len(KERNEL)
    assert {one.kernel for _, one in FUNCTIONS} <= set(mapping)


@pytest.mark.parametrize("kernel", sorted({one.kernel for _, one in FUNCTIONS}))
def test_a_repository_is_what_kernels_accepts(kernel: str) -> None:
    """A repository has no constructor, and no members besides forward and two flags.

    Its parameters have the same number and kinds.
    """
    layer = Repository(kernel).load()
    assert layer.__init__ is torch.nn.Module.__init__
    assert set(dir(layer)) - set(dir(torch.nn.Module)) <= {"can_torch_compile", "has_backward"}
    theirs = next(one.torch for _, one in FUNCTIONS if one.kernel == kernel)
    ours = list(inspect.signature(layer.forward).parameters.values())[1:]
    assert [p.kind for p in ours] == [p.kind for p in inspect.signature(theirs).parameters.values()]


def test_its_forward_is_flashlin_s() -> None:
    x, weight = torch.randn(2, 8, 20), torch.randn(8, 4)
    ours = Repository("causal_conv1d_fn").load()()(x, weight, activation="gelu", use_cache=False)
    torch.testing.assert_close(ours, mamba2.causal_conv1d_fn(x, weight, activation="gelu"), rtol=1e-5, atol=1e-5)


def test_a_name_that_no_loaded_model_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if ".modeling_" in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(LookupError, match="chunk_kda: no loaded model of transformers looks up this kernel"):
        Repository("chunk_kda").load()


PROGRAM = """
import kernels, torch, flashlin
from flashlin import dispatch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
torch.manual_seed(0)
model = Mamba2ForCausalLM(Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, state_size=16, n_groups=1,
                                       num_hidden_layers=2, vocab_size=50, chunk_size=16, expand=2)).eval()
tokens = torch.randint(0, 50, (2, 30))
raw = model(tokens).logits
assert dispatch.plan.cache_info().misses == 0
if {by_transformers}:
    get_kernel_mapping_transformers().update(flashlin.kernel_mapping())
    model.set_use_kernels(True)
else:
    with kernels.use_kernel_mapping(flashlin.kernel_mapping()):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
torch.testing.assert_close(model(tokens).logits, raw, rtol=1e-4, atol=1e-4)
assert dispatch.plan.cache_info().misses > 0
"""


@pytest.mark.skipif(not WHOLE, reason="installs another transformers")
@pytest.mark.parametrize("by_transformers", [False, True])
def test_with_the_real_package(by_transformers: bool) -> None:
    home = installed(["transformers==5.19.0", "kernels==0.17.2"], "transformers-5.19.0-kernels-0.17.2",
                     dependencies=True)
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM.format(by_transformers=by_transformers))],
                   check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(
                       [str(home), *filter(None, [os.environ.get("PYTHONPATH")])])})
