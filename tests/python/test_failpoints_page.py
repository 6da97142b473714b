"""docs/failpoints.md lists the failpoints of the code, no more and no less, and a release build knows none of them.
The cases themselves are tests/failpoints, in builds that have them."""

import sys

from conftest import BINARIES, ROOT

sys.path.insert(0, str(ROOT / "tests/failpoints"))

import table  # noqa: E402


def test_every_failpoint_of_the_code_has_a_row():
    placed = table.points_in_code()
    assert len(placed) >= 40 and len(set(placed)) == len(placed), "a name stands for one moment"
    assert {row.point for row in table.rows()} == set(placed)


def test_a_release_build_has_no_failpoints():
    binary = (BINARIES / "weightwired").read_bytes()
    assert b"weightwired ready role=" in binary, "this looks for text in the binary"
    assert not [point for point in table.points_in_code() if point.encode() in binary]
    assert b"WEIGHTWIRE_FAILPOINT" not in binary
