"""The policy: where it comes from, what it may be, and that it can be put back."""
from __future__ import annotations

from typing import Any

import pytest

import flashlin
from flashlin import policy
from flashlin.policy import CHOICES, Policy, current, from_environment, settings


@pytest.fixture(autouse=True)
def default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_current", Policy())


def test_an_empty_environment_is_the_default_policy() -> None:
    assert from_environment({"HOME": "/", "FLASHLINE_PATH": "torch"}) == Policy()


@pytest.mark.parametrize(("name", "choice"), [(name, choice) for name, choices in CHOICES.items() for choice in choices])
def test_every_choice_can_come_from_the_environment(name: str, choice: str) -> None:
    found = from_environment({f"FLASHLIN_{name.upper()}": choice})
    assert found == Policy()._replace(**{name: choice == "1" if name == "debug" else choice})


def test_ignore_is_a_list_with_commas_and_spaces() -> None:
    assert from_environment({"FLASHLIN_IGNORE": " one, two,,"}).ignore == {"one", "two"}
    assert from_environment({"FLASHLIN_IGNORE": ""}).ignore == frozenset()


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
    (dict(paths="torch"), "settings: got paths, need some of policy, path, ignore, tokens, canary, debug"),
    (dict(zeal=1, amount=2), "settings: got amount, zeal, need some of policy, path, ignore, tokens, canary, debug")])
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
    for given in ({"one", "two"}, ["two", "one"], ("one", "two"), "one,two"):
        settings(ignore=given)
        assert current().ignore == {"one", "two"}


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


def test_a_policy_is_hashable_and_settings_are_public() -> None:
    assert hash(Policy(ignore=frozenset({"one"})))
    assert flashlin.settings is settings
