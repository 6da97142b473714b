#!/usr/bin/env python3
"""The check of retired words must find what it is for."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import retired_words as check

WORDS = {"Outbox": "CommandQueue", "Leg": "PlanAssignment", "Track": "RankSpans"}
CASES = [  # text, old names that are found
    ("class Outbox {", ["Outbox"]),
    ("/// See Outbox.", ["Outbox"]),
    ("CommandQueue commands_;  // once an Outbox", ["Outbox"]),
    ("v1::Leg* to = out->add_legs();", []),
    ("v1::DescribeEpochResponse::Track* to;", []),
    ("std::vector<Leg> legs;", ["Leg"]),
    ("Legacy SmtpOutbox outbox_", []),
    ("Outbox Leg", ["Outbox", "Leg"]),
]
PATHS = [("server/agent/agent.cc", True), ("docs/wwctl.md", True), ("docs/history/performance.md", False),
         ("proto/weightwire/v1/agent.proto", False), ("tests/data/x.txt", False), ("client/cli/main.cc", True)]

wrong = [f"{text!r}: {found} instead of {wanted}" for text, wanted in CASES
         if (found := [old for _, old in check.complaints(text, WORDS)]) != wanted]
wrong += [f"{path}: looked at is {not wanted}" for path, wanted in PATHS if check.is_looked_at(path) != wanted]
KNOWN = check.tails(["server/transfer/pack.h", "server/base/status.h"])
FILES = [  # line, files that are named and not there
    ("/// Sums of it (pack.h: PrefixHash), as server/base/status.h and base/status.h say.", []),
    ("/// As in fair_gate.h.", ["fair_gate.h"]),
    ("int x;  ///< transport/pack.h", ["transport/pack.h"]),
    ("// declared in nccl.h; <mutex.h>", []),
    ('#include "gone.h"', []),  # the compiler's to say
]
wrong += [f"{text!r}: {found}" for text, wanted in FILES
          if (found := [name for _, name in check.missing_files(text, KNOWN)]) != wanted]
if not all(new.strip() and new.split()[0] != old for old, new in check.table().items()):
    wrong.append("retired_words.txt: a row that replaces nothing")
if any(old in new.split() for old in check.table() for new in check.table().values()):
    wrong.append("retired_words.txt: a name that replaces another one is retired itself")
print("\n".join(wrong) or f"{len(CASES) + len(PATHS) + len(FILES)} cases as expected")
sys.exit(bool(wrong))
