"""A fixture for tests of code that uses weightwire; pytest finds it where the package is installed.

    def test_my_trainer(weightwire_daemon):
        publisher = Publisher(rank=0, world_size=1)      # finds the daemon of this test
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

import pytest

if TYPE_CHECKING:
    from weightwire.local_daemon import Local


@pytest.fixture
def weightwire_daemon() -> Iterator["Local"]:
    """`weightwire.local()`, fresh for each test."""
    from weightwire.local_daemon import local
    with local() as daemon:
        yield daemon
