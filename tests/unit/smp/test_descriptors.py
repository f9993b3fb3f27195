"""A process raises its limit of open descriptors as far as it may, and keeps some for itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ft_plugins.smp import descriptors


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_never_lowered(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raised = descriptors.raise_limit()
    assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, descriptors.ENOUGH)
    if hard > descriptors.ENOUGH:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors.ENOUGH + 1, hard))
        assert descriptors.raise_limit() == descriptors.ENOUGH + 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard, "the hard limit stays"


@pytest.mark.parametrize("soft, wanted, expected", [(1024, 4096, 768), (1024, 64, 64), (200, 4096, 100)])
def test_connections_leave_a_reserve(limits: tuple[int, int], soft: int, wanted: int, expected: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    assert descriptors.places(wanted) == expected


def test_a_limit_that_cannot_be_raised_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda what: (512, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert descriptors.raise_limit() == 512
