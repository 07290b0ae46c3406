"""Tests of tokens that are out of range.

The GPU path, which reads no tensor on the host, is compared with F.embedding on CPU tensors. Its deferred
reports are tested on a simulated GPU: CPU tensors whose ``is_cuda`` is True, and events that tests complete.
tests/gpu/test_tokens.py uses a real GPU.
"""
from __future__ import annotations

import copy
import functools
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlin import policy, tokens
from flashlin.guards import deferred_checks
from flashlin.guards.tokens import first_bad, keep_first, out_of_range
from flashlin.tokens import check_tokens, embedding, guard_embeddings, masked_embedding, synchronize

HERE = __file__


class OnGpu(Tensor):
    """A CPU tensor that takes flashlin's path for GPU tensors."""
    is_cuda = property(lambda self: True)


class PaperEvent:
    """A fake CUDA event, which is complete when a test sets ``over``."""
    over = True

    def __init__(self):
        self.recorded = 0

    def record(self, stream):
        self.recorded += 1

    def query(self):
        return PaperEvent.over

    def synchronize(self):
        PaperEvent.over = True


@pytest.fixture
def paper_gpu(monkeypatch):
    """Return a function that turns a tensor into one on a simulated GPU.

    ``paper_gpu.capture(True)`` begins the capture of a CUDA graph.
    """
    for name, value in (("Event", PaperEvent), ("current_stream", lambda device: None),
                        ("synchronize", lambda device: None), ("is_current_stream_capturing", lambda: False)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in (("_free", {}), ("_flags", {})):
        monkeypatch.setattr(deferred_checks, name, value)
    monkeypatch.setattr(deferred_checks.atexit, "register", lambda f: None)
    monkeypatch.setattr(deferred_checks.os, "register_at_fork", lambda **hooks: None)
    PaperEvent.over = True

    def onto(x):
        return torch.as_tensor(x).as_subclass(OnGpu)
    onto.capture = lambda on: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on)
    yield onto
    deferred_checks.owed.clear()


# Errors of raw torch, and of the same call in flashlin


def test_raw_torch_names_neither_token_nor_place():
    with pytest.raises(IndexError, match=r"^index out of range in self$"):
        F.embedding(torch.tensor([[1, 2], [3, 10]]), torch.zeros(10, 4))


def test_the_error_names_call_position_value_and_vocabulary():
    with pytest.raises(ValueError) as error:
        embedding(torch.tensor([[1, 2], [10, 11]]), torch.zeros(10, 4))
    at = error.traceback[0].lineno + 1
    assert str(error.value) == (
        f"embedding called at {HERE}:{at} in test_the_error_names_call_position_value_and_vocabulary: "
                                "input: got 10 at position 2 = [1, 0], need 0 <= token < 10, the vocabulary "
                                "size")


@pytest.mark.parametrize("bad, says", [
    (torch.tensor([3, -1, 99]), "tokens: got -1 at position 1, need 0 <= token < 10, the vocabulary size"),
    (torch.tensor(10), "tokens: got 10 at position 0, need 0 <= token < 10, the vocabulary size"),
    (torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32).t() * 3,
     "tokens: got 12 at position 3 = [1, 1], need 0 <= token < 10, the vocabulary size"),
    (torch.tensor([2 ** 62]),
     f"tokens: got {2 ** 62} at position 0, need 0 <= token < 10, the vocabulary size"),
])
def test_check_tokens_names_the_first_bad_token(bad, says):
    with pytest.raises(ValueError) as error:
        check_tokens(bad, 10)
    assert str(error.value).endswith(f"in test_check_tokens_names_the_first_bad_token: {says}")


def test_ignore_index_is_fine_and_is_named_where_another_token_is_not():
    check_tokens(torch.tensor([-100, 3, -100]), 10, "labels", ignore_index=-100)
    with pytest.raises(ValueError,
                       match=r"labels: got -1 at position 2, need 0 <= token < 10, the vocabulary size or "
                             r"ignore_index = -100$"):
        check_tokens(torch.tensor([-100, 3, -1]), 10, "labels", ignore_index=-100)
    with pytest.raises(ValueError, match=r"got -100 at position 0"):
        check_tokens(torch.tensor([-100, 3]), 10)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_no_tokens_are_fine(shape):
    none = torch.zeros(shape, dtype=torch.int64)
    check_tokens(none, 10)
    assert embedding(none, torch.zeros(10, 4)).shape == (*shape, 4)
    assert embedding(none, torch.zeros(0, 4)).shape == (*shape, 4)


def test_a_vocabulary_beyond_int32_accepts_every_int32_token():
    check_tokens(torch.tensor([2 ** 31 - 1, 0], dtype=torch.int32), 2 ** 40)


@pytest.mark.parametrize("call, kind, says", [
    (lambda: check_tokens(torch.zeros(3), 10, "labels"), TypeError,
     "labels: got dtype torch.float32, need int32 or int64"),
    (lambda: check_tokens([1, 2], 10), TypeError, "tokens: got list, need an int32 or int64 tensor"),
    (lambda: check_tokens(torch.zeros(3, dtype=torch.int64), 10.0), TypeError,
     "vocab_size: got float, need an int"),
    (lambda: check_tokens(torch.zeros(3, dtype=torch.int64), 0), ValueError,
     "vocab_size: got 0, need at least 1"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int16), torch.zeros(5, 2)), TypeError,
     "input: got dtype torch.int16, need int32 or int64"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), [[1.0]]), TypeError,
     "weight: got list, need a tensor of shape [V, D]"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5)), ValueError,
     "weight: got shape [5], need [V, D]"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(0, 2)), ValueError,
     "weight: got a vocabulary of 0 rows, need at least 1 for 3 tokens"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), padding_idx=5), ValueError,
     "padding_idx: got 5, need -5 <= padding_idx < 5, the rows of weight"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), padding_idx=-6), ValueError,
     "padding_idx: got -6, need -5 <= padding_idx < 5, the rows of weight"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), padding_idx=2**63), ValueError,
     "padding_idx: got 9223372036854775808, need an integer, below 2**63"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), padding_idx="1"), TypeError,
     "padding_idx: got '1', need an integer"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), None, 10**400), ValueError,
     "max_norm: got an integer of 1329 bits, need a number"),
    (lambda: embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2), None, 1, "2"), TypeError,
     "norm_type: got '2', need a number"),
    (lambda: check_tokens(torch.zeros(3, dtype=torch.int64), 9, ignore_index=-10**30), ValueError,
     "ignore_index: got an integer of 100 bits, need an integer, or None, at least -2**63"),
    (lambda: guard_embeddings("model"), TypeError, "model: got str, need an nn.Module"),
])
def test_arguments_that_do_not_fit(call, kind, says):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == says


# The GPU path, which reads no tensor on the host, compared with F.embedding

OPTIONS = [{}, {"padding_idx": 2}, {"padding_idx": -3}, {"scale_grad_by_freq": True},
           {"scale_grad_by_freq": True, "padding_idx": 1}, {"sparse": True},
           {"sparse": True, "padding_idx": 0}, {"max_norm": 0.7},
           {"max_norm": 0.7, "norm_type": 1.0, "padding_idx": 0}, {"max_norm": 0.7, "sparse": True}]


def masked(ids: Tensor, weight: Tensor, padding_idx=None, max_norm=None, norm_type=2.0,
           scale_grad_by_freq=False, sparse=False) -> Tensor:
    index, bad = out_of_range(ids, weight.shape[0])
    options = tokens.Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return masked_embedding(weight, index, bad, options)


def run(op, ids, start, upstream, options):
    """Run an embedding forward and backward; return the output, the gradient and the table afterwards."""
    weight = start.clone().requires_grad_()
    out = op(ids, weight, **options)
    out.backward(upstream)
    return out.detach(), weight.grad, weight.detach()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_valid_tokens_give_what_torch_gives_bit_for_bit(options, dtype):
    ids = torch.randint(0, 7, (5, 4), dtype=dtype).t()
    start, upstream = torch.randn(7, 6), torch.randn(4, 5, 6)
    for mine, torchs in zip(run(masked, ids, start, upstream, options),
                            run(F.embedding, ids, start, upstream, options), strict=True):
        assert mine.is_sparse == torchs.is_sparse
        assert torch.equal(mine.to_dense(), torchs.to_dense())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("everything_bad", [False, True])
def test_a_bad_token_gives_a_zero_row_and_touches_no_row(options, everything_bad):
    ids = torch.full((3, 4), 99) if everything_bad else torch.tensor([[7, 1, 1, -1], [3, 2 ** 40, 5, 1],
                                                                      [-9, 0, 8, 3]])
    good = (ids >= 0) & (ids < 7)
    start, upstream = torch.randn(7, 6) * 3, torch.randn(3, 4, 6)
    upstream[~good] = torch.nan  # gradients of bad tokens must reach no row of the table
    out, grad, after = run(masked, ids, start, upstream, options)
    want, want_grad, want_after = run(F.embedding, ids[good], start, upstream[good], options)
    assert torch.equal(out[good], want)
    assert (out[~good] == 0).all()
    assert torch.equal(grad.to_dense(), want_grad.to_dense())
    assert torch.equal(after, want_after)
    if grad.is_sparse:  # not even as an explicit zero, which some optimizers act on
        assert grad._nnz() == want_grad._nnz()


def test_sparse_with_scale_grad_by_freq_fails_as_in_torch():
    for op in (masked, F.embedding):
        with pytest.raises(RuntimeError, match="scale_grad_by_freq not supported with sparse"):
            run(op, torch.tensor([1, 2]), torch.zeros(3, 2), torch.zeros(2, 2),
                {"sparse": True, "scale_grad_by_freq": True})


def test_gradients_of_gradients():
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 5, 1], [4, -1, 1]])
    assert torch.autograd.gradcheck(lambda w: masked(ids, w), (weight,))
    assert torch.autograd.gradgradcheck(lambda w: masked(ids, w).pow(3), (weight,))


@given(st.data())
@pytest.mark.usefixtures("modules_read")
@settings(max_examples=200, deadline=None)
def test_every_mixture_of_tokens(data):
    vocab = data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    info = torch.iinfo(dtype)
    token = st.one_of(st.integers(-2, vocab + 2), st.integers(info.min, info.max))
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    ids = torch.tensor(data.draw(st.lists(token, min_size=torch.Size(shape).numel(),
                                          max_size=torch.Size(shape).numel())), dtype=dtype)
    ids = ids.reshape(shape)
    if len(shape) > 1 and data.draw(st.booleans()):
        ids = ids.transpose(0, -1)
    ignore = data.draw(st.sampled_from([None, -1, vocab + 1]))
    flat = ids.reshape(-1).tolist()
    wrong = [position for position, value in enumerate(flat) if not 0 <= value < vocab and value != ignore]
    index, bad = out_of_range(ids, vocab, ignore)
    assert bad.reshape(-1).nonzero().flatten().tolist() == wrong
    assert not wrong or first_bad(ids, bad).tolist() == [wrong[0], flat[wrong[0]]]
    assert ((index >= 0) & (index < vocab)).all()
    try:
        check_tokens(ids, vocab, ignore_index=ignore)
    except ValueError as error:
        assert f"got {flat[wrong[0]]} at position {wrong[0]}" in str(error)
    else:
        assert not wrong
    weight = torch.randn(vocab, 3)
    out = masked(ids, weight)
    assert out.shape == (*ids.shape, 3)
    rows = [weight[value] if 0 <= value < vocab else torch.zeros(3) for value in flat]
    assert torch.equal(out.reshape(-1, 3), torch.stack(rows))


def test_a_flag_keeps_the_first_replay_that_was_wrong():
    flag = torch.tensor([-1, -1])
    for replay in ([1, 2, 3], [1, 70, 60], [50, 2, 3]):
        ids = torch.tensor(replay)
        keep_first(flag, ids, out_of_range(ids, 10)[1])
    assert flag.tolist() == [1, 70]


# Deferred reports


def test_the_call_runs_on_and_the_next_one_names_it(paper_gpu):
    PaperEvent.over = False
    weight = torch.ones(10, 2, requires_grad=True)
    at = sys._getframe().f_lineno + 1
    out = embedding(paper_gpu([[1, 2, 3], [4, 50, 6]]), weight)
    out.sum().backward()
    assert out[1, 1].tolist() == [0, 0]
    assert weight.grad.sum(1).tolist() == [0, 2, 2, 2, 2, 0, 2, 0, 0, 0]
    embedding(torch.tensor([1]), weight)  # the event is not complete, and no call waits for it
    PaperEvent.over = True
    with pytest.raises(ValueError) as error:
        embedding(torch.tensor([1]), weight)
    assert str(error.value) == (
        f"embedding called at {HERE}:{at} in test_the_call_runs_on_and_the_next_one_names_it: "
        "input: got 50 at position 4 = [1, 1], need 0 <= token < 10, the vocabulary size\n"
        '  note     the call did not wait for the GPU; flashlin.settings(tokens="sync") raises in the call itself')
    embedding(torch.tensor([1]), weight)  # each error is reported once
    synchronize()


def test_synchronize_waits_and_tells_them_in_order(paper_gpu):
    PaperEvent.over = False
    for ids in ([1], [11], [2], [12]):
        check_tokens(paper_gpu(ids), 10)
    with pytest.raises(ValueError,
                       match=r"(?s)^check_tokens .* got 11 at position 0.*\n  also     check_tokens .* got "
                             r"12 at position 0"):
        synchronize()
    synchronize()


def test_a_long_list_of_failures_is_cut(paper_gpu):
    for value in range(10, 18):
        check_tokens(paper_gpu([value]), 10)
        PaperEvent.over = False
    with pytest.raises(ValueError) as error:
        synchronize()
    assert str(error.value).count("check_tokens") == deferred_checks.SHOWN
    assert "\n  and 3 more like these\n" in str(error.value)


def test_good_tokens_say_nothing_and_free_their_slots(paper_gpu):
    for _ in range(3 * deferred_checks.SLOTS):
        check_tokens(paper_gpu([1, 2, -100]), 10, ignore_index=-100)
    synchronize()
    assert len(deferred_checks._free[torch.device("cpu")]) == deferred_checks.SLOTS
    assert not deferred_checks.owed


def test_more_calls_than_slots_lose_no_report_and_wait_for_none(paper_gpu):
    PaperEvent.over = False
    for _ in range(2 * deferred_checks.SLOTS + 1):
        check_tokens(paper_gpu([1, 2]), 10)
    check_tokens(paper_gpu([77]), 10)
    with pytest.raises(ValueError, match="got 77"):
        synchronize()
    assert len(deferred_checks._free[torch.device("cpu")]) == 3 * deferred_checks.SLOTS


def test_slots_made_in_inference_mode_serve_outside_it(paper_gpu):
    with torch.inference_mode():
        check_tokens(paper_gpu([1]), 10)
    check_tokens(paper_gpu([1]), 10)
    synchronize()


def test_poll_asks_no_event_while_a_graph_is_captured(paper_gpu):
    check_tokens(paper_gpu([77]), 10)
    paper_gpu.capture(True)
    deferred_checks.poll()
    paper_gpu.capture(False)
    with pytest.raises(ValueError, match="got 77"):
        deferred_checks.poll()


def test_a_captured_call_writes_its_flag_only_and_synchronize_reads_it(paper_gpu):
    check_tokens(paper_gpu([1]), 10)  # warm-up, as before every capture of a CUDA graph
    deferred_checks.poll()
    paper_gpu.capture(True)
    # Calls from one source line share one flag, as replays of a captured call do.
    for ids in ([[1, 2], [3, 4]], [[1, 2], [30, 4]], [[9, 20], [1, 1]]):
        out = embedding(paper_gpu(ids), torch.ones(10, 2))
    check_tokens(paper_gpu([5]), 10)
    paper_gpu.capture(False)
    assert not deferred_checks.owed
    assert out[0].tolist() == [[1, 1], [0, 0]]
    deferred_checks.poll()
    with pytest.raises(ValueError, match=r"^embedding called .*: input: got 30 at position 2 = \[1, 0\]"):
        synchronize()
    synchronize()  # each error is reported once


def test_captured_calls_without_a_flag_are_announced(paper_gpu, monkeypatch):
    check_tokens(paper_gpu([1]), 10)
    monkeypatch.setattr(deferred_checks, "FLAGS", 1)
    paper_gpu.capture(True)
    check_tokens(paper_gpu([1]), 10)
    with pytest.warns(UserWarning,
                      match="captured graphs contain more than 1 different checks; check_tokens called at"):
        check_tokens(paper_gpu([1]), 11)
    assert len(deferred_checks._flags[torch.device("cpu")].calls) == 1


def test_sync_raises_in_the_call_itself(paper_gpu):
    with policy.settings(tokens="sync"), pytest.raises(ValueError,
                                                       match=r"got 50 at position 0, need 0 <= token < 10, "
                                                             r"the vocabulary size$"):
        embedding(paper_gpu([50]), torch.ones(10, 2))
    assert not deferred_checks.owed


def test_off_is_plain_torch(paper_gpu):
    with policy.settings(tokens="off"):
        check_tokens(torch.tensor([50]), 10)
        check_tokens(paper_gpu([50]), 10)
        with pytest.raises(IndexError):
            embedding(torch.tensor([50]), torch.ones(10, 2))
    assert not deferred_checks.owed


def test_at_exit_what_is_known_is_printed_and_not_raised(paper_gpu, capsys):
    check_tokens(paper_gpu([1, 50]), 10)
    paper_gpu.capture(True)
    check_tokens(paper_gpu([60]), 10)
    paper_gpu.capture(False)
    deferred_checks._at_exit()
    said = capsys.readouterr().err
    assert said.startswith("flashlin: check_tokens called at ")
    assert "got 50 at position 1" in said and "got 60 at position 0" in said


def test_at_exit_a_gpu_that_hangs_or_is_dead_hangs_nobody(paper_gpu, capsys, monkeypatch):
    monkeypatch.setattr(deferred_checks, "PATIENCE", 0.05)
    check_tokens(paper_gpu([50]), 10)
    PaperEvent.over = False
    deferred_checks._at_exit()

    def dead(self):
        raise RuntimeError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(PaperEvent, "query", dead)
    deferred_checks._at_exit()
    assert capsys.readouterr().err == ""


def test_a_forked_child_asks_nothing_of_its_parents_gpu(paper_gpu):
    check_tokens(paper_gpu([50]), 10)
    deferred_checks._in_child()
    synchronize()
    assert len(deferred_checks._free[torch.device("cpu")]) == deferred_checks.SLOTS


def test_importing_loads_no_compiler_and_without_a_gpu_nothing_is_owed():
    code = """
        import sys, torch
        loaded = set(sys.modules)
        from flashlin import tokens
        from flashlin.guards import deferred_checks
        print({"triton", "torch._dynamo", "torch._inductor"} & set(sys.modules) - loaded)
        tokens.check_tokens(torch.tensor([1]), 2)
        deferred_checks.poll()
        tokens.synchronize()
        print(deferred_checks._flags, deferred_checks.owed)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=120, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(HERE).parents[1])})
    assert (done.stdout, done.stderr) == ("set()\n{} deque([])\n", "")


# guard_embeddings


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(10, 4, padding_idx=0)
        self.layers = nn.ModuleList([nn.Embedding(5, 4, scale_grad_by_freq=True, dtype=torch.float64)])

    def forward(self, ids):
        return self.wte(ids), self.layers[0](ids)


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def test_guarded_modules_are_named_and_remove_gives_torch_back():
    model = Model()
    before, state = model(torch.tensor([1, 4])), set(model.state_dict())
    with guard_embeddings(model) as handle:
        assert handle.names == ["wte", "layers.0"]
        assert set(model.state_dict()) == state
        assert [type(m) for m in model.modules()] == [type(m) for m in Model().modules()]
        assert all(torch.equal(a, b) for a, b in zip(model(torch.tensor([1, 4])), before, strict=True))
        with pytest.raises(ValueError,
                           match=rf"^embedding 'layers\.0' called at {HERE}:\d+ in forward: input: got 5 at "
                                 r"position 1"):
            model(torch.tensor([1, 5]))
    with pytest.raises(IndexError):
        model(torch.tensor([1, 5]))
    handle.remove()
    assert all("forward" not in vars(m) and "_flashlin_name" not in vars(m) for m in model.modules())


def test_guarding_twice_guards_once():
    model = Model()
    guard_embeddings(model)
    again = guard_embeddings(model)
    assert again.names == []
    again.remove()
    with pytest.raises(ValueError, match="embedding 'wte'"):
        model(torch.tensor([10]))


def test_a_bare_embedding_goes_by_its_type():
    table = nn.Embedding(3, 2)
    guard_embeddings(table)
    with pytest.raises(ValueError, match=r"^embedding 'Embedding' called"):
        table(torch.tensor([3]))


def test_a_forward_of_its_own_stays_and_is_named():
    model = nn.Sequential(Scaled(4, 2), nn.Embedding(4, 2))
    with pytest.warns(UserWarning, match="guard_embeddings: 0 with a forward of their own stay unguarded"):
        handle = guard_embeddings(model)
    assert (handle.names, handle.unguarded) == (["1"], ["0"])


def test_copies_of_a_guarded_module_use_their_own_table():
    table = nn.Embedding(3, 2)
    guard_embeddings(table)
    other = copy.deepcopy(table)
    nn.init.zeros_(other.weight)
    assert other(torch.tensor([1])).abs().sum() == 0
    assert table(torch.tensor([1])).abs().sum() > 0
    with pytest.raises(ValueError, match="got 3"):
        other(torch.tensor([3]))


def test_a_saved_guarded_module_loads_as_a_plain_one():
    table, file = nn.Embedding(3, 2), io.BytesIO()
    guard_embeddings(table)
    torch.save(table, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.tensor([1])), table(torch.tensor([1])))
    with pytest.raises(IndexError):
        loaded(torch.tensor([3]))


def test_guarded_training_moves_the_same_rows_as_torch():
    plain = Model()
    guarded = copy.deepcopy(plain)
    guard_embeddings(guarded)
    ids = torch.tensor([[0, 1, 1], [4, 0, 2]])
    for model in (plain, guarded):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        a, b = model(ids)
        (a.sum() + b.sum()).backward()
        optimizer.step()
    for a, b in zip(plain.parameters(), guarded.parameters(), strict=True):
        assert torch.equal(a, b)


# torch.compile and other features of torch


def test_compiled_calls_raise_and_name_the_line_that_was_compiled():
    weight = torch.randn(10, 3, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids):
        check_tokens(ids, 12, "ids")
        return embedding(ids, weight, padding_idx=2) * 2
    ids = torch.tensor([[1, 2], [2, 9]])
    step(ids).sum().backward()
    ours, weight.grad = weight.grad, None
    (F.embedding(ids, weight, padding_idx=2) * 2).sum().backward()
    assert torch.equal(ours, weight.grad)
    with pytest.raises(ValueError,
                       match=rf"^check_tokens called at {HERE}:\d+ in step, compiled: ids: got 12 at "
                             r"position 1, need 0 <= token < 12"):
        step(torch.tensor([1, 12]))
    with pytest.raises(ValueError,
                       match=rf"^embedding called at {HERE}:\d+ in step, compiled: input: got 11 at position "
                             r"0, need 0 <= token < 10"):
        step(torch.tensor([11, 1]))


@pytest.mark.parametrize("rows", [4, 0])
def test_a_compiled_renorm_takes_no_tokens(rows):
    weight = torch.full((rows, 3), 2.0)
    step = torch.compile(functools.partial(embedding, max_norm=1.0), fullgraph=True, backend="aot_eager")
    assert step(torch.zeros(2, 0, dtype=torch.int64), weight).shape == (2, 0, 3)
    assert (weight == 2).all()
    if rows:
        step(torch.tensor([1]), weight)
        assert torch.allclose(weight.norm(dim=1), torch.tensor([12.0, 1.0, 12.0, 12.0]).where(
            torch.arange(4) == 1, torch.tensor(12.0).sqrt()))


def test_a_compiled_check_whose_result_nobody_uses_survives_the_compiler():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids):
        check_tokens(ids, 12)
        return ids + 1
    assert step(torch.tensor([1, 2])).tolist() == [2, 3]
    with pytest.raises(ValueError, match="got 12 at position 1"):
        step(torch.tensor([1, 12]))


def test_per_sample_gradients():
    weight, ids = torch.randn(10, 3), torch.randint(0, 10, (4, 6))

    def grads(op):
        def loss(w, x):
            check_tokens(x, 10)
            return op(x, w).pow(2).sum()
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, ids)
    assert torch.equal(grads(embedding), grads(F.embedding))
    ids[0] = 10
    assert grads(embedding)[0].abs().sum() == 0


def test_tensors_without_values_are_left_to_torch():
    with FakeTensorMode():
        ids = torch.zeros(2, 3, dtype=torch.int64)
        check_tokens(ids, 5)
        assert embedding(ids, torch.zeros(5, 4)).shape == (2, 3, 4)
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    check_tokens(ids, 5)
    assert embedding(ids, torch.zeros(5, 4, device="meta")).shape == (3, 4)


def test_the_doors_are_flashlins():
    assert tokens.synchronize is deferred_checks.synchronize
