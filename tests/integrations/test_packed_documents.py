"""Documents packed into one row of a patched transformers model stay apart, or one warning says why not.

This must hold for every way to mark documents. ``matrix/results/documents.json`` has all models; here are a
few of them.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashlin
from flashlin.integrations import patching
from flashlin.integrations.documents import _beginnings, masking, watched
from flashlin.integrations.model_fixes import warning
from matrix.__main__ import RESULTS
from matrix.stacks import documents
from matrix.stacks.documents import block_mask, numbers, positions
from matrix.stacks.models import MODELS, UNPATCHED, build, named
from matrix.stacks.records import read

transformers = pytest.importorskip("transformers")
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    pytest.skip("layers of older versions take other arguments", allow_module_level=True)

FIRST, T = 9, 23
EDGES = (0, FIRST, T)
MARKS: dict[str, dict[str, Any]] = {
    "[B, T]": {"position_ids": positions(EDGES)},
    "[4, B, T]": {"position_ids": positions(EDGES).expand(4, -1, -1)},
    "[3, B, T]": {"position_ids": positions(EDGES).expand(3, -1, -1)},
    "ones": {"position_ids": positions(EDGES), "attention_mask": torch.ones(1, T, dtype=torch.long)},
    "numbers": {"position_ids": positions(EDGES), "attention_mask": numbers(EDGES)},
    "numbers alone": {"attention_mask": numbers(EDGES)},
    "block mask": {"position_ids": positions(EDGES), "attention_mask": block_mask(EDGES)},
    "boolean block mask": {"attention_mask": block_mask(EDGES) == 0},
    "seq_idx alone": {"seq_idx": numbers(EDGES).int()},
    "bounds alone": {"cu_seq_lens_q": torch.tensor(EDGES, dtype=torch.int32)}}


def second(model: Any, first: int, marks: dict[str, Any], called: Any = None) -> list[Tensor]:
    """Return the second document's logits and the gradients of its loss, in a row after a first document."""
    tokens = torch.randint(2, 60, (1, T), generator=torch.Generator().manual_seed(1))
    tokens[:, :FIRST] = torch.randint(2, 60, (1, FIRST), generator=torch.Generator().manual_seed(first))
    model.zero_grad(set_to_none=True)
    logits = (model if called is None else called)(input_ids=tokens.to(model.device), **marks)
    logits = logits.logits[:, FIRST:]
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device)
    (logits * weights.view_as(logits)).sum().backward()
    return [logits.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def leak(model: Any, marks: dict[str, Any], called: Any = None) -> float:
    """Return the largest relative change of the second document's tensors if the first one changes.

    A change is relative to the largest value of its tensor.
    """
    one, other = (second(model, first, marks, called) for first in (2, 3))
    assert len(one) == len(other)
    return max(float((a - b).abs().max() / max(float(a.abs().max()), 1e-2))
               for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("model, way", [
    *(("qwen3_5", way) for way in MARKS if "alone" not in way and "bool" not in way),
    *(("kimi_linear", way) for way in ("ones", "numbers", "block mask", "boolean block mask")),
    *(("mamba2", way) for way in ("numbers", "numbers alone", "boolean block mask")),
    *(("lfm3", way) for way in ("ones", "block mask", "numbers alone", "seq_idx alone")),
    ("granitemoehybrid", "[B, T]"), ("inkling2", "bounds alone"), ("zamba2", "numbers"),
    ("lara_mini", "ones")])
@pytest.mark.alternate
def test_the_first_document_does_not_change_the_second(model: str, way: str) -> None:
    """The second document has the same results after any first document.

    The calls do not set use_cache, so models write a cache by default.
    """
    with flashlin.patched("transformers"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        made = build(named(model))
        assert leak(made, MARKS[way]) < 1e-4
        if way in ("ones", "numbers"):
            assert leak(made, {}) > 1e-2, "without marks it is one document, which this test must see"


@pytest.mark.parametrize("model, way", [("qwen3_5", "[4, B, T]"), ("mamba2", "[B, T]"), ("lfm3", "numbers")])
@pytest.mark.alternate
def test_a_compiled_model_keeps_documents_apart(model: str, way: str) -> None:
    """There is no graph break, because tensor operations alone find the documents."""
    with flashlin.patched("transformers"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        made = build(named(model))
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        assert leak(made, MARKS[way], compiled) < 1e-4


def test_recomputed_layers_keep_documents_apart() -> None:
    with flashlin.patched("transformers"):
        made = build(named("qwen3_5"))
        right = second(made, 2, MARKS["ones"])
        made.gradient_checkpointing_enable()
        again = second(made, 2, MARKS["ones"])
        assert max(float((a - b).abs().max()) for a, b in zip(right, again, strict=True)) < 1e-5


def said(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in seen if one.category is RuntimeWarning]


@pytest.mark.parametrize("model", [one.name for one in UNPATCHED])
def test_a_recurrent_model_that_is_not_patched_warns_once(model: str) -> None:
    with torch.no_grad(), flashlin.patched("transformers"):
        made = build(next(one for one in UNPATCHED if one.name == model))
        tokens = torch.randint(2, 60, (1, T))
        assert said(lambda: made(input_ids=tokens, position_ids=torch.arange(T)[None])) == []
        assert said(lambda: made(input_ids=tokens, attention_mask=torch.ones(1, T, dtype=torch.long))) == []
        one, = said(lambda: made(input_ids=tokens, **MARKS["numbers"]))
        assert one.startswith(f"{type(made).__name__} got position_ids, and flashlin does not patch its "
                              "recurrent layers") and "Give it a document a row, padded" in one
        assert said(lambda: made(input_ids=tokens, **MARKS["[B, T]"])) == []


def test_a_compiled_model_that_mixes_documents_warns_once() -> None:
    with torch.no_grad(), flashlin.patched("transformers"):
        made = build(named("mamba"))
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        one, = said(lambda: compiled(input_ids=torch.randint(2, 60, (1, T)), **MARKS["[B, T]"]))
        assert one.startswith("MambaForCausalLM got position_ids where its values cannot be read")
        assert said(lambda: compiled(input_ids=torch.randint(2, 60, (1, T + 1)),
                                     position_ids=torch.arange(T + 1)[None])) == []


def test_a_single_document_is_no_reason_to_warn() -> None:
    tokens, mask = torch.randint(2, 60, (2, T)), torch.ones(2, T, dtype=torch.long)
    mask[0, :5] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad(), flashlin.patched("transformers"):
        patching._in_force["transformers"].said.clear()
        for model in ("mamba", "glm5_next"):
            made = build(named(model))
            for marks in ({"attention_mask": mask}, {"position_ids": places, "attention_mask": mask}):
                assert said(lambda made=made, marks=marks: made(tokens, **marks)) == []  # type: ignore[misc]


MIN = torch.finfo(torch.float32).min
PADDED_BLOCKS = torch.tensor([[MIN, MIN, MIN, MIN], [MIN, 0, MIN, MIN], [MIN, 0, 0, MIN],
                              [MIN, MIN, MIN, 0.]])


@pytest.mark.parametrize("given, found", [
    ({"position_ids": [[0, 1, 0, 1]]}, [[0, 1, 0]]),
    ({"position_ids": [[7, 8, 3, 4]]}, [[0, 1, 0]]),
    ({"position_ids": [[[7, 8, 0, 1]], [[5, 5, 5, 5]], [[5, 5, 5, 6]], [[5, 5, 6, 5]]]}, [[0, 1, 0]]),
    ({"position_ids": [[[0, 0, 0, 0]], [[0, 0, 0, 1]], [[0, 1, 0, 0]]]}, [[0, 1, 0]]),  # both documents begin with images
    ({"position_ids": [[0, 1, 2, 3]], "attention_mask": [[1, 1, 1, 1]]}, [[0, 0, 0]]),
    ({"position_ids": [[1, 0, 1, 0]], "attention_mask": [[0, 1, 1, 1]]}, [[0, 0, 1]]),  # padding on the left
    ({"position_ids": [[0, 1, 1, 1]], "attention_mask": [[1, 1, 0, 0]]}, [[0, 0, 0]]),  # padding on the right
    ({"position_ids": [[0, 1, 1, 2]], "attention_mask": [[1, 1, 0, 1]]}, [[0, 0, 0]]),  # padding inside
    ({"position_ids": [[0, 1, 2, 3]], "attention_mask": [[1, 1, 0, 1]]}, [[0, 0, 0]]),
    ({"position_ids": [[0, 1, 2, 3]], "attention_mask": [[1, 1, 2, 2]]}, [[0, 1, 0]]),
    ({"position_ids": [[0, 1, 0, 0]], "attention_mask": [[1, 1, 0, 2]]}, [[0, 0, 1]]),
    ({"position_ids": [[0, 1, 2, 0]], "attention_mask": [[9, 1, 1, 1, 1]]}, [[0, 0, 1]]),  # the mask also covers a prefix
    ({"attention_mask": [[0, 0, 1, 1]]}, None),
    ({"attention_mask": [[True, True, False, True]]}, None),
    ({"attention_mask": [[0, 2, 1, 1], [1, 1, 1, 1]]}, [[0, 1, 0], [0, 0, 0]]),
    ({"attention_mask": [[PADDED_BLOCKS.tolist()]]}, [[0, 0, 1]]),
    ({"attention_mask": [[(PADDED_BLOCKS == 0).tolist()]]}, [[0, 0, 1]]),
    ({"attention_mask": {"full_attention": [[(PADDED_BLOCKS == 0).int().tolist()]]}}, [[0, 0, 1]]),
    ({"position_ids": [[0, 1, 0, 1]], "attention_mask": [[1, 1, 1, 1]], "cache": object()}, None),
    ({"position_ids": [[0, 1, 0, 1]], "cache": object()}, [[0, 1, 0]]),
    ({"position_ids": [[3]]}, None), ({}, None)])
def test_where_documents_begin(given: dict[str, Any], found: list[list[int]] | None) -> None:
    def tensor(value: Any) -> Any:
        return {key: tensor(one) for key, one in value.items()} if isinstance(value, dict) else (
            torch.tensor(value) if isinstance(value, list) else value)
    given = {name: tensor(value) for name, value in given.items()}
    places = given.get("position_ids")
    tokens = 4 if places is None else places.shape[-1]
    begins = _beginnings(given, (len(found or [0]), tokens), "cache" not in given)
    assert (None if begins is None else begins.int().tolist()) == found


@pytest.mark.parametrize("way", ["[B, T]", "[4, B, T]", "numbers", "block mask"])
def test_finding_documents_reads_nothing_from_the_device(way: str) -> None:
    """A meta tensor has no values, so reading one raises."""
    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor,
                **given: Any) -> Any:
        return given["seq_idx"], attention_mask
    marks = {name: x.to("meta") for name, x in MARKS[way].items()}
    seq_idx, mask = watched(forward, by_seq_idx=True, said=set())(
        object(), torch.zeros(1, T, device="meta"), marks.get("attention_mask"),
        position_ids=marks["position_ids"])
    assert seq_idx.shape == (1, T) and seq_idx.dtype is torch.int32
    assert mask is None or mask.shape == marks["attention_mask"].shape


def masks_of(implementation: str, **given: Any) -> tuple[Any, list[str]]:
    """Return the arguments of a function that makes masks inside a model, and the warnings."""
    def create(config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, **more: Any) -> Any:
        return {"attention_mask": attention_mask, **more}
    config, seen = SimpleNamespace(_attn_implementation=implementation), []

    def forward(self: Any, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None,
                cache: Any = None, **options: Any) -> None:
        seen.append(masking(create)(config, input_ids[..., None], attention_mask,  # older versions call it so
                                    cache=cache, position_ids=position_ids))
    call = watched(forward, by_seq_idx=True, said=set())
    warned = said(lambda: call(object(), torch.zeros(1, T), **given))
    return seen[0], warned


def test_masks_of_attention_are_made_of_the_documents_and_of_padding() -> None:
    mask = numbers((0, 9, T))
    mask[:, :4] = 0
    made, warned = masks_of("sdpa", position_ids=positions(EDGES), attention_mask=mask)
    assert warned == [] and made["attention_mask"] is made["cache"] is None
    assert made["position_ids"].tolist() == [[*range(4), *range(5), *range(T - 9)]]


def test_flash_attention_beside_a_mask_is_told() -> None:
    """Flash attention with a mask warns, because it then ignores positions and mixes documents.

    A mask of ones without documents gives no warning.
    """
    made, warned = masks_of("flash_attention_2", **MARKS["ones"])
    assert made["attention_mask"] is not None and len(warned) == 1
    assert "flash attention separates documents" in warned[0]
    _, warned = masks_of("flash_attention_2", position_ids=torch.arange(T)[None],
                         attention_mask=torch.ones(1, T, dtype=torch.long))
    assert warned == []


def test_attention_beside_a_cache_of_the_caller_is_told() -> None:
    cache = SimpleNamespace(has_previous_state=False)
    _, warned = masks_of("sdpa", **MARKS["[B, T]"], cache=cache)
    assert len(warned) == 1 and "its attention looks across documents if there is a cache" in warned[0]
    assert masks_of("sdpa", position_ids=torch.arange(T)[None], cache=cache)[1] == []


class Fla(torch.nn.Module):
    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("wrapped", [lambda said: warning(Fla.forward, "Fla", said, mixes="it does"),
                                     lambda said: warning(Fla.forward, "Fla", said, ahead="it does")])
def test_a_compiled_model_of_fla_warns_too(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fla, "forward", wrapped(set()))
    compiled = torch.compile(Fla(), fullgraph=True, backend="eager")
    one, = said(lambda: compiled(torch.ones(3), cu_seqlens=torch.tensor([0, 3])))
    assert one.startswith("Fla")


# --- the record ---

def test_the_record_has_all_models_and_nothing_leaks() -> None:
    rows = {row["model"]: row["ways"] for row in read(RESULTS / documents.FILE)["rows"]}
    assert rows.keys() == {one.name for one in (*MODELS, *UNPATCHED) if one.package == "transformers"}
    assert {one.partition(" ")[0] for ways in rows.values() for one in ways.values()} <= {
        "isolated", "warned:", "-:"}
    assert all(list(ways) == [way.name for way in documents.WAYS] for ways in rows.values())


@pytest.mark.parametrize("model, way, cell", [
    ("lfm3", "numbers", "isolated "), ("jamba", "ones", "warned: Jamba"),
    ("lfm3", "[4, B, T]", "-: it raises without flashlin, too")])
def test_a_cell_of_the_record(model: str, way: str, cell: str) -> None:
    asked = next(one for one in documents.WAYS if one.name == way)
    assert documents.answer(named(model), asked).startswith(cell)
