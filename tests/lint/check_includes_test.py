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
LINKS = [  # CMakeLists.txt of the room `store`, rooms that it links
    ("ww_component(store SOURCES a.cc DEPS base wire PRIVATE_DEPS SQLite::SQLite3 -lm)", {"base", "wire"}),
    ("ww_component(store SOURCES metrics DEPS base)\ntarget_link_libraries(weightwire_store PUBLIC weightwire_tls ${X})", {"base", "tls"}),
    ("ww_component(store SOURCES a.cc PRIVATE_DEPS plan DEPS config)", {"plan", "daemon"}),
]
wrong += [f"{text}: {found}" for text, wanted in LINKS if (found := check.linked(text, "store")) != wanted]
DIFFERENCES = [  # row of the table, includes, links, how many disagreements
    ({"base", "wire"}, {"base", "wire"}, {"base", "wire"}, 0),
    ({"base", "wire"}, {"base"}, {"base", "wire"}, 1),  # named and not included
    ({"base"}, {"base"}, {"base", "wire"}, 1),  # linked and not named
    ({"base", "wire"}, {"base", "wire"}, {"base"}, 1),  # named and not linked
    ({"base"}, {"base", "wire"}, None, 0),  # a part of its parent's library; complaint() finds the include
]
wrong += [f"{case}: {found}" for *case, count in DIFFERENCES if len(found := check.differences("store", *case)) != count]
print("\n".join(wrong) or f"{len(CASES) + len(LINKS) + len(DIFFERENCES)} cases as expected")
sys.exit(bool(wrong))
