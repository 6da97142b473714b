"""256 members with heartbeats on one coordinator for a minute, then as many calls as it takes: nobody is lost.
`WEIGHTWIRE_MEMBERS` and `WEIGHTWIRE_HOLD` (seconds) make it larger: `./dev test long` holds 4,096 for ten minutes."""

import os
import sys

from conftest import BINARIES, ROOT

sys.path.insert(0, str(ROOT / "bench"))

import control  # noqa: E402

MEMBERS = int(os.environ.get("WEIGHTWIRE_MEMBERS", "256"))
HOLD = int(os.environ.get("WEIGHTWIRE_HOLD", "60"))


def test_members_on_connections_of_their_own_stay():
    row = control.run(str(BINARIES / "weightwired"), str(BINARIES / "load_bench"), agents=MEMBERS, ranks=1, hold=HOLD, calls=5,
                   in_flight=32)
    print(row)
    assert row["ok"], row
    assert row["calls"] > 0 and row["calls_failed"] == 0
    assert row["peak_mib"] < 512
