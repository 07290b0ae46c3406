"""Tests of version ranges, which are bounds on the release number.

An unreleased build of the release with the fix still counts as affected.
"""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlin.compat.versions import affected, is_unreleased, release

pytestmark = pytest.mark.usefixtures("modules_read")
numbers = st.tuples(*[st.integers(0, 20)] * 3)
ends = st.sampled_from(("", ".post1", "+cu128", "rc1", "a0", ".dev20250401", "+git1a2b3c", ".dev0+git1a2b3c"))
UNRELEASED = ("rc1", "a0", ".dev20250401", "+git1a2b3c", ".dev0+git1a2b3c")


def text(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


@pytest.mark.parametrize(("version", "parts"), [
    ("3.7.1", (3, 7, 1)), ("3.7.1+gitabc", (3, 7, 1)), ("3.7.1rc1", (3, 7, 1)),
    ("3.8.0.dev20260101+git9", (3, 8, 0)), ("3.3", (3, 3)), ("v3.4.0", (3, 4, 0)), ("", ()), ("main", ()),
    ("3.x", ())])
def test_release_is_the_number_alone(version: str, parts: tuple[int, ...]) -> None:
    assert release(version) == parts


@pytest.mark.parametrize(("version", "unreleased"), [
    ("3.4.0", False), ("3.4.0.post1", False), ("3.4.0+cu128", False), ("", False), ("3.4.0rc1", True),
    ("3.4.0.dev1", True), ("3.4.0+git1a2b3c", True), ("somebody's build", True)])
def test_nightlies_candidates_and_git_builds_are_unreleased(version: str, unreleased: bool) -> None:
    assert is_unreleased(version) is unreleased


@pytest.mark.parametrize(("version", "expected"), [
    ("3.2.9", False), ("3.3.0.dev1", True), ("3.3.0", True), ("3.3.1", True), ("3.4.0rc1", True),
    ("3.4.0+git1", True), ("3.4.0", False), ("3.4.0.post1", False), ("3.4.1rc1", False), ("3.5.0", False)])
def test_a_range_holds_since_and_unreleased_builds_of_the_fix(version: str, expected: bool) -> None:
    assert affected(version, "3.3.0", "3.4.0") is expected


def test_what_is_not_installed_is_not_affected_and_what_cannot_be_read_is_older_than_all() -> None:
    assert not affected("", None, None)
    assert affected("main", None, "3.4.0") and not affected("main", "3.3.0", "3.4.0")


def test_short_numbers_are_padded() -> None:
    assert affected("3.3", "3.3.0", "3.3.1") and not affected("3.4", "3.3", "3.4.0") and affected("12.8",
                                                                                                  None,
                                                                                                  "12.8.93")


@given(numbers, ends)
def test_open_bounds_hold_every_version(parts: tuple[int, int, int], end: str) -> None:
    assert affected(text(parts) + end, None, None)


@given(numbers, ends, numbers)
def test_before_and_from_a_release_exclude_each_other_but_for_unreleased_builds_of_it(parts: tuple[int, ...],
                                                                                      end: str,
                                                                                      bound: tuple[int,
                                                                                                   ...]) -> None:
    version = text(parts) + end
    below, above = affected(version, None, text(bound)), affected(version, text(bound), None)
    assert below or above
    assert (below and above) == (parts == bound and end in UNRELEASED)


@given(numbers, numbers, numbers, ends)
def test_a_range_is_both_of_its_bounds(parts: tuple[int, ...], since: tuple[int, ...],
                                       fixed_in: tuple[int, ...], end: str) -> None:
    version, first, fix = text(parts) + end, text(since), text(fixed_in)
    assert affected(version, first, fix) == (affected(version, first, None) and affected(version, None, fix))


@given(numbers, numbers, numbers)
def test_releases_are_ordered_as_numbers(older: tuple[int, ...], newer: tuple[int, ...],
                                         fixed_in: tuple[int, ...]) -> None:
    """Releases with or after the fix are unaffected; releases are compared as numbers (3.10 > 3.9)."""
    older, newer = sorted((older, newer))
    assert affected(text(older), None, text(fixed_in)) or not affected(text(newer), None, text(fixed_in))
    assert affected(text(older), None, text(fixed_in)) == (older < fixed_in)


@given(st.text(max_size=20))
def test_no_text_breaks_it(version: str) -> None:
    assert isinstance(release(version), tuple)
    assert isinstance(is_unreleased(version), bool) and isinstance(affected(version, "3.0.0", "3.4.0"), bool)
