#!/usr/bin/env python3
"""The include check must find what it is for: known-bad includes are refused, good ones pass."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import check_includes as check

ROWS = check.table()
CASES = [  # file, include, angled, refused?
    ("server/plan/x.cc", "server/layout/types.h", False, False),
    ("server/layout/x.cc", "server/plan/plan.h", False, True),
    ("server/plan/x.cc", "thread", True, True),
    ("server/plan/x.cc", "vector", True, False),
    ("server/epoch/x.cc", "grpcpp/grpcpp.h", True, True),
    ("server/coordinator/x.cc", "server/transport/transport.h", False, True),
    ("server/coordinator/x.cc", "server/memory/region.h", False, True),
    ("server/agent/x.cc", "server/transfer/transfer.h", False, False),
    ("server/agent/x.cc", "boost/asio.hpp", True, True),
    ("server/transport/tcp/x.cc", "boost/asio.hpp", True, False),
    ("server/transport/tcp/x.cc", "server/transport/shm/shm_transport.h", False, True),
    ("server/transport/tcp/x.cc", "server/transport/session.h", False, False),
    ("server/transfer/transfer.h", "mutex", True, True),
    ("server/rpc/x.cc", "grpcpp/grpcpp.h", True, False),
    ("server/memory/x.cc", "nccl.h", True, True),
]
wrong = []
for file, include, angled, refused in CASES:
    path = pathlib.Path(file)
    why = check.complaint(path, check.room_of(path, ROWS), include, angled, ROWS)
    if bool(why) != refused:
        wrong.append(f"{file} including {include}: {'refused: ' + why if why else 'allowed'}")
print("\n".join(wrong) or f"{len(CASES)} cases as expected")
sys.exit(bool(wrong))
