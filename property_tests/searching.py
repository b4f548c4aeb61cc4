"""Look for counterexamples on purpose: a test that cannot fail shows nothing, so some tests must be seen to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from property_tests.stories import Broken

T = TypeVar("T")
QUIET = {"database": None, "deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def counterexample(
    strategy: SearchStrategy[T], law: Callable[[T], Any], *, tries: int = 1000, shrink: bool = False
) -> T:
    """A drawn value for which the law raises AssertionError; the smallest one with ``shrink``.

    Raises:
      AssertionError: none was found, so the law seems to hold.
    """
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    try:
        return find(
            strategy, lambda value: fails(law, value), settings=settings(max_examples=tries, phases=phases, **QUIET)
        )
    except NoSuchExample:
        raise AssertionError(f"no counterexample in {tries} draws") from None


def fails(law: Callable[[T], Any], value: T) -> bool:
    try:
        law(value)
    except AssertionError:
        return True
    return False


def told(law: Callable[[T], Any], value: T) -> str | None:
    """The story of how a value breaks a law; None where it holds. Other errors are not caught."""
    try:
        law(value)
    except Broken as broken:
        return str(broken)
    return None


def drawn(strategy: SearchStrategy[T], count: int) -> list[T]:
    """The first ``count`` values of a strategy, the same every time."""
    values: list[T] = []

    @settings(max_examples=count, phases=[Phase.generate], **QUIET)
    @given(strategy)
    def collect(value: T) -> None:
        values.append(value)

    collect()
    return values
