import os
import pathlib

import pytest
from demo.fleet import Daemon

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))


@pytest.fixture
def daemon(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0
