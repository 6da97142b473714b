#!/usr/bin/env python3
"""Plants one bug after another in a copy of the tree and runs the fleet simulation on each: every one must be caught
within its number of seeds. A clean run of a simulation that catches nothing proves nothing.

  mutants.py [--only NAME] [--seeds N] [--table]     --table: rows for docs/faults.md
  mutants.py --check                                 only that every mutant still fits the code

A mutant is a list of exact replacements in server/; one whose text is not there (the code has changed) is an error, so
that the list stays alive. Only fleet_test is built; ccache keeps what a mutant does not touch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutants/tree"
BUILD = COPY / "build/release"  # as in the tree itself, so that ccache knows the objects
MACHINE = "server/epoch/coordinator_machine.cc"
MEMBER = "server/epoch/member_machine.cc"
ACTIONS = "server/coordinator/epoch_runner.cc"
SCHEDULER = "server/coordinator/epoch_scheduler.cc"
FILL = "server/coordinator/fill_scheduler.cc"
PARTICIPANT = "server/agent/participant_actions.cc"
RECALL = "server/coordinator/rejoin.cc"
FETCHES = "server/transfer/target_fetches.cc"
RUN_SECONDS = 900  # a mutant that makes the simulation crawl


@dataclass
class Mutant:
    name: str
    what: str
    edits: list[tuple[str, str, str]]
    seeds: int = 4000  # within which FleetFaults must fail, where no scenario of FleetTest does


MUTANTS = [
    Mutant("commit-before-durable", "acts on COMMIT when it is submitted, before it is durable",
           [(ACTIONS, "s_.journal.Append(\n      record, cancel_.Bind(",
             "[&](const CommitRecord& r, const std::function<void(Status)>& done) {\n"
             "    s_.journal.Append(r, [](const Status&) {});\n    done(OkStatus());\n  }(record, cancel_.Bind(")]),
    Mutant("failed-append-commits", "an append that failed counts as durable",
           [(ACTIONS, "  if (status.ok()) {\n    if (record.newest", "  if (status.ok() || !status.ok()) {\n    if (record.newest"),
            (ACTIONS, "epoch::JournalEvent{status}", "epoch::JournalEvent{OkStatus()}")]),
    Mutant("deciding-after-failure", "goes on deciding after an append whose fate is unknown",
           [(SCHEDULER, "  if (!shared_.decisions.deciding) return;\n  shared_.decisions.deciding = false;",
             "  return;\n  shared_.decisions.deciding = false;")]),
    Mutant("recovery-commits-undecided", "a restart takes the highest reserved epoch for committed",
           [("server/coordinator/coordinator.cc", "recovered.first = std::max(recovered.first, reserve->limit);",
             "recovered.first = std::max(recovered.first, reserve->limit);\n"
             "      recovered.committed.epoch = reserve->limit;")]),
    Mutant("recovery-forgets-reservations", "a restart hands out epoch numbers again",
           [("server/coordinator/coordinator.cc", "recovered.first = std::max(recovered.first, reserve->limit);",
             "static_cast<void>(reserve);")]),
    Mutant("recovery-forgets-drains", "a restart gives work to engines that an operator was told are drained",
           [("server/coordinator/coordinator.cc", "recovered.drained = drain->marks;", "static_cast<void>(drain);")]),
    Mutant("drained-before-durable", "a drain is answered before it is durable",
           [("server/coordinator/coordinator.cc", "journal_.Append(DrainRecord{membership_.Marks()}, cancel_.Bind(std::move(done)));",
             "journal_.Append(DrainRecord{membership_.Marks()}, [](const Status&) {});\n    done(OkStatus());")]),
    Mutant("counts-reports", "counts staged reports instead of keeping a set",
           [("server/epoch/coordinator_machine.h", "  std::set<Member> drained;\n",
             "  size_t count = 0;\n  std::set<Member> drained;\n"),
            (MACHINE, "    if (!state_.staged.emplace(event.member, event.digests).second) return;\n"
             "    state_.roster.CountStaged(event.member);\n    EnterStagedWhenComplete();",
             "    if (state_.staged.emplace(event.member, event.digests).second) state_.roster.CountStaged(event.member);\n"
             "    if (++state_.count >= state_.roster.targets()) EnterStagedWhenComplete();"),
            (MACHINE, "    if (state_.staged.size() < state_.roster.targets()) return;\n",
             "    if (state_.count < state_.roster.targets()) return;\n"),
            ("server/epoch/digests.cc", "state.staged.at(engine.ranks[rank]);",
             "state.staged.contains(engine.ranks[rank]) ? state.staged.at(engine.ranks[rank])\n"
             "                                               : state.staged.begin()->second;"),
            ("server/epoch/digests.cc", 'digest.stream, "reported twice");', 'digest.stream, "reported twice").ok() ? OkStatus() : OkStatus();'),
            ("server/epoch/digests.cc", "if (!streams.contains(stream)) {", "if (false) {")]),
    Mutant("ignores-incarnation", "a report counts for whoever holds the rank now",
           [("server/coordinator/membership.cc", "if (!slot.live || slot.live->member != member) {",
             "if (!slot.live) {"),
            (MEMBER, "return member == state_.self && !state_.evicted;", "return member.id == state_.self.id;")]),
    Mutant("staged-without-all-ranks", "an epoch counts as staged when the leaders have",
           [(MACHINE, "    if (state_.sourced.size() < state_.roster.sources()) return;\n"
             "    if (state_.staged.size() < state_.roster.targets()) return;\n",
             "    for (const EngineMembers& engine : state_.spec.engines) {\n"
             "      if (!state_.staged.contains(engine.ranks.front())) return;\n    }\n"),
            (MACHINE, "if (Status why = CompareDigests(state_); !why.ok()) return Abort(std::move(why));", "")]),
    Mutant("no-sums", "bytes are neither summed again where they arrive nor compared by digest",
           [(FETCHES, "if (sums_[segment] == slot.expected[i]) {", "if (true) {"),
            (MACHINE, "if (Status why = CompareDigests(state_); !why.ok()) return Abort(std::move(why));", "")]),
    Mutant("release-before-staged", "the trainer is released when it has sent, before every engine has verified",
           [(MACHINE, "    if (state_.sourced.emplace(event.member, event.digests).second) EnterStagedWhenComplete();",
             "    if (!state_.sourced.emplace(event.member, event.digests).second) return;\n"
             "    if (state_.sourced.size() == state_.spec.sources.size()) Do(SendRelease{});\n"
             "    EnterStagedWhenComplete();")]),
    Mutant("release-when-transferring", "the trainer is released as soon as the transfer begins",
           [(MACHINE, "    Do(SendTransfer{});\n", "    Do(SendTransfer{});\n    Do(SendRelease{});\n"),
            (MEMBER, "state_.phase != MemberPhase::kDone) return;\n      TellReleasedOnce(command);\n      return StartDrain(command.epoch);",
             "state_.phase == MemberPhase::kIdle) return;\n      return TellReleasedOnce(command);"),
            (PARTICIPANT, "  Drain(attempt_, std::move(release));", "  release();")]),
    Mutant("abort-after-submission", "an epoch may be aborted while its COMMIT is under way",
           [(MACHINE, "           state_.phase == Phase::kStaged;\n  }\n  /// Decided",
             "           state_.phase == Phase::kStaged ||\n"
             "           (state_.phase == Phase::kCommitting && !state_.commit_durable);\n  }\n  /// Decided")]),
    Mutant("lost-engine-still-counted", "an engine lost after the decision is waited for",
           [(MACHINE, "    if (state_.applied.size() + state_.evicted.size() < state_.spec.engines.size()) return;",
             "    if (state_.applied.size() < state_.spec.engines.size()) return;")]),
    Mutant("lost-member-ignored", "an epoch goes on without a member that was lost",
           [(MACHINE, "if (engine != nullptr && MayExclude({engine->name})) return Exclude({engine->name}, why);\n"
             "      return Abort(why);", "static_cast<void>(engine);\n      return;")]),
    Mutant("excluded-still-read", "sources go on waiting for an engine without which the epoch goes on",
           [(ACTIONS, "  for (const epoch::Member& member : ReadFrom(run.state, engine.name)) {",
             "  for (const epoch::Member& member : ReadFrom(run.state, engine.name)) {\n    if (run.state.released == false) continue;")]),
    Mutant("excluded-until-it-opened", "a reader that is lost before it came is waited for",
           [("server/transfer/source_stream.cc", "    ++excluded_unseen_;  // perhaps", "    // perhaps")]),
    Mutant("released-when-an-engine-is-lost", "the loss of an engine counts as if it had staged its bytes",
           [(MACHINE, "    EnterStagedWhenComplete();\n    if (state_.phase == Phase::kTransferring) ArmGraceOnce();\n  }\n\n"
             "  void TakeOut(",
             "    state_.phase = Phase::kStaged;\n    Do(SendRelease{});\n    SubmitCommit();\n  }\n\n"
             "  void TakeOut(")]),
    Mutant("fill-from-what-is-served", "a fill reads from an engine whatever it serves",
           [(FILL, "if (engine->serving == shared_.decisions.committed.epoch) {", "if (engine->serving != Epoch{}) {"),
            (PARTICIPANT, "(!memory_->stage() || memory_->stage()->live_epoch() != command.content)",
             "!memory_->stage()")]),
    Mutant("held-although-overwritten", "a rollback trusts a buffer that another epoch has begun to write",
           [(PARTICIPANT, "  stage.Overwrite(attempt->buffer);\n", ""),
            (ACTIONS, "s_.membership.Hold(member, run.holds[member]);", "static_cast<void>(member);")]),
    Mutant("rollback-to-the-wrong-buffer", "of several versions that are held, a rollback serves another one than was asked for",
           [(PARTICIPANT, "attempt->buffer = memory_->stage()->HolderOf(attempt->command.held);",
             "attempt->buffer = memory_->stage()->next();")]),
    Mutant("aborted-before-drained", "an epoch counts as aborted while its transfers run; memory is used again",
           [(PARTICIPANT, "  if (attempt->drained) return then();\n",
             "  if (!attempt->drained) {\n    attempt->drained = true;\n    return then();\n  }\n"
             "  if (attempt->drained) return then();\n")], seeds=20000),
    Mutant("a-model-is-not-waited-for", "a version begins while all engines of a model are cut off",
           [("server/coordinator/publish_queue.cc", "shared_.AwaitsAModel(engines, head->awaited)", "false")]),
    Mutant("a-model-is-excluded", "a version goes on without the last engine of a model",
           [(MACHINE, "    if (spec.every_model && !state_.roster.HasEveryModelWithout(names)) return false;\n", "")]),
    Mutant("flip-without-the-leader", "ranks are told to flip before their leader has",
           [(MACHINE, "      if (!EngineOver(state_, engine.name)) Do(SendCommit{engine.name});",
             "      if (EngineOver(state_, engine.name)) continue;\n      Do(SendCommit{engine.name});\n"
             "      Do(SendCommittedEverywhere{engine.name});"),
            (MEMBER, "state_.phase != MemberPhase::kCommitting || (state_.leader && !state_.applied)",
             "state_.phase != MemberPhase::kCommitting")]),
    Mutant("staged-counts-as-decided", "a coordinator takes what engines had staged for what was committed",
           [(RECALL, "claim.content <= committed.epoch &&\n           (claim.content == committed.epoch || claim.told);",
             "true;")]),
    Mutant("ranks-need-not-agree", "an engine is taken over although its ranks serve different epochs",
           [(RECALL, "if (claim.serving == first) continue;", "continue;")]),
    Mutant("fence-on-stream-end", "a connection that ends is taken for the end of the agent's ranks",
           [("server/coordinator/membership.cc",
             '  Cut(agent, Status(Code::kAborted, Reason::kMemberLost, "its agent\'s connection ended"),\n      Presence::kSuspect, now);',
             '  static_cast<void>(now);\n  LoseAgent(agent, Status(Code::kAborted, Reason::kMemberLost, "its agent\'s connection ended"));')],
           seeds=1000),
    Mutant("fence-at-the-end-of-a-lease", "a lease that ends takes what its ranks serve",
           [("server/coordinator/membership.cc", "    commands_.EndSession(session.port, why);\n    Cut(agent, why, Presence::kAbsent, now);",
             "    commands_.EndSession(session.port, why);\n    LoseAgent(agent, why);")], seeds=1000),
    Mutant("a-cut-evicts-who-was-to-swap", "an engine that is cut off after the decision is evicted",
           [(MACHINE, "    state_.evicted.insert(engine->name);\n    FinishWhenCommitted();",
             "    Evict(engine->name, LossStatus(event));\n    FinishWhenCommitted();")], seeds=1000),
    Mutant("overtaken-trainers-publish", "a trainer that another one overtook, which went back to an earlier step, publishes on",
           [("server/coordinator/scheduling.cc", "asked == newest || asked == newest + 1) return OkStatus();",
             "asked <= newest + 1) return OkStatus();"),
            ("server/coordinator/version_queue.cc", "  if (id <= floor_) return", "  if (id.lineage == floor_.lineage && id <= floor_) return"),
            (SCHEDULER, "  publishes_.GiveUpTo({committed.newest - 1, Version(UINT64_MAX)},",
             "  publishes_.GiveUpTo({0, Version{}},")]),
    Mutant("a-rollback-forgets-the-newest-lineage", "after a rollback to an earlier lineage its trainer is not fenced any more",
           [(ACTIONS, "const uint64_t newest = std::max(shared_.decisions.committed.newest, spec.lineage);",
             "const uint64_t newest = spec.lineage;")]),
    Mutant("lineages-by-guess", "what was committed before the last decision is taken to be of the newest lineage",
           [("server/coordinator/scheduling.cc", "  std::vector<LineageRun> runs = committed.runs;\n  if (runs.empty()) {",
             "  std::vector<LineageRun> runs;\n  if (runs.empty()) {"),
            ("server/coordinator/scheduling.cc", "    runs.push_back({Epoch{}, only ? kFirstLineage : 0});",
             "    runs.push_back({Epoch{}, only ? kFirstLineage : record.newest});")]),
    Mutant("the-dead-are-registered-again", "a process that ends while its agent registers it again keeps its rank",
           [("server/agent/participant_rejoin.cc", "        if (!reply) return;\n", "        return;\n")], seeds=20000),
]


def misfits(root: Path) -> list[str]:
    """Mutants whose text is not in the tree, or not once."""
    return [f"{mutant.name}: {count} times in {path}, wanted once:\n{old}" for mutant in MUTANTS
            for path, old, _ in mutant.edits if (count := (root / path).read_text().count(old)) != 1]


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def copy_tree() -> None:
    """The working tree as git sees it; a file that has not changed keeps its time, so that it is not built again."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in listed.stdout.decode().splitlines():
        source, target = ROOT / name, COPY / name
        if not source.exists() or not re.match(r"(server|tests|kernels|cmake|client|CMake)", name):
            continue
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def build() -> str:
    """Empty, or what the compiler said."""
    env = {**os.environ, "CCACHE_BASEDIR": str(COPY), "CCACHE_NOHASHDIR": "1"}
    if not (BUILD / "build.ninja").exists():
        subprocess.run(["cmake", "--preset", "release", "-DWEIGHTWIRE_SERVICE=OFF", "-DWEIGHTWIRE_BENCH=OFF"], cwd=COPY,
                       check=True, env=env, stdout=subprocess.DEVNULL)
    done = subprocess.run(["cmake", "--build", BUILD, "--target", "fleet_test", "-j", os.environ.get("WEIGHTWIRE_JOBS", "2")],
                          env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else done.stdout[-3000:]


def run(gtest_filter: str, **env: int) -> tuple[bool, str]:
    """Whether it passed, and what it printed."""
    command = [BUILD / "bin/fleet_test", f"--gtest_filter={gtest_filter}", "--gtest_fail_fast"]
    try:
        done = subprocess.run(command, env={**os.environ, **{k: str(v) for k, v in env.items()}}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"hangs: no end in {RUN_SECONDS} s"
    return done.returncode == 0, done.stdout


def caught(seeds: int) -> tuple[str, str]:
    """By which scenarios, and at which seed of the random faults; empty: by none."""
    passed, said = run("FleetTest.*")
    scenario = ""
    if not passed:
        failed = re.findall(r"\[  FAILED  \] FleetTest\.(\w+)", said)
        begun = re.findall(r"\[ RUN      \] FleetTest\.(\w+)", said)  # the last one ended the process
        scenario = failed[0] if failed else begun[-1]
    passed, said = run("FleetFaults.*", WEIGHTWIRE_SEEDS=seeds, WEIGHTWIRE_SHOW=1)
    if passed:
        return scenario, ""
    found = re.search(r"failed with WEIGHTWIRE_SEED=(\d+)", said)
    if found:
        return scenario, found[1]
    never = re.search(r"never reached: (.*)", said)
    if never:
        return scenario, f"never reached in {seeds} seeds: {never[1]}"
    if said.startswith("hangs"):
        return scenario, said
    at = re.findall(r"seed (\d+)\n", said)  # a check aborted the process
    return scenario, at[-1] if at else "1"


def planted(mutant: Mutant, seeds: int | None = None) -> tuple[str, str]:
    """As `caught`, of the tree with this bug in it (copy_tree first). A mutant that does not compile is an error."""
    kept = {path: (COPY / path).read_text() for path, _, _ in mutant.edits}
    try:
        for path, old, new in mutant.edits:
            replaced(COPY / path, old, new)
        if error := build():
            raise RuntimeError(f"{mutant.name} does not compile:\n{error}")
        return caught(seeds or mutant.seeds)
    finally:
        for path, text in kept.items():
            (COPY / path).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if wrong := misfits(ROOT):
        raise SystemExit("\n".join(wrong))
    if options.check:
        return 0
    copy_tree()
    missed = []
    for mutant in MUTANTS:
        if options.only and options.only != mutant.name:
            continue
        start = time.monotonic()
        try:
            scenario, seed = planted(mutant, options.seeds)
        except RuntimeError as error:
            print(error, flush=True)
            missed.append(mutant.name)
            continue
        if not scenario and not seed:
            missed.append(mutant.name)
        if options.table:
            print(f"| {mutant.what} | `{mutant.name}` | {scenario or '-'} | {seed or '-'} |", flush=True)
        else:
            print(f"{mutant.name}: scenario {scenario or '-'}, seed {seed or '-'} ({time.monotonic() - start:.0f} s)", flush=True)
    if missed:
        print(f"NOT CAUGHT: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
