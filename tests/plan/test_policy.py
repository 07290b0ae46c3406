"""Tests of the policy: its sources, its valid values, and that a with block restores it."""
from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import flashlin
from flashlin import policy
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.policy import CHOICES, SWITCHES, Policy, current, from_environment, settings

pytestmark = pytest.mark.usefixtures("default_settings")


def test_an_empty_environment_is_the_default_policy() -> None:
    assert from_environment({"HOME": "/", "FLASHLINE_PATH": "torch"}) == Policy()


@pytest.mark.parametrize(("name", "choice"),
                         [(name, choice) for name, choices in CHOICES.items() for choice in choices])
def test_every_choice_can_come_from_the_environment(name: str, choice: str) -> None:
    found = from_environment({f"FLASHLIN_{name.upper()}": choice})
    assert found == Policy()._replace(**{name: choice == "1" if name in SWITCHES else choice})


def test_ignore_is_a_list_with_commas_and_spaces() -> None:
    assert from_environment({"FLASHLIN_IGNORE": " gather-32, descriptors-33,,"}).ignore == {"gather-32",
                                                                                            "descriptors-33"}
    assert from_environment({"FLASHLIN_IGNORE": ""}).ignore == frozenset()


@pytest.mark.parametrize("ignore",
                         [lambda text: from_environment({"FLASHLIN_IGNORE": text}),
                          lambda text: settings(ignore=text)])
def test_an_unknown_id_is_an_error_that_names_the_similar_ones(ignore: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError) as error:
        ignore("gather-32, gather-31")
    text = str(error.value)
    assert text.lower().removeprefix("flashlin_").startswith(
        f"ignore: got 'gather-31' as ids of known issues, need one of {len(KNOWN_ISSUES)} known names; "
        "did you mean gather-32")
    assert sum(issue.id in text for issue in KNOWN_ISSUES) <= 5 and current() == Policy()


def test_the_environment_is_read_at_the_first_call_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_current", None)
    monkeypatch.setenv("FLASHLIN_PATH", "torch")
    assert current().path == "torch"
    monkeypatch.setenv("FLASHLIN_PATH", "triton")
    assert current().path == "torch"


@pytest.mark.parametrize(("variable", "got", "valid"), [
    ("FLASHLIN_POLICY", "lenient", "auto, strict, off"),
    ("FLASHLIN_PATH", "cuda", "auto, triton, torch"), ("FLASHLIN_PATH", "", "auto, triton, torch"),
    ("FLASHLIN_TOKENS", "yes", "async, sync, off"), ("FLASHLIN_DEBUG", "true", "0, 1")])
def test_a_wrong_variable_is_an_error_that_lists_the_choices(variable: str, got: str, valid: str) -> None:
    with pytest.raises(ValueError) as error:
        from_environment({variable: got})
    assert str(error.value) == f"{variable}: got {got!r}, need one of {valid}"


@pytest.mark.parametrize(("changes", "message"), [
    (dict(policy="lenient"), "policy: got 'lenient', need one of auto, strict, off"),
    (dict(path=None), "path: got None, need one of auto, triton, torch"),
    (dict(tokens=1), "tokens: got 1, need one of async, sync, off"),
    (dict(debug="yes"), "debug: got 'yes', need one of 0, 1"),
    (dict(paths="torch"), "settings: got paths, need one of 9 known names; did you mean path?"),
    (dict(zeal=1, amount=2), "settings: got amount, zeal, need one of policy, path, ignore, tokens, "
                             "canary or 4 others")])
def test_a_wrong_setting_is_an_error_that_changes_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        settings(**changes)
    assert str(error.value) == message
    assert current() == Policy()


def test_a_mistake_among_good_settings_changes_nothing() -> None:
    with pytest.raises(ValueError, match="path"):
        settings(policy="strict", path="nowhere")
    assert current() == Policy()


def test_settings_last_until_changed_again() -> None:
    settings(path="torch")
    settings(policy="strict")
    assert current() == Policy(policy="strict", path="torch")


@pytest.mark.parametrize("debug", (True, "1"))
def test_debug_is_a_bool_in_python_and_a_digit_in_the_environment(debug: Any) -> None:
    settings(debug=debug)
    assert current().debug is True


def test_ignore_takes_any_collection() -> None:
    ids = {"gather-32", "descriptors-33"}
    for given in (ids, list(ids), tuple(ids), iter(ids), ",".join(ids)):
        settings(ignore=given)
        assert current().ignore == ids


def test_a_with_block_puts_everything_back() -> None:
    with settings(policy="strict") as inside:
        assert inside == current() == Policy(policy="strict")
        with settings(path="torch"):
            assert current() == Policy(policy="strict", path="torch")
        assert current() == Policy(policy="strict")
    assert current() == Policy()


def test_a_with_block_puts_everything_back_after_an_error() -> None:
    with pytest.raises(KeyError), settings(path="torch"):
        raise KeyError
    assert current() == Policy()


# --- threads ---

def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_settings_called_alone_are_for_the_whole_process() -> None:
    settings(path="torch")
    assert in_another_thread(current).path == "torch"
    in_another_thread(lambda: settings(policy="strict"))
    assert current() == Policy(policy="strict", path="torch")


def test_a_with_block_is_its_threads_alone() -> None:
    with settings(path="torch"):
        assert in_another_thread(current) == Policy() and current().path == "torch"
        # This changes the policy of the process; the block keeps its own settings.
        in_another_thread(lambda: settings(policy="strict", path="triton"))
        assert current() == Policy(policy="strict",
                                   path="torch") and in_another_thread(current).path == "triton"
    assert current() == Policy(policy="strict", path="triton")


def test_no_thread_ever_sees_the_block_of_another() -> None:
    # Python may switch to another thread after the call of settings and before the start of the block. The
    # other thread must not see the settings then, either.
    seen, done, interval = set[str](), threading.Event(), sys.getswitchinterval()

    def watch() -> None:
        while not done.is_set():
            seen.add(current().path)
    threads = [threading.Thread(target=watch) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            with settings(path="torch"):
                time.sleep(0)
                assert current().path == "torch"
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert seen == {"auto"}


def test_settings_that_are_kept_hold_in_their_thread_at_once_and_for_the_process_when_it_goes_on() -> None:
    kept = settings(path="torch")
    assert in_another_thread(current) == Policy()  # ``kept`` may still become a with block
    assert current().path == in_another_thread(current).path == "torch"
    with kept:
        assert current().path == "torch"
    dropped = settings(path="triton")
    del dropped
    assert in_another_thread(current).path == "triton"


def test_settings_called_at_once_by_two_threads_are_both_kept() -> None:
    for _ in range(200):
        settings(policy="auto", path="auto")
        threads = [threading.Thread(target=settings, kwargs=change)
                   for change in (dict(policy="strict"), dict(path="torch"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current() == Policy(policy="strict", path="torch")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_end_in_any_order_end_where_they_began(order: tuple[int, ...]) -> None:
    changes = (dict(path="torch"), dict(policy="strict"), dict(path="triton", debug=True))
    blocks = [ExitStack() for _ in changes]
    for block, change in zip(blocks, changes, strict=True):
        block.enter_context(settings(**change))
    left = list(range(3))
    for number in order:
        blocks[number].close()
        left.remove(number)
        assert current() == Policy()._replace(**{name: value for at in left
                                                 for name, value in changes[at].items()})
    assert current() == Policy()


def test_a_block_of_a_generator_ends_wherever_the_generator_is_closed() -> None:
    def generator() -> Iterator[None]:
        with settings(path="torch"):
            yield
    running = generator()
    next(running)
    assert current().path == "torch"
    in_another_thread(running.close)
    assert current() == Policy()


def test_one_object_can_be_entered_twice_and_by_two_threads() -> None:
    once = settings(path="torch")
    with once:
        with once:
            in_another_thread(lambda: once.__enter__() and once.__exit__(None, None, None))
            assert current().path == "torch"
        assert current().path == "torch"
    assert current() == Policy()
    once.__exit__(None, None, None)  # no effect: the block has ended
    assert current() == Policy()


def test_the_policy_stays_one_object_until_it_changes() -> None:
    assert current() is current()
    with settings(path="torch"):
        assert current() is current()


def test_a_policy_is_hashable_and_settings_are_public() -> None:
    assert hash(Policy(ignore=frozenset({"gather-32"})))
    assert flashlin.settings is settings
