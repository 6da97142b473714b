"""wwctl at a terminal: its options, top, completion, and its reference in docs/wwctl.md (UPDATE_DOCS=1 writes it)."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from certificates import Authority
from conftest import BINARIES, ROOT, stand_still
from test_client import engine, trainer
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import types_pb2

WWCTL = str(BINARIES / "wwctl")
REFERENCE = ROOT / "docs/wwctl.md"
PYTHONS = {"compact", "convert", "delta", "load", "push", "save", "quantize", "store"}  # the help of `python -m weightwire.checkpoint`, and `.store`


def run(*arguments, environment=None, **options):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTWIRE_") and k != "COLUMNS"}
    return subprocess.run([WWCTL, *arguments], timeout=120, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env={**clean, **(environment or {})}, **options)


def commands(*path) -> list[str]:
    """The commands below `path`, as its help lists them."""
    listed = run(*path, "--help").stdout.partition("Subcommands:\n")[2]
    return re.findall(r"^  ([a-z]\S*)", listed, re.M)


def leaves() -> list[tuple[str, ...]]:
    """Every command of wwctl's own that does something, as its help lists them."""
    paths = []
    for command in set(commands()) - PYTHONS:
        below = commands(command)
        paths += [(command, name) for name in below] or [(command,)]
    return sorted(paths)


def positionals(path) -> list[str]:
    """A word for each positional that the command requires."""
    usage = re.search(r"^Usage: wwctl .*$", run(*path, "--help").stdout, re.M)[0]
    return ["1"] * len([w for w in usage.split()[2 + len(path):] if not w.startswith("[")])


def settings() -> dict[str, str]:
    """Options that an environment variable gives, too: option -> variable, by wwctl's help."""
    return dict(re.findall(r"^  (?:-\w,)?(--[\w-]+)(?:(?!^  -).)*?else \$(WEIGHTWIRE_\w+)", run("--help").stdout, re.M | re.S))


class Coordinator:
    """Answers Status with `status` and fails every other call; remembers all calls and what they showed."""

    def __init__(self, status: pb.StatusResponse | None = None, credentials=None):
        self.calls: list[str] = []
        self.metadata: list[dict] = []
        self.requests: list[bytes] = []
        self.status = status
        self.server = grpc.server(ThreadPoolExecutor(8), handlers=[self])
        port = self.server.add_secure_port("127.0.0.1:0", credentials) if credentials else \
            self.server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def service(self, details):
        method = details.method.rpartition("/")[2]
        self.calls.append(method)
        self.metadata.append(dict(details.invocation_metadata))

        def answer(request, context):
            self.requests.append(request)
            if method == "Status" and self.status is not None:
                return self.status.SerializeToString()
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "only a test")
        if method == "Watch":
            return grpc.unary_stream_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(None).wait(10)


def test_a_flag_beats_the_environment_in_every_command():
    paths = leaves()
    asked = set()
    with Coordinator() as flag, Coordinator() as variable:
        def ask(path, before):
            flags = ["--address", flag.address]
            return run(*(flags if before else []), *path, *positionals(path), *([] if before else flags),
                       environment={"WEIGHTWIRE_ADDRESS": variable.address})
        for path in paths:
            for before in (True, False):
                flag.calls.clear()
                done = ask(path, before)
                assert not variable.calls, f"wwctl {' '.join(path)} asked the environment's coordinator: {variable.calls}"
                if flag.calls:
                    asked.add(path)
                else:  # one that needs no coordinator says so, or wants its own options first
                    assert done.returncode == 2, f"wwctl {' '.join(path)}: {done}"
        for path in asked:  # and without a flag the variable counts
            variable.calls.clear()
            run(*path, *positionals(path), environment={"WEIGHTWIRE_ADDRESS": variable.address})
            assert variable.calls, path
    offline = {("plan",), ("simulate",), ("layout", "show"), ("layout", "diff"), ("layout", "lint"), ("token",), ("completion",)}
    assert asked == set(paths) - offline


def test_a_flag_beats_the_environment_in_every_option(tmp_path):
    authority = Authority(tmp_path / "ca")
    server, own = authority.issue("coordinator", "coordinator"), authority.issue("operator", "operator")
    token = tmp_path / "token"
    token.write_text("a.token\n")
    read = [open(path, "rb").read() for path in (server.key, server.cert, server.ca)]
    (tmp_path / "bad").write_text("not a certificate")
    bad = str(tmp_path / "bad")
    with Coordinator() as wrong, \
            Coordinator(credentials=grpc.ssl_server_credentials([tuple(read[:2])], read[2], True)) as by_cert, \
            Coordinator(credentials=grpc.ssl_server_credentials([tuple(read[:2])])) as by_token:
        values = {"--address": wrong.address, "--tls-server-name": "wrong.example"}
        environment = {variable: values.get(option, bad) for option, variable in settings().items()}
        common = ["--tls-ca", own.ca, "--tls-server-name", "localhost"]
        with_cert = ["--address", by_cert.address, *common, "--tls-cert", own.cert, "--tls-key", own.key]
        with_token = ["--address", by_token.address, *common, "--token-file", str(token)]
        assert {w for w in with_cert + with_token if w.startswith("--")} == set(settings()), "every option is tried"
        for path in (("status",), ("rollback",), ("epoch",)):
            for flags, coordinator in ((with_cert, by_cert), (with_token, by_token)):
                coordinator.calls.clear()
                done = run(*path, *positionals(path), *flags, environment=environment)
                assert coordinator.calls and not wrong.calls, done
        assert by_token.metadata[-1].get("weightwire-token") == "a.token"


def test_the_python_commands_take_the_address_by_flag_too(tmp_path):
    for package in ("checkpoint", "store"):
        (tmp_path / "weightwire" / package).mkdir(parents=True)
        (tmp_path / "weightwire" / package / "__init__.py").write_text("")
        (tmp_path / "weightwire" / package / "__main__.py").write_text(
            f"import sys\ndef main(prog):\n    print(*(['store'] if '{package}' == 'store' else []), *sys.argv[1:])\n    return 0\n")
    (tmp_path / "weightwire/__init__.py").write_text("")
    environment = {"WEIGHTWIRE_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "WEIGHTWIRE_ADDRESS": "a:1"}
    for command in PYTHONS:
        done = run("--address", "b:2", "--timeout=3", command, "folder", environment=environment)
        assert done.stdout == f"{command} folder --coordinator b:2 --timeout=3\n", done


@pytest.mark.parametrize("arguments, said", [
    (["statsu"], "no command 'statsu'; did you mean status?"), (["layout", "lnit"], "did you mean lint?"),
    (["status", "--jsno"], "no option --jsno; did you mean --json?"), (["rollback", "1", "--adress=b:1"], "did you mean --address?"),
    (["frobnicate"], "no command 'frobnicate'; `wwctl --help`"), (["status", "now"], "takes no 'now'"),
    (["rollback", "-1"], "'-1' is not in 1 to 18446744073709551615"), (["rollback", "0"], "'0' is not in 1 to"),
    (["abort", "1x"], "'1x' is not in 1 to"), (["status", "--timeout", "0"], "'0' is not in 0.001 to 86400"),
    (["status", "--timeout", "nan"], "'nan' is not in"), (["status", "--address", "b:99999"], "'99999' is not in 1 to 65535"),
    (["--address", "b:0", "status"], "'0' is not in 1 to 65535"), (["status", "--address", "b"], "has no port"),
    (["top", "--interval-ms", "1"], "'1' is not in 100 to 3600000"), (["drain", "a", "--wait", "-1"], "'-1' is not in 0 to"),
    (["evict", "a", "-o", "json"], "has no -o json"), (["plan", "--address", "b:1", "--config", "c", "--from", "hf", "--to", "hf"], "asks no coordinator"),
    (["status", "--tls-cert", "c", "--tls-ca", "c"], "belong together"), (["status", "--token-file", "t"], "needs --tls-ca"),
    (["status", "--tls-cert", "c", "--tls-key", "k", "--tls-ca", "c", "--token-file", "t"], "either --tls-cert"),
    (["status", "--tls-ca", "/no/ca.crt"], "wwctl: --tls-ca: /no/ca.crt: No such file or directory\n"),
    (["help", "statsu"], "no command 'statsu'; did you mean status?"), (["verify", "a", "--group", "a"], "excludes")])
def test_wrong_usage_is_refused_with_what_is_right(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr, done


def test_help_and_version_are_words_too():
    for path in ((), ("status",), ("layout", "diff")):
        assert run("help", *path).stdout == run(*path, "--help").stdout != ""
    assert run("version").stdout == run("--version").stdout != ""
    alone = run()
    assert alone.returncode == 2 and alone.stderr == run("--help").stdout and not alone.stdout


def test_a_file_of_the_environment_that_is_not_there_is_named_before_anybody_is_asked():
    done = run("status", environment={"WEIGHTWIRE_TLS_CA": "/no/ca.crt"})
    assert (done.returncode, done.stderr) == (2, "wwctl: WEIGHTWIRE_TLS_CA: /no/ca.crt: No such file or directory\n")


@pytest.mark.parametrize("option, content, said", [
    ("--tls-ca", "", "holds no certificate in PEM"), ("--tls-cert", "key", "holds no certificate in PEM"),
    ("--tls-key", "certificate", "holds no private key in PEM"), ("--tls-key", "other key", "is not the key of the certificate")])
def test_a_file_that_holds_something_else_is_named_before_anybody_is_asked(tmp_path, option, content, said):
    """gRPC would write four lines of its own, and say that nobody listens."""
    authority = Authority(tmp_path / "ca")
    own, other = authority.issue("operator", "operator"), authority.issue("other", "operator")
    files = {"--tls-ca": own.ca, "--tls-cert": own.cert, "--tls-key": own.key}
    (tmp_path / "empty").write_text("")
    files[option] = {"": str(tmp_path / "empty"), "key": own.key, "certificate": own.cert, "other key": other.key}[content]
    with Coordinator() as coordinator:
        done = run("status", "--address", coordinator.address, *(word for pair in files.items() for word in pair))
        assert (done.returncode, done.stderr) == (2, f"wwctl: {option}: {files[option]}: {said}\n") and not coordinator.calls


def test_the_same_by_the_names_that_other_tools_have(daemon):
    at = ["--address", daemon.grpc]
    assert run("epochs", "--limit", "3", *at) .stdout == run("epochs", "--epochs", "3", *at).stdout
    bare, named = run("verify", "engine-x", *at), run("verify", "--group", "engine-x", *at)
    assert bare.stderr == named.stderr and bare.returncode == named.returncode != 2


@pytest.mark.parametrize("word, size", [("8388608", 8388608), ("8MiB", 8 << 20), ("16kB", 16_000), ("16KiB", 16 << 10), ("1GB", 10**9)])
def test_sizes_have_units(word, size):
    done = subprocess.run([BINARIES / "weightwired", "--print-config", "--rate-limit", word], capture_output=True, text=True, timeout=30)
    assert f"\nrate_limit: {size} " in done.stdout, done


@pytest.mark.parametrize("flag, word, said", [
    ("--gpu-slab-bytes", "8M", '"8M" is no number of bytes from 0 to'), ("--gpu-slab-bytes", "-1", "such as 8388608, 8MiB or 10GB"),
    ("--gpu-slab-bytes", "99999999TB", "is no number of bytes"), ("--gpu-slab-bytes", "GB", "is no number of bytes"),
    ("--gpu-slab-bytes", "1.5GB", "is no number of bytes"), ("--slot-bytes", "1kB", "is no number of bytes from 8192 to"),
    ("--role", "foo", 'must be all, coordinator or agent, not "foo"'), ("--log-level", "loud", 'must be trace, debug, info, warn or error, not "loud"')])
def test_settings_that_are_wrong_say_what_is_right(flag, word, said):
    done = subprocess.run([BINARIES / "weightwired", "--print-config", flag, word], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and said in done.stderr, done


def test_numbers_are_decimal():
    with Coordinator() as coordinator:
        run("epoch", "010", "--address", coordinator.address)
        assert pb.DescribeEpochRequest.FromString(coordinator.requests[-1]).epoch == 10


def test_an_address_of_the_environment_is_checked_too():
    done = run("status", environment={"WEIGHTWIRE_ADDRESS": "b:99999"})
    assert done.returncode == 2 and done.stderr.startswith("wwctl: WEIGHTWIRE_ADDRESS: "), done


def fleet(engines: int, errors: int = 0) -> pb.StatusResponse:
    """A job of so many engines with long names, of which the last `errors` are in trouble."""
    status = pb.StatusResponse(job="a-job-with-a-long-name", committed_epoch=12345, committed_version=12000, deciding=True, agents=engines,
                               committed_unix_seconds=time.time() - 60)
    for i in range(engines):
        bad = i >= engines - errors
        name = f"rollout-worker-group-of-the-second-zone-{i:05}"
        status.engines.add(name=name, state=pb.ENGINE_STATE_SERVING, serving_epoch=12345, version=12000, ranks_present=1, world_size=1,
                           ready=not bad, lag_versions=2 * bad, last_error="transport_failed: no route to 10.0.0.1: " * 4 if bad else "")
        status.participants.add(role=types_pb2.GROUP_ROLE_ENGINE, group=name, world_size=1, agent_name=f"pod-{i}", has_layout=True, spec="vllm:tp1")
    for n in range(60):
        status.epochs.add(epoch=12345 - n, kind=types_pb2.EPOCH_KIND_PUBLISH, version=12000 - n, phase=types_pb2.EPOCH_PHASE_COMMITTED,
                          attempt=1, total_seconds=1.5, engines=[e.name for e in status.engines])
    return status


def on_a_terminal(columns: int, *words) -> str:
    """What a command that ends writes to a terminal of so many columns."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = subprocess.Popen([WWCTL, *words], stdin=subprocess.DEVNULL, stdout=side, stderr=side)
    os.close(side)
    seen = b""
    with contextlib.suppress(OSError):  # of a terminal whose last program has ended
        while more := os.read(main, 1 << 16):
            seen += more
    os.close(main)
    assert command.wait(60) == 0, seen
    return seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("engines", [3, 2000])
def test_top_fits_80_columns(engines):
    with Coordinator(fleet(engines, errors=2)) as coordinator:
        shown = run("top", "--address", coordinator.address)
        assert shown.returncode == 0, shown.stderr
        assert max(map(len, shown.stdout.splitlines())) <= 80
        wide = run("top", "-o", "wide", "--address", coordinator.address)
        assert max(map(len, wide.stdout.splitlines())) > 80


def test_a_reason_for_which_there_is_no_room_stands_below_its_row_and_says_all():
    """In a column of what is left of 80 it would be "aborte…"."""
    status = fleet(3)
    reason = "the deadline of transferring passed: rollout-worker-group-of-the-second-zone-00002/0 did not report staged within 30 s"
    status.epochs[0].phase = types_pb2.EPOCH_PHASE_ABORTED
    status.epochs[0].why.code, status.epochs[0].why.message = 10, reason
    status.engines[1].last_error = reason
    with Coordinator(status) as coordinator:
        for words, rows in ((("epochs",), 1), (("engines",), 1), (("status",), 2), (("top", "--once"), 2)):
            text = on_a_terminal(80, *words, "--address", coordinator.address)
            tables = text[text.index("ENGINE" if words != ("epochs",) else "EPOCH"):]
            assert max(map(len, tables.splitlines())) <= 80 and "WHY" not in text
            assert re.sub(r"\s+", " ", text).count(reason) == rows == len(re.findall("^    the deadline", text, re.M)), text
        text = on_a_terminal(400, "epochs", "--address", coordinator.address).splitlines()
        assert text[0].endswith("WHY") and text[1].endswith(f"  {reason}"), "there is room"
        status.epochs[0].why.message = reason * 9
        lines = on_a_terminal(80, "epochs", "--address", coordinator.address).splitlines()
        assert lines[4].endswith(" …") and lines[5].startswith("12344 "), "no more than three lines"


def test_thousands_of_engines_are_summed_up():
    """More than gRPC's 4 MiB, too."""
    status = fleet(2000, errors=2)
    assert status.ByteSize() > 4 << 20
    with Coordinator(status) as coordinator:
        shown = run("status", "--address", coordinator.address)
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert len(lines) < 40
        engines = [line for line in lines if line.startswith("rollout-worker")]
        assert "no route" in engines[0] and "no route" in engines[1], "those in trouble come first"
        assert "and 1980 more, 1980 of them ready" in shown.stdout
        everything = run("status", "-o", "wide", "--address", coordinator.address).stdout.splitlines()
        assert sum(line.startswith("rollout-worker") for line in everything) == 2000
        found = run("doctor", "--address", coordinator.address)
        assert found.returncode == 1 and "2 versions behind" in found.stdout
    for one in status.engines:
        one.ranks_present = 0
    del status.participants[:]
    with Coordinator(status) as coordinator:
        found = run("doctor", "--address", coordinator.address)
        assert len(found.stdout.splitlines()) < 30 and "and 1997 more: " in found.stdout
        everything = run("doctor", "-o", "wide", "--address", coordinator.address)
        assert everything.stdout.count("serves nothing") == 2000


def test_json_by_three_names_before_and_after_the_command(daemon):
    at = ["--address", daemon.grpc]
    want = run("engines", "--json", *at)
    assert want.returncode == 0 and want.stdout == "[]\n", want
    for arguments in (["-o", "json", "engines"], ["engines", "-o", "json"], ["--output=json", "engines"], ["--json", "engines"]):
        assert run(*arguments, *at).stdout == want.stdout


def changing() -> set[str]:
    """Commands that change a running job: those that can be tried."""
    return {path[0] for path in leaves() if "--dry-run" in run(*path, "--help").stdout}


def test_what_changes_a_job_says_so_and_runs_without_a_terminal():
    assert changing() == {"abort", "commit", "drain", "evict", "rollback"}
    method = {name: name.capitalize() for name in changing()}
    status = fleet(2)
    for name in changing():
        with Coordinator(status) as coordinator:
            dry = run(name, "1", "--dry-run", "--address", coordinator.address)
            assert dry.returncode == 0 and dry.stdout == "nothing was done\n" and coordinator.calls == ["Status"], dry
            done = run(name, "1", "--address", coordinator.address)
            assert coordinator.calls[-1] == method[name], coordinator.calls
            for shown in (dry, done):
                assert shown.stderr.startswith(f"wwctl: job a-job-with-a-long-name at {coordinator.address}: "), shown
    assert "2 engines go from version 12000 back to version 1" in run_dry(status, "rollback", "1")
    assert "1 engine goes from version 12000 back to version 1" in run_dry(fleet(1), "rollback", "1")
    for command in ("abort", "commit"):
        said = run_dry(status, command, "12345")
        assert "epoch 12345 (version 12000, committed;" in said and ") has ended: it stays as it is" in said
    status.epochs[0].phase = types_pb2.EPOCH_PHASE_STAGED
    assert "and 1 more" not in run_dry(status, "abort", "12345") and ") is aborted; its version may be tried again" in run_dry(status, "abort", "12345")
    assert ") is committed: its engines flip" in run_dry(status, "commit", "12345")
    assert "1 rank of rollout-worker-group-of-the-second-zone-00001 is fenced, which serves version 12000" in \
        run_dry(status, "evict", "rollout-worker-group-of-the-second-zone-00001")


def run_dry(status, *arguments) -> str:
    with Coordinator(status) as coordinator:
        return run(*arguments, "--dry-run", "--address", coordinator.address).stderr


@pytest.mark.parametrize("options, answer, code, called", [
    ([], b"n\n", 3, False), ([], b"\n", 3, False), ([], b"y\n", 64, True), (["--yes"], None, 64, True)])
def test_a_terminal_is_asked(options, answer, code, called):
    main, side = pty.openpty()
    with Coordinator(fleet(1)) as coordinator:
        asked = subprocess.Popen([WWCTL, "rollback", "1", "--address", coordinator.address, *options], stdin=side, stdout=side, stderr=side)
        os.close(side)
        seen = b""
        try:
            while answer is not None and b"[y/N]" not in seen:
                seen += os.read(main, 4096)
            if answer is not None:
                assert coordinator.calls == ["Status"], "nothing is done before the answer"
                os.write(main, answer)
            ended = asked.wait(60)
            assert ended == code if code == 3 else ended > code, ended
            assert ("Rollback" in coordinator.calls) == called
        finally:
            asked.kill()
            asked.wait(10)
            os.close(main)


SERVES = dict(version=4, lineage=1, ready=True)


@pytest.mark.parametrize("engines,committed,line", [
    ([], 4, "idle: no engine is registered"),
    ([SERVES], 0, "idle: nothing was published yet"),
    ([SERVES], 4, "idle: the engine serves version 4"),
    ([SERVES] * 3, 4, "idle: all engines serve version 4"),
    ([SERVES, {**SERVES, "ready": False}, SERVES], 4, "idle, but 1 engine of 3 does not serve version 4: engine-1"),
    ([{**SERVES, "version": 3}] * 5 + [SERVES], 4, "idle, but 5 engines of 6 do not serve version 4: engine-0, engine-1, engine-2 and 2 more"),
    ([SERVES, {**SERVES, "lineage": 2}], 4, "idle, but 1 engine of 2 does not serve version 4: engine-1"),
    ([SERVES, {"drained": True}], 4, "idle: all engines serve version 4"),
])
def test_where_nothing_is_waited_for_it_says_what_engines_serve(engines, committed, line):
    status = pb.StatusResponse(job="a", committed_epoch=9 if committed else 0, committed_version=committed, committed_lineage=1, deciding=True,
                               agents=1, engines=[pb.StatusResponse.Engine(name=f"engine-{i}", **one) for i, one in enumerate(engines)])
    with Coordinator(status) as service:
        said = run("status", "--address", service.address)
    assert said.stdout.splitlines()[0] == line
    head = said.stdout.splitlines()[1]
    assert head.startswith("job a: version 4 committed in epoch 9 at " if committed else "job a: nothing committed yet; ")
    assert head.endswith("; 1 agent, 0 ranks")


def test_top_is_one_picture_where_there_is_no_terminal(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(3)
    groups[1].wait_version(3)
    shown = run("top", "--address", daemon.grpc)
    assert shown.returncode == 0, shown.stderr
    head, _, rest = shown.stdout.partition("idle: the engine serves version 3")
    assert head.startswith("job default: ") and "1 of 1 engines ready; 6 ranks, 1 agent" in head.replace("\n", " ")
    assert any(line.startswith("engine-a") for line in rest.splitlines())
    assert "\x1b" not in shown.stdout
    assert run("top", "--address", "127.0.0.1:1", "--timeout", "2").returncode == 64 + 29


def test_top_draws_over_itself_on_a_terminal_and_outlives_the_coordinator(daemon, groups):
    groups.append(engine(daemon))
    main, side = pty.openpty()
    # A shell's background ignores SIGINT. (Not by preexec_fn, which runs gRPC's fork handlers.)
    listens = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    top = subprocess.Popen([sys.executable, "-c", listens, WWCTL, "top", "--interval-ms", "100", "--timeout", "1", "--address",
                            daemon.grpc], stdin=side, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"})
    os.close(side)
    seen = b""
    waiting = select.poll()  # select() knows no descriptor above 1023
    waiting.register(main, select.POLLIN)

    def read_until(condition, what):
        nonlocal seen
        end = time.monotonic() + 60
        while not condition(seen):
            assert time.monotonic() < end, f"{what}: {seen[-2000:]!r}"
            if waiting.poll(100):
                with contextlib.suppress(OSError):  # of a terminal whose last program has ended
                    seen += os.read(main, 1 << 16)

    try:
        read_until(lambda s: s.count(b"\x1b[H") >= 3 and b"engine-a" in s, "it draws again and again")
        assert seen.count(b"\x1b[2J") == 1, "cleared once, drawn over after that"
        for picture in seen.split(b"\x1b[H")[1:-1]:
            assert len(picture.splitlines()) <= 24
        groups.append(trainer(daemon))
        read_until(lambda s: b"trainer/" in s or b"6 ranks" in s, "it follows")
        stand_still(daemon.pid)
        read_until(lambda s: b"NO ANSWER: " in s, "it says that the coordinator does not answer")
        seen = b""
        daemon._popen.send_signal(signal.SIGCONT)
        read_until(lambda s: b"job default" in s.split(b"NO ANSWER: ")[-1].split(b"\x1b[H")[-1], "and goes on")
        top.send_signal(signal.SIGINT)
        read_until(lambda _: top.poll() is not None, "it ends")  # (one that nobody reads may stand in a write)
        assert top.returncode == -signal.SIGINT
    finally:
        daemon._popen.send_signal(signal.SIGCONT)
        top.kill()
        top.wait(10)
        os.close(main)


@pytest.mark.parametrize("words, offered", [
    (["wwctl", "st"], {"status", "store"}), (["wwctl", "layout", ""], {"show", "diff", "lint", "--help"}),
    (["wwctl", "doctor", "--co"], {"--config"}), (["wwctl", "completion", "b"], {"bash"}),
    (["wwctl", "epochs", "--js"], {"--json"}), (["wwctl", "rollback", "--d"], {"--dry-run"}),
    (["wwctl", "--addr"], {"--address"}), (["wwctl", "plan", "--config", ""], set())])
def test_bash_completes_commands_and_options(words, offered):
    script = run("completion", "bash")
    assert script.returncode == 0
    array = " ".join(f"'{word}'" for word in words)
    asked = subprocess.run(["bash", "--norc", "-c", f'{script.stdout}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _wwctl; '
                            'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, timeout=30)
    assert asked.returncode == 0 and not asked.stderr, asked.stderr
    assert set(asked.stdout.split()) == offered


def test_completion_refuses_an_unknown_shell():
    assert run("completion", "fish").returncode == 2
    assert "bashcompinit" in run("completion", "zsh").stdout


def in_order(text: str) -> str:
    """CLI11 lists what an option needs and excludes by where it lies in memory."""
    return re.sub(r"(?<=Needs: |ludes: )--[\w-]+(?: --[\w-]+)+", lambda names: " ".join(sorted(names[0].split())), text)


def of_its_own(text: str) -> str:
    """A command's help without what every command's says; an empty list of options goes with it."""
    for same in ("  -h,--help                   Print this help message and exit\n",
                 "`wwctl --help` lists the options that every command takes: --address, -o, TLS."):
        assert text.count(same) == 1, text
        text = text.replace(same, "")
    return re.sub(r"\nOptions:\n(?! )", "", text).strip()


def test_the_reference_is_what_help_says():
    top = run("--help").stdout
    if "--address TEXT=" not in top:
        pytest.skip("another CLI11 than Debian 12's writes defaults in another form")
    parts = ["# wwctl\n\nWhat `--help` says, written by `UPDATE_DOCS=1` pytest `tests/python/test_wwctl.py`. How to use it: "
             "[operations](operations.md).\nOptions that every command takes are listed here only.\n", f"```\n{top.strip()}\n```\n"]
    for command in sorted(set(commands()) - PYTHONS, key=commands().index):
        for path in [(command,), *((command, below) for below in commands(command))]:
            parts.append(f"## wwctl {' '.join(path)}\n```\n{of_its_own(run(*path, '--help').stdout)}\n```\n")
    text = in_order("\n".join(re.sub(r"[ \t]+$", "", part, flags=re.M) for part in parts))
    if os.environ.get("UPDATE_DOCS"):
        REFERENCE.write_text(text)
    assert REFERENCE.read_text() == text, "UPDATE_DOCS=1 writes docs/wwctl.md anew"
    for command in ("status", "top", "doctor", "verify", "layout show", "completion"):
        assert f"## wwctl {command}\n" in text


def test_a_module_that_quantization_leaves_out_by_a_name_with_a_mistake_is_named_by_every_offline_command(tmp_path):
    config = json.loads((ROOT / "tests/data/transformers/qwen3-fp8.json").read_text())["config"]
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "self_atn"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def run(*args):
        return subprocess.run([BINARIES / "wwctl", *args, "--config", path], capture_output=True, text=True, timeout=60)

    for args in (["layout", "show", "--spec", "hf"], ["layout", "lint", "--spec", "hf"], ["plan", "--from", "hf", "--to", "hf"]):
        text, as_json = run(*args), run(*args, "--json")
        assert text.returncode == 0 and [line for line in text.stdout.splitlines() if "self_atn" in line and "note:" in line], text
        said = json.loads(as_json.stdout)
        assert any("self_atn" in note for note in said.get("notes", []) + said.get("warnings", [])), said
        assert "lm_head" not in text.stdout and not text.stderr and not as_json.stderr
    refused = run("layout", "lint", "--spec", "vllm:tp3")
    assert refused.returncode != 0 and "self_atn" in refused.stderr
