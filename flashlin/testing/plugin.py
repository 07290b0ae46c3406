"""A pytest plugin: test your own Triton kernels under several Triton releases and for several GPUs.

It works on a machine without a GPU.

    def example():                           # at module level, on CPU tensors
        x = torch.randn(4, 100)
        return scale(x, 2.0), 2 * x          # the result, and the correct result

    def test_every_triton(triton_matrix):
        triton_matrix(example, triton=["3.2", "3.6", "3.9.0"], sm=[80, 90])

Three layers run in child processes that have the release:

- ``import``: the module of the function is imported.
- ``compile``: every kernel that the function launches is compiled to machine code for each target, in every
  configuration if it is autotuned. Nothing is launched, so the function must not read the outputs of its
  kernels.
- ``interpret``: the function runs in Triton's interpreter, with the first configuration of an autotuned
  kernel. Its result is compared with the correct one.

The children see no GPU. pytest always loads this file, so it imports neither torch nor Triton.
"""
from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flashlin.compat.releases import in_full, supported
from flashlin.compat.subprocesses import python, run_to_end
from flashlin.testing.environments import NotInstallable, Tell, on_stderr, triton_environment

LAYERS = ("import", "compile", "interpret")
TELLING = re.compile(r"Assertion|LLVM ERROR|UNREACHABLE|[Ee]rror\b|terminate called")
LONGEST = 500  # maximum number of characters of a cause
COUNTED = re.compile(r"\b(\d+) passed, (\d+) failed, (\d+) skipped")


class Order(NamedTuple):
    """The work of one child process.

    module, file, function: location of the user's function.
    triton: the release to use.
    sm: compute capabilities to compile for.
    layers: the checks to run, of import, compile and interpret.
    timeout: seconds for one run of the function, and for each kernel.
    at_once: number of kernels to compile at a time.
    rtol, atol: tolerances of the comparison; None for the defaults of ``torch.testing.assert_close``.
    """
    module: str
    file: str
    function: str
    triton: str
    sm: list[int]
    layers: list[str]
    timeout: float
    at_once: int
    rtol: float | None
    atol: float | None


class Outcome(NamedTuple):
    """The result of one layer, or of one kernel, under one release.

    status: ``ok``, ``skipped``, ``wrong`` (the numbers differ), ``began`` (the layer was started; the last
        line of a child that died), or a status of ``compile.Result``.
    cause: the reason of a failure or skip.
    sm: compute capability, 0 if no target is involved.
    what: the launch as text, or "" if the outcome is not about one kernel.
    """
    triton: str
    layer: str
    status: str
    cause: str = ""
    sm: int = 0
    what: str = ""

    def __str__(self) -> str:
        card = f"sm_{self.sm}" if self.sm else ""
        place = " ".join(filter(None, [self.triton, self.layer, card, self.what]))
        cause = " ".join(self.cause.split())
        # Triton prints the reason at the end, so keep more of the end.
        cause = cause if len(cause) <= LONGEST else f"{cause[:LONGEST // 3]} ... {cause[-LONGEST * 2 // 3:]}"
        return ": ".join(filter(None, [place, self.status, cause]))


class TritonMatrix:
    """The value of the fixture ``triton_matrix``.

    properties: user properties of the test, which carry the report to the summary.
    tell: receives the progress lines of a download.
    """

    def __init__(self, properties: list[tuple[str, object]], tell: Tell = on_stderr) -> None:
        self._properties, self._tell = properties, tell

    def __call__(self, function: Callable[[], Any], *, triton: Iterable[str] = supported(),
                 sm: Iterable[int] = (80, 90), layers: Iterable[str] = LAYERS, timeout: float = 180,
                 rtol: float | None = None, atol: float | None = None) -> None:
        """Fail the test unless every kernel that ``function`` launches works under every release and target.

        Args:
            function: takes no arguments, is defined at the top level of a module, and launches kernels on CPU
                tensors. For ``interpret`` it returns two values, the result and the correct result. Each is a
                tensor, or a tuple, list or dict of tensors; ``torch.testing.assert_close`` compares them.
            triton: Triton releases since 3.0.0. "3.3" means its newest patch release.
            sm: compute capabilities, such as 80 or 103.
            layers: some of ``import``, ``compile``, ``interpret``.
            timeout: seconds for one kernel, and for one run of the function.
            rtol: relative tolerance, by default that of assert_close for the dtype. Needs `atol` also.
            atol: absolute tolerance, by default that of assert_close for the dtype. Needs `rtol` also.

        A release that cannot be installed skips the test after the other releases have passed. In CI
        (``$CI``) it fails the test.

        The interpreter computes bfloat16 wrongly. If a kernel uses bfloat16, ``interpret`` is skipped and the
        summary says so. Raises TypeError or ValueError for an invalid argument.
        """
        __tracebackhide__ = True  # pytest shows an invalid argument at the line of the caller
        module, file, name = _located(function)
        versions = _releases(triton)
        cards = _several("sm", sm, "a list of compute capabilities of at least 70, such as [80, 90, 103]",
                         lambda one: type(one) is int and one >= 70)
        wanted = _several("layers", layers, f"a list of any of {', '.join(LAYERS)}", LAYERS.__contains__)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
            raise ValueError(f"timeout: got {timeout!r}, need seconds, more than 0")
        if (rtol is None) != (atol is None):
            raise ValueError(f"rtol, atol: got {rtol}, {atol}, need both or neither")
        workers = min(len(versions), os.cpu_count() or 1)
        at_once = -(-(os.cpu_count() or 1) // workers)
        orders = [Order(module=module, file=file, function=name, triton=version, sm=cards, layers=wanted,
                        timeout=timeout, at_once=at_once, rtol=rtol, atol=atol) for version in versions]
        with ThreadPoolExecutor(workers) as pool:
            visits = pool.map(lambda order: _visit(order, self._tell), orders)
            self._judge(f"{module}.{name}", [outcome for of_one in visits for outcome in of_one])

    def _judge(self, name: str, outcomes: list[Outcome]) -> None:
        skipped = [f"  {outcome}" for outcome in outcomes if outcome.status == "skipped"]
        failed = [f"  {outcome}" for outcome in outcomes if outcome.status not in ("ok", "skipped")]
        passed = len(outcomes) - len(failed) - len(skipped)
        head = f"{name}: {_counted(passed, len(failed), len(skipped))}"
        self._properties.append(("triton_matrix", "\n".join([head, *skipped])))
        if failed:
            pytest.fail("\n".join([head, *failed, *skipped]), pytrace=False)
        if not passed or any(outcome.layer == "install" for outcome in outcomes):
            pytest.skip("\n".join([head, *skipped]))


@pytest.fixture
def triton_matrix(request: pytest.FixtureRequest) -> TritonMatrix:
    """Test the kernels of a function: ``triton_matrix(function, triton=[...], sm=[...])``.

    The kernels that the function launches are tested under these Triton releases and for these GPUs.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(text: str) -> None:
        """Print a line at once, past pytest's capture.

        pytest would show it only after minutes, and only if the test fails.
        """
        if capture is None:
            return on_stderr(text)
        with capture.global_and_fixture_disabled():
            on_stderr(text)
    return TritonMatrix(request.node.user_properties, tell)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one summary for the session: the passed, failed and skipped outcomes of each test.

    It is collected from the test reports, which also arrive from the workers of pytest-xdist.
    """
    reports = [report for with_status in terminalreporter.stats.values()
               for report in with_status if getattr(report, "when", "") == "call"]
    told = [value for report in reports for name, value in report.user_properties if name == "triton_matrix"]
    if told:
        each = zip(*(COUNTED.findall(one)[0] for one in told), strict=True)
        counts = [sum(map(int, found)) for found in each]
        terminalreporter.write_sep("-", "Triton matrix")
        total = [f"all {len(told)}: {_counted(*counts)}"] if len(told) > 1 else []
        terminalreporter.write_line("\n".join([*told, *total]))


def _counted(passed: int, failed: int, skipped: int) -> str:
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _located(function: Any) -> tuple[str, str, str]:
    """Return (module, file, name), with which another process can import the function.

    Raise TypeError if it is not at the top level of a module, or needs arguments.
    """
    __tracebackhide__ = True
    if hasattr(function, "arg_names") and hasattr(function, "run"):
        raise TypeError(f"function: got the Triton kernel {getattr(function, '__name__', function)}, need a "
                        "function that launches it")
    name, home = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    there: Any = sys.modules.get(home or "")
    file = getattr(there, "__file__", None)
    for part in name.split("."):
        there = getattr(there, part, None)
    if not callable(function) or there is not function or not home or not file or home == "__main__":
        raise TypeError(f"function: got {name or repr(function)}, need a function at the top level of a "
                        "module, because processes with other Triton releases import it by name")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(f"function: got {name}{inspect.signature(function)}, need one without "
                        "required arguments") from error
    return home, file, name


def _releases(given: Any) -> list[str]:
    """Return the releases with their full numbers, each once. Raise ValueError for an unknown release.

    With short numbers such as 3.2, one release could be downloaded twice, under two names.
    """
    __tracebackhide__ = True
    need = "a list of releases since 3.0.0, such as ['3.2', '3.6.0']"
    named = _several("triton", given, need, lambda one: isinstance(one, str))
    try:
        return list(dict.fromkeys(map(in_full, named)))
    except ValueError as error:
        raise ValueError(f"triton: {error}") from None


def _several(what: str, given: Any, need: str, right: Callable[[Any], bool]) -> list[Any]:
    __tracebackhide__ = True
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"{what}: got {given!r}, need {need}")
    values = list(given)
    if (wrong := [one for one in values if not right(one)]) or not values:
        raise ValueError(f"{what}: got {', '.join(map(repr, wrong)) or 'an empty list'}, need {need}")
    return list(dict.fromkeys(values))


def _visit(order: Order, tell: Tell) -> list[Outcome]:
    """Run all layers under one release and return their outcomes.

    Importing and compiling share a child. The interpreter needs its own, because it must be chosen before
    Triton is imported.
    """
    outcomes: list[Outcome] = []
    for layers in (["import", "compile"], ["interpret"]):
        wanted = [layer for layer in layers if layer in order.layers]
        if not wanted or any(outcome.layer == "import" and outcome.status != "ok" for outcome in outcomes):
            continue
        try:
            environment = triton_environment(order.triton, interpreter="interpret" in wanted, tell=tell)
        # A skip is easily overlooked in CI, so there it is a failure.
        except NotInstallable as error:
            status = "failed" if os.environ.get("CI") else "skipped"
            return [*outcomes, Outcome(order.triton, "install", status, str(error))]
        outcomes += _child(order._replace(layers=wanted), environment)
    return outcomes


def _child(order: Order, environment: dict[str, str]) -> list[Outcome]:
    interpret = "interpret" in order.layers
    with tempfile.TemporaryDirectory(prefix="flashlin-plugin-") as folder:
        answers = Path(folder, "answers")
        answers.touch()
        settings = {"TRITON_INTERPRET": str(int(interpret)), "CUDA_VISIBLE_DEVICES": "",
                    "HIP_VISIBLE_DEVICES": ""}
        # The child's search path has the folder of the Triton release first. This process's search path
        # follows, to which pytest has added the folders of the tests.
        command = python("flashlin.testing.plugin_child", json.dumps(order._asdict()), str(answers),
                         first=environment["PYTHONPATH"])
        ended = run_to_end(command, {**environment, **settings})
        told = [Outcome(*json.loads(line)) for line in answers.read_text().splitlines()]
    outcomes = [outcome for outcome in told if outcome.status != "began"]
    if ended.failure:
        at = next((outcome.layer for outcome in reversed(told) if outcome.status == "began"),
                  "interpret" if interpret else "import")
        status, cause = "abort", f"{ended.how}: {ended.line}" if ended.line else ended.how
        if ended.how == "SIGALRM":
            status, cause = "timeout", f"after {order.timeout:g} s"
        outcomes.append(Outcome(order.triton, at, status, cause))
    return outcomes
