"""The table of real programs: its verdicts detect errors, and a sample of it is run again."""
from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

import flashlin.mamba
from flashlin.compat.subprocesses import Ended
from flashlin.integrations.on_a_cpu import RUNNING
from matrix.__main__ import RESULTS
from matrix.stacks import gpu, records, run, seeds, table, verdicts, ways
from matrix.stacks.models import LEAKS, MODELS, ON_CUDA, RAISES, UNTOUCHED, known
from matrix.stacks.verdicts import Answer, Outcome, error, outcome
from matrix.stacks.versions import STACKS
from tests.share import WHOLE

RIGHT = {"logits": torch.randn(3, 8, generator=torch.Generator().manual_seed(0))}
WRONG = {"logits": 1.001 * RIGHT["logits"]}
CHANGED = ["qwen3_next", "kimi_linear", "mamba", "mamba2", "lfm3"]


def test_a_verdict_is_measured_beside_float64_where_that_runs() -> None:
    assert outcome(Answer(RIGHT), Answer(WRONG), Answer(RIGHT)).verdict == "agrees"
    assert outcome(Answer(WRONG), Answer(WRONG), Answer(RIGHT)).verdict == "differs"
    assert outcome(Answer(WRONG), Answer(RIGHT), None).verdict == "differs"
    assert outcome(Answer(RIGHT), Answer(RIGHT), None).verdict == "agrees"
    assert outcome(Answer(RIGHT), Answer(raises="RuntimeError: no"), None).verdict == "alone"
    assert outcome(Answer(RIGHT), None, None).verdict == "reference"


def test_a_program_is_its_own_reference_for_padding_and_packing() -> None:
    assert outcome(Answer(RIGHT, RIGHT), Answer(WRONG), None).verdict == "agrees"
    assert outcome(Answer(WRONG, RIGHT), Answer(WRONG), None).verdict == "as raw"
    assert outcome(Answer(WRONG, RIGHT), Answer(RIGHT), None).verdict == "differs"
    assert outcome(Answer(WRONG, RIGHT), None, None).verdict == "differs"


def test_an_error_and_what_a_model_lacks_are_told() -> None:
    raised = Answer(raises="ValueError: no")
    assert outcome(raised, Answer(RIGHT), None) == Outcome("raises", "ValueError: no")
    assert outcome(Answer(lacks="it has no cache"), None, None) == Outcome("-", "it has no cache")


def test_a_patch_that_changes_nothing_agrees_with_nothing() -> None:
    assert outcome(Answer(RIGHT), Answer(RIGHT), None, ran=False).verdict == "not patched"


def test_nan_a_missing_gradient_and_one_token_are_seen() -> None:
    nan = {"logits": RIGHT["logits"].clone().fill_(torch.nan)}
    assert not error(nan, RIGHT).ok
    assert not error(RIGHT, {**RIGHT, "dw": torch.ones(2)}).ok
    tokens = torch.arange(8)
    assert error({"tokens": tokens}, {"tokens": tokens}).ok
    assert not error({"tokens": tokens}, {"tokens": tokens.clamp(max=6)}).ok


def test_a_gradient_that_cancels_is_measured_by_the_largest() -> None:
    large, tiny = torch.ones(4), torch.full((4,), 1e-7)
    assert error({"da": large, "db": tiny}, {"da": large, "db": 2 * tiny}).ok
    assert not error({"da": large, "db": 1e4 * tiny}, {"da": large, "db": 2e4 * tiny}).ok


# transformers 5.21 and newer, and so LFM3, need Python 3.11.
NEW_ENOUGH = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.24 needs Python 3.11")


@NEW_ENOUGH
@pytest.mark.parametrize("stack", STACKS if WHOLE else STACKS[:1], ids=lambda one: one.name)
@pytest.mark.alternate
def test_patched_models_agree(stack: Any) -> None:
    """The models run in a process of their own.

    fla is installed here, and models that were imported with it raise on a CPU.
    """
    models = [one for one in stack.models if WHOLE or one.name in CHANGED]
    said = run.asked(stack, models)
    assert WHOLE or set(said) == set(CHANGED)
    assert {name: lines for name, one in said.items()
            if (lines := run.wrong(run.row(name, one), stack.on_cuda))} == {}


@pytest.mark.parametrize("stack", STACKS, ids=lambda one: one.name)
def test_records_have_nothing_wrong(stack: Any) -> None:
    rows = records.read(RESULTS / f"{stack.file}.json")["rows"]
    assert {row["model"]: lines for row in rows if (lines := run.wrong(row, stack.on_cuda))} == {}


def test_which_models_of_fla_run_on_a_cpu_is_what_the_record_says() -> None:
    """The documentation and the advice of an error name the same models."""
    stack = run.by_name(["fla 0.6.0, transformers 5.24.0"])[0]
    rows = [row for row in records.read(RESULTS / f"{stack.file}.json")["rows"]
            if "(layer)" not in row["model"]]
    found = [row["model"] for row in rows
             if all(verdicts.verdict_of(row["patched"][name]) in ("alone", "agrees")
                    for name in ("logits", "gradients", "greedy"))]
    pages = " ".join(word for page in Path(RESULTS.parent.parent, "docs").rglob("*.md")
                     for word in page.read_text(encoding="utf-8").split())
    said = re.search(r"(\d+) of fla's (\d+) models \(fla 0\.6\.0\) train and generate[^:.]*: (.+?)\.",
                     pages)
    assert said and (int(said[1]), int(said[2])) == (len(found), len(rows))
    assert sorted(found) == sorted(RUNNING) == sorted(re.split(", | and ", said[3]))
    missing = {row["model"]: row["patched"]["logits"] for row in rows if row["model"] not in found}
    own_words = {"Parallax"}  # its first error is fla's own, which says that it needs a 16-bit dtype
    assert {name for name, answer in missing.items() if "on a CPU: " not in answer} == own_words


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    rows = [{"model": "a", "date": "1", "raw": {"x": "raises: no", "y": "agrees"},
             "patched": {"y": "raises: no"}},
            {"model": "b", "date": "2", "raw": {}}, {"model": "c", "date": "1", "patched": {"x": "alone"}}]
    record = {"stack": "s", "rows": rows}
    packed = records.packed(record)
    assert packed["rows"][0]["patched"] == [None, "raises:#0"] and packed["sentences"] == ["no"]
    assert ["date" in row for row in packed["rows"]] == [False, True, False]
    (tmp_path / "s.json").write_text(json.dumps(packed), encoding="utf-8")
    assert records.read(tmp_path / "s.json")["rows"] == rows


def test_every_excuse_is_one_that_a_record_needs() -> None:
    """An excuse that no record needs would hide later failures."""
    def needed(on_cuda: bool) -> set[tuple[str, str, str]]:
        return {(row["model"], quantity, verdicts.verdict_of(row["raw"][quantity]))
                for stack in STACKS if stack.on_cuda == on_cuda
                for row in records.read(RESULTS / f"{stack.file}.json")["rows"]
                for quantity, answer in row["patched"].items()
                if verdicts.verdict_of(answer) in ("differs", "raises")}
    assert {(*one, "raises") for one in LEAKS} <= needed(False)
    assert set(ON_CUDA) <= needed(True)
    raised = [(row["model"], answer.partition(": ")[2]) for stack in STACKS
              for row in records.read(RESULTS / f"{stack.file}.json")["rows"]
              for answer in row["patched"].values() if verdicts.verdict_of(answer) == "raises"]
    assert all(any(name == model and said.startswith(begins) for name, said in raised)
               for model, begins in RAISES)


@NEW_ENOUGH
def test_a_wrong_adapter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution of LFM3, which needs no other package, is made slightly too large."""
    model, right = next(one for one in MODELS if one.name == "lfm3"), flashlin.mamba.causal_conv1d_fn
    raw, _ = ways.run(model, "raw", quantities=["logits"])

    def off(*args: Any, **options: Any) -> Any:
        return right(*args, **options) * 1.01
    modeling = __import__("transformers.models.lfm3.modeling_lfm3", fromlist=["causal_conv1d_fn"])
    for wrong, verdict in ((right, "agrees"), (off, "differs")):
        with monkeypatch.context() as patch, ways.counting() as ran:
            patch.setattr(modeling, "causal_conv1d_fn", wrong)
            answers, _ = ways.run(model, "raw", quantities=["logits"])
        assert ran
        assert outcome(answers["logits"], raw["logits"], None).verdict == verdict


def test_float64_is_float64_where_a_model_asks_for_float32() -> None:
    with ways.wide():
        x = torch.ones(2)
        assert x.dtype is x.to(torch.float32).dtype is x.float().dtype is torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype is torch.float64
    assert torch.ones(2).dtype is torch.float32


def test_a_configuration_takes_what_it_knows() -> None:
    class Sizes:
        depth: int = 2

        def __init__(self, width: int = 1) -> None: ...
    assert known(Sizes, {"width": 3, "depth": 4, "height": 5}) == {"width": 3, "depth": 4}


def test_every_stack_has_a_name_and_models() -> None:
    assert len({one.file for one in STACKS}) == len(STACKS)
    assert {one.package for one in MODELS} == {model.package for one in STACKS for model in one.models}
    assert [one.name for one in run.by_name(["transformers 5.23.0"])] == ["transformers 5.23.0"]
    assert run.by_name([]) == list(STACKS)
    both = run.by_name(["transformers 5.19.0", "transformers 5.19"])
    assert [one.name for one in both] == ["transformers 5.19.0", "transformers 5.19.0, kernels 0.17.2"]
    with pytest.raises(ValueError, match="got transformers 9"):
        run.by_name(["transformers 9"])


def test_a_record_grows_and_becomes_a_table(tmp_path: Path) -> None:
    stack = STACKS[0]

    def said(verdict: str) -> dict[str, Any]:
        figure = verdicts.Error(3e-6, 9e-6, "logits", True)
        return {"ops": ["chunk_kda"],
                "raw": {"logits": Outcome("reference"), "pieces": Outcome("-", "no cache")},
                "patched": {"logits": Outcome(verdict, fp32=figure), "pieces": Outcome("raises", "E: no")}}
    first, second = (one.name for one in stack.models[:2])
    run.write(tmp_path, stack, [run.row(second, said("agrees"))])
    run.write(tmp_path, stack, [run.row(first, said("differs")), run.row(second, said("agrees"))])
    record = records.read(tmp_path / f"{stack.file}.json")
    assert [one["model"] for one in record["rows"]] == [first, second]
    lines = table.table(tmp_path)
    assert f"| `{first}` | yes / **differs** 3.0e-06 | - / error |" in lines
    assert f"| `{second}` | yes 3.0e-06 | - / error |" in lines
    assert any(line.startswith("| raises: E: no | pieces |") for line in lines)
    assert table.table(tmp_path / "none") == []
    assert table._figure("agrees fp32 1.3e+00/2e+00 at dw itself 2.5e-06/9e-06") == "2.5e-06"
    assert table._figure("agrees fp32 2.5e-01/2.5e-01 at tokens") == ""


def test_a_row_that_is_not_renewed_keeps_its_day(tmp_path: Path) -> None:
    stack, verdict = STACKS[0], {way: {"logits": Outcome("agrees")} for way in ("raw", "patched")}
    first, second = (run.row(one.name, {"ops": [], **verdict}) for one in stack.models[:2])
    run.write(tmp_path, stack, [{**first, "date": "2026-01-02"}, {**second, "date": "2026-01-02"}])
    run.write(tmp_path, stack, [{**second, "date": "2026-03-04"}])
    rows = records.read(tmp_path / f"{stack.file}.json")["rows"]
    assert [one["date"] for one in rows] == ["2026-01-02", "2026-03-04"]
    assert any("2026-01-02 and 2026-03-04" in line for line in table.table(tmp_path))


def test_what_a_model_gets_wrong_itself_has_its_reason_in_the_table() -> None:
    lines = table.table(RESULTS)
    for why in {*LEAKS.values(), *ON_CUDA.values(), *UNTOUCHED.values()}:
        assert any(f": the model itself: {why} |" in line for line in lines), why


def test_what_patching_made_worse_is_told() -> None:
    def wrong(quantity: str, raw: str, patched: str, model: str = "qwen3_next", **more: Any) -> list[str]:
        return run.wrong({"model": model, "raw": {quantity: raw}, "patched": {quantity: patched}}, **more)
    fine, broken, off = "agrees", "raises: E: no", "differs itself 5.2e-01/1.2e+00 at logits"
    assert wrong("logits", broken, broken) == []
    assert wrong("logits", fine, broken) == ["logits: raises: E: no | raw: agrees"]
    assert wrong("logits", fine, off) and wrong("logits", broken, off)
    assert wrong("logits", fine, "not patched")
    assert wrong("pieces", off, off) == []
    assert run.wrong({"model": "qwen3_next", "patched": {"logits": broken}}) == ["logits: raises: E: no"]
    for (model, quantity) in LEAKS:  # a model that leaks has no other excuse
        assert wrong(quantity, broken, off, model) == []
        assert wrong(quantity, fine, off, model) and wrong("logits", broken, off, model)
    assert wrong("padding", fine, off, "mamba") and not wrong("padding", fine, off, "mamba", on_cuda=True)
    assert wrong("logits", fine, off, "mamba", on_cuda=True)


def test_what_a_child_did_not_say_is_how_it_ended(tmp_path: Path) -> None:
    first, second = seeds.PROGRAMS["RMSNorm after an embedding"]
    said = json.dumps({"part": first, "outcome": "right"})
    late = Ended(None, said, "a warning", "no answer in 45 s", timed_out=True)
    dead = Ended(-6, said, "a warning\nabort: a | b")
    rows = [seeds.row_of("RMSNorm after an embedding", part, {"raw": dead, "patched": late})
            for part in (first, second)]
    assert [(row["raw"], row["patched"]) for row in rows] == [
        ("right", "right"),
        ("error: ended by SIGABRT: abort: a | b", "error: gave no answer in 45 s and was ended")]
    assert table.seeds(tmp_path) == []
    (tmp_path / "seeds-H200-triton-3.6.0.json").write_text(json.dumps(
        {"device": "H200", "triton": "3.6.0", "torch": "2.11.0", "fla": "0.6.0", "date": "", "rows": rows}))
    assert (f"| RMSNorm after an embedding | {second} | error: ended by SIGABRT: abort: a \\| b "
            "| error: gave no answer in 45 s and was ended |" in table.seeds(tmp_path))


def test_a_quick_tuner_takes_the_first_configuration_that_fits() -> None:
    tried: list[int] = []

    class Kernel:
        fn = staticmethod(lambda n: None)

        def run(self, *args: Any, num_warps: int, **rest: Any) -> None:
            tried.append(num_warps)
            if num_warps < 4:
                raise OutOfResources(2, 1, "shared memory")

    def timed(call: Any, quantiles: Any) -> list[float]:
        call()
        return [1.0] * 3
    tuner = Autotuner(Kernel(), ["n"], [Config({}, num_warps=warps) for warps in (1, 2, 4, 8)], ["n"], None,
                      None, do_bench=timed, cache_results=True)
    with seeds.quick():
        for n in (5, 6):
            tuner.run(n)
    assert tried == 2 * [1, 2, 4, 4]  # the last call is the measured one
    assert "_bench" in vars(Autotuner) and Autotuner._bench.__qualname__ == "Autotuner._bench"


class Overwriting(torch.autograd.Function):
    """x * weight, whose backward overwrites both of its inputs, as fla's RWKV-7 overwrites its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.given = x, weight.to(x.dtype)
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.given
        dweight = (x * dy).sum((0, 1)).float()
        x.fill_(7.0)
        dx = dy * weight
        dy.fill_(7.0)
        return dx, dweight


class Scaled(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.seen = list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.clone())
        out: torch.Tensor = Overwriting.apply(x, self.weight)
        return out


def test_a_backward_that_overwrites_its_input_spoils_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, ratio = set[torch.dtype](), gpu.ratio

    def seen(one: torch.Tensor, want: torch.Tensor) -> float:
        wanted.add(want.dtype)
        return ratio(one, want)
    monkeypatch.setattr(gpu, "ratio", seen)
    monkeypatch.setattr(gpu, "PROGRAMS", {"Scaled": (("triton",), lambda size: gpu.Whole(Scaled(size.D)))})
    found = gpu.measured("Scaled", gpu.SMALL, torch.device("cpu"), torch.bfloat16, 1, 3, 2)
    assert wanted == {torch.float32}
    for way in ("raw", "patched"):
        assert found[way]["output"] < 0.01 and found[way]["gradient"] < 0.01, found
    assert found["ratio"] == 1 and found["losses"]["raw"] == found["losses"]["patched"]


def test_a_layer_that_begins_with_zeros_is_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, ratio = list[torch.Tensor](), gpu.ratio

    def seen(one: torch.Tensor, want: torch.Tensor) -> float:
        compared.append(want)
        return ratio(one, want)

    def built(size: gpu.Size) -> torch.nn.Module:
        layers = torch.nn.Sequential(*(torch.nn.Linear(size.D, size.D) for _ in range(2)))
        torch.nn.init.zeros_(layers[1].weight)
        return gpu.Whole(layers)
    monkeypatch.setattr(gpu, "ratio", seen)
    monkeypatch.setattr(gpu, "PROGRAMS", {"Idle": (("triton",), built)})
    gpu.measured("Idle", gpu.SMALL, torch.device("cpu"), torch.bfloat16, 1, 1, 1)
    assert compared and all(bool(want.any()) for want in compared)


def test_every_step_of_a_training_sees_the_same_input() -> None:
    layer, x = Scaled(8), torch.randn(2, 3, 8)
    gpu.trained(layer, dict(layer.state_dict()), x, nullcontext, torch.device("cpu"), torch.bfloat16, 3)
    assert len(layer.seen) == 3 and all(torch.equal(one, x) for one in layer.seen)


def test_newer_versions_come_first() -> None:
    lines = table.table(RESULTS)
    places = [lines.index(f"### transformers {version}") for version in ("5.23.0", "5.10.0", "5.8.0")]
    assert places == sorted(places)
