"""Tokens out of range on a real GPU, in raw torch and with flashlin.

Raw torch runs in a child process, because its CUDA context dies.
"""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashlin import chunk_simple_gla, policy
from flashlin.guards import deferred_checks
from flashlin.tokens import check_tokens, embedding, guard_embeddings, synchronize

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
HERE = __file__
A_SECOND = 1_500_000_000    # clock cycles, about


@pytest.fixture(autouse=True)
def nothing_owed():
    """Fail at the end of a test if flashlin still has an unread error about bad tokens."""
    yield
    synchronize()


@pytest.fixture
def unchecked(monkeypatch):
    """Reset the state to that of a process that has checked no tokens yet."""
    monkeypatch.setattr(deferred_checks, "_free", {})
    monkeypatch.setattr(deferred_checks, "_flags", {})
    monkeypatch.setattr(deferred_checks.atexit, "register", lambda f: None)
    monkeypatch.setattr(deferred_checks.os, "register_at_fork", lambda **hooks: None)
    yield
    synchronize()   # returns the slots to their pool


def on_gpu(ids, dtype=torch.int64):
    return torch.tensor(ids, dtype=dtype, device=GPU)


def alive() -> bool:
    return torch.ones(4, device=GPU).sum().item() == 4


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(HERE).parents[2]),
                               "PYTHONUNBUFFERED": "1", **environment})


RAW = """
    import torch
    {imports}
    weight = torch.ones(10, 4, device="cuda")
    torch.cuda.synchronize()
    try:
        {call}(torch.tensor([1, 10], device="cuda"), weight)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("first:", error)
    try:
        print("alive", torch.ones(4, device="cuda").sum().item())
    except RuntimeError as error:
        print("after:", error)
    """


def test_raw_torch_kills_the_context_and_names_neither_token_nor_place():
    said = child(RAW.format(imports="import torch.nn.functional as F", call="F.embedding")).stdout
    assert "first: " in said and "device-side assert" in said
    assert "after: " in said and "alive" not in said


def test_off_is_raw_torch():
    said = child(RAW.format(imports="from flashlin.tokens import embedding", call="embedding"),
                 FLASHLIN_TOKENS="off").stdout
    assert "after: " in said and "alive" not in said


def test_ours_raises_at_synchronize_and_the_context_lives():
    weight = torch.ones(10, 4, device=GPU, requires_grad=True)
    at = sys._getframe().f_lineno + 1
    out = embedding(on_gpu([[1, 2, 3], [4, 1_000_000, -7]]), weight)
    out.sum().backward()
    with pytest.raises(ValueError) as error:
        synchronize()
    assert str(error.value).startswith(
        f"embedding called at {HERE}:{at} in test_ours_raises_at_synchronize_and_the_context_lives: "
        "input: got 1000000 at position 4 = [1, 1], need 0 <= token < 10, the vocabulary size\n")
    assert alive()
    assert out[1, 1:].abs().sum().item() == 0
    assert weight.grad.sum(1).tolist() == [0, 4, 4, 4, 4, 0, 0, 0, 0, 0]
    synchronize()   # raises nothing: each error is reported once


def test_ours_raises_at_the_next_flashlin_op_once_the_answer_is_there():
    check_tokens(on_gpu([1, 11]), 10)
    torch.cuda.synchronize()
    q = torch.randn(1, 16, 1, 16, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(ValueError,
                       match=r"^check_tokens called at .* got 11 at position 1, need 0 <= token < 10"):
        chunk_simple_gla(q, q, q, torch.zeros(1, 16, 1, device=GPU))
    o, _ = chunk_simple_gla(q, q, q, torch.zeros(1, 16, 1, device=GPU))
    assert o.isfinite().all().item()


def test_nobody_waits_for_a_busy_gpu():
    embedding(on_gpu([1]), torch.ones(10, 4, device=GPU))   # loads the kernels
    bad, weight = on_gpu([10]), torch.ones(10, 4, device=GPU)
    torch.cuda._sleep(A_SECOND)
    for _ in range(60):     # as many as CUDA queues without making the host wait
        embedding(bad, weight)
    deferred_checks.poll()
    assert not torch.cuda.current_stream().query(), "the host waited, or the GPU slept too briefly for this test"
    with pytest.raises(ValueError, match=f"and {60 - deferred_checks.SHOWN} more like these"):
        synchronize()


def test_no_host_sync_even_in_the_first_call(unchecked, no_host_sync):
    table = nn.Embedding(100, 8, device=GPU)
    ids, labels = torch.randint(0, 100, (4, 64), device=GPU), torch.full((4, 64), -100, device=GPU)
    torch.cuda.synchronize()
    no_host_sync()
    F.embedding(ids, table.weight).sum().backward()     # torch itself reports no error here
    with guard_embeddings(table):
        for _ in range(3):
            table(ids).sum().backward()
            embedding(ids.int().t(), table.weight, padding_idx=3).sum().backward()
            check_tokens(labels, 100, ignore_index=-100)
            deferred_checks.poll()


def test_sync_raises_in_the_call_itself():
    with policy.settings(tokens="sync"):
        embedding(on_gpu([1, 9]), torch.ones(10, 4, device=GPU))
        with pytest.raises(ValueError,
                           match=r"got 10 at position 1, need 0 <= token < 10, the vocabulary size$"):
            embedding(on_gpu([1, 10]), torch.ones(10, 4, device=GPU))
    assert alive()


def test_ids_and_weight_on_different_devices():
    with pytest.raises(ValueError, match=r"^input: got device cpu, need cuda:0, where weight is$"):
        embedding(torch.tensor([1]), torch.ones(10, 4, device=GPU))


def test_another_stream():
    stream = torch.cuda.Stream()
    ids = on_gpu([3, 30])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_SECOND // 20)
        check_tokens(ids, 10)
    with pytest.raises(ValueError, match="got 30 at position 1"):
        synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_bad_position_of_many(dtype):
    ids = torch.zeros(3, 1000, 700, dtype=dtype, device=GPU).transpose(0, 2)
    ids[5:, 1:] = 77    # bad since position 5 * 3000 + 3
    check_tokens(ids, 10)
    with pytest.raises(ValueError, match=r"got 77 at position 15003 = \[5, 1, 0\]"):
        synchronize()


# Sums of whole numbers are exact in any order, so rows can be compared to the bit.
OPTIONS = [{}, {"padding_idx": 2}, {"padding_idx": -3}, {"scale_grad_by_freq": True},
           {"scale_grad_by_freq": True, "padding_idx": 1}, {"sparse": True},
           {"sparse": True, "padding_idx": 0}, {"max_norm": 0.7},
           {"max_norm": 0.7, "norm_type": 1.0, "padding_idx": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [60, 20_000])     # torch has two backward kernels
@pytest.mark.parametrize("wrong", ["none", "some", "all"])
def test_rows_and_gradients_are_those_of_torch_on_the_good_tokens(options, count, wrong):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (count,), device=GPU)
    if wrong != "none":
        ids[::1 if wrong == "all" else 3] = 50
    good = ids < 50
    start = torch.randn(50, 16, device=GPU)
    upstream = torch.randint(-3, 4, (count, 16), device=GPU).float()
    mine, torchs = start.clone().requires_grad_(), start.clone().requires_grad_()
    out = embedding(ids, mine, **options)
    if wrong != "none":
        with pytest.raises(ValueError, match=f"got 50 at position 0, need 0 <= token < {len(start)}"):
            synchronize()
    # the gradient of a bad token must not reach any row
    out.backward(torch.where(good[:, None], upstream, torch.nan))
    assert out[~good].abs().sum().item() == 0
    if wrong == "all":
        assert torch.equal(mine.detach(), start)
        assert mine.grad._nnz() == 0 if mine.grad.is_sparse else mine.grad.abs().sum().item() == 0
        return
    want = F.embedding(ids[good], torchs, **options)
    want.backward(upstream[good])
    assert torch.equal(out[good], want)
    assert torch.equal(mine.detach(), torchs.detach())
    close = 1e-5 if "scale_grad_by_freq" in options else 0
    torch.testing.assert_close(mine.grad.to_dense(), torchs.grad.to_dense(), rtol=close, atol=close)


def test_bfloat16_rows_are_bitwise_those_of_torch():
    weight = torch.randn(1000, 512, device=GPU, dtype=torch.bfloat16)
    ids = torch.randint(0, 1000, (8, 512), device=GPU, dtype=torch.int32)
    assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))


def captured(call):
    """Return the CUDA graph of one call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("warm", [True, False], ids=["after a warm-up", "without a warm-up"])
def test_a_captured_graph_flags_the_first_bad_replay(unchecked, monkeypatch, warm):
    weight, ids, out = torch.ones(10, 4, device=GPU), on_gpu([[1, 2], [3, 4]]), torch.empty(2, 2, 4,
                                                                                            device=GPU)
    embedding(ids, weight)
    synchronize()
    if not warm:    # loads the kernels; flashlin has still allocated nothing on this device
        monkeypatch.setattr(deferred_checks, "_free", {})
        monkeypatch.setattr(deferred_checks, "_flags", {})
    graph = captured(lambda: out.copy_(embedding(ids, weight)))
    graph.replay()
    synchronize()
    for replay in ([[1, 2], [30, 4]], [[40, 2], [3, 4]], [[1, 2], [3, 4]]):
        ids.copy_(on_gpu(replay))
        graph.replay()
    assert out.sum().item() == 16
    deferred_checks.poll()      # only synchronize reads a flag
    with pytest.raises(ValueError,
                       match=rf"^embedding called at {HERE}:\d+ in <lambda>: input: got 30 at position 2 = "
                             r"\[1, 0\]"):
        synchronize()
    graph.replay()
    synchronize()
    ids.fill_(-1)
    graph.replay()
    with pytest.raises(ValueError, match="got -1 at position 0"):
        synchronize()
    assert out.abs().sum().item() == 0
    assert alive()


def test_an_owed_answer_does_not_disturb_a_capture():
    ids, good = on_gpu([10]), on_gpu([1])
    check_tokens(ids, 10)
    graph = captured(lambda: check_tokens(good, 10))
    graph.replay()
    with pytest.raises(ValueError, match="got 10 at position 0"):
        synchronize()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(unchecked, mode):
    table = nn.Embedding(10, 4, device=GPU)
    guard_embeddings(table)

    @torch.compile(fullgraph=True, mode=mode)
    def step(ids):
        return table(ids) * 2
    with torch.no_grad():
        ids = on_gpu([1, 2, 3])
        for _ in range(4):      # reduce-overhead: warm-up, capture, replays
            assert torch.equal(step(ids), F.embedding(ids, table.weight) * 2)
        assert bool(deferred_checks._flags[GPU].calls) == (mode == "reduce-overhead"), "wrong capture state"
        synchronize()
        out = step(on_gpu([1, 99, 3])).clone()
    with pytest.raises(ValueError,
                       match=rf"^embedding 'Embedding' called at {HERE}:\d+ in step, compiled: input: got 99 "
                             r"at position 1"):
        synchronize()
    assert out[1].tolist() == [0, 0, 0, 0]
    assert alive()


def test_compiled_training_gives_a_bad_token_no_gradient():
    weight = torch.ones(10, 4, device=GPU, requires_grad=True)

    @torch.compile(fullgraph=True)
    def loss(ids):
        check_tokens(ids, 50)
        return embedding(ids, weight, padding_idx=2).sum()
    loss(on_gpu([[0, 2, 9], [9, 10, 9]])).backward()
    with pytest.raises(ValueError, match=r"input: got 10 at position 4 = \[1, 1\], need 0 <= token < 10"):
        synchronize()
    assert weight.grad.sum(1).tolist() == [4, 0, 0, 0, 0, 0, 0, 0, 0, 12]


def test_guarded_modules_are_named():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)).to(GPU)
    with guard_embeddings(model):
        model(on_gpu([10]))
        with pytest.raises(ValueError,
                           match=rf"^embedding '0' called at {HERE}:\d+ in test_guarded_modules_are_named"):
            synchronize()


def test_at_exit_the_message_is_printed():
    done = child("""
        import torch
        from flashlin.tokens import check_tokens, embedding
        def step():
            embedding(torch.tensor([1, 10], device="cuda"), torch.ones(10, 4, device="cuda"))
        step()
        ids = torch.tensor([1, 2], device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            check_tokens(ids, 10)
        ids.fill_(12)
        graph.replay()
        """)
    assert done.returncode == 0
    assert "flashlin: embedding called at <string>:5 in step: input: got 10 at position 1" in done.stderr
    assert "check_tokens called at <string>:10 in <module>: tokens: got 12 at position 0" in done.stderr


def test_at_exit_a_dead_context_changes_nothing():
    done = child("""
        import torch, torch.nn.functional as F
        from flashlin.tokens import check_tokens
        weight = torch.ones(10, 4, device="cuda")
        F.embedding(torch.tensor([10], device="cuda"), weight)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print("dead")
        """)
    before = (done.returncode, done.stdout)
    done = child("""
        import torch, torch.nn.functional as F
        from flashlin.tokens import check_tokens
        weight = torch.ones(10, 4, device="cuda")
        check_tokens(torch.tensor([1], device="cuda"), 10)
        F.embedding(torch.tensor([10], device="cuda"), weight)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print("dead")
        """)
    assert (done.returncode, done.stdout) == before
    assert "flashlin" not in done.stderr


def test_a_dataloader_worker_checks_its_own_tokens_while_its_parent_is_owed_answers():
    torch.cuda._sleep(A_SECOND)
    check_tokens(on_gpu([10]), 10)

    def collate(rows):
        ids = torch.tensor(rows)
        check_tokens(ids, 10)
        return ids
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # Python warns of any fork of a process with threads
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1, collate_fn=collate,
                                             multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="got 10 at position 0"):
        synchronize()
