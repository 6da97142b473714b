"""A vLLM that only pretends: a port for EngineDriver, ranks that tell of versions, and a server in front of them."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse

from weightwire.vllm.link import Link


class _Link(Link):
    def die(self):
        """As with its process: nothing is said."""
        self._closed.set()
        self._channel.close()


class Rank:
    """What a worker tells: its weights are those of `holds`; `fails` makes the next calls of a step fail."""

    def __init__(self, number, size, settings, engine, **more):
        self.number, self.engine, self.install = number, engine, settings["install"]
        self.calls, self.holds, self.broken, self.failure, self.open = 0, None, None, None, False
        self.changed = threading.Condition()
        self.link = _Link(settings["link"], settings["link_key"], self.answer, 5)
        self.link.send({"rank": number, "hello": {"world_size": size, "mode": "fused", "notes": [], "rows": 1, "bytes": 1,
                                                  "interrupted": False, **more}})

    def offer(self, epoch):
        self.link.send({"offer": {"epoch": epoch, "version": epoch, "leader": self.number == 0}})

    def want_room(self, epoch):
        self.link.send({"room": {"epoch": epoch, "version": epoch}})

    def answer(self, do, message):
        self.engine.log.append(do)
        if do == "prepare" and self.engine.fault("prepare", self.number):
            raise RuntimeError("injected")
        if do == "make_room":
            assert self.engine.paused or self.install == "device-stage", "requests run on a stage that is given up"
            if self.engine.fault("make_room", self.number):
                raise RuntimeError("the epoch has ended")
            self.engine.emptied.append((self.number, message["epoch"]))
        with self.changed:
            if do == "await" and not self.changed.wait_for(lambda: self.calls > message["calls"][self.number], 5):
                raise TimeoutError("not reached")
        return {"serving": None if self.broken else self.holds, "broken": self.broken, "failure": self.failure,
                "calls": self.calls, "open": self.open}

    def call(self, steps, epoch=None):
        """One call of vLLM; without sessions it is the whole of an update."""
        with self.changed:
            for step in steps:
                self.do(step, epoch)
            self.calls += 1
            self.changed.notify_all()

    def do(self, step, epoch):
        if step == "start":
            self.failure, self.open = None, True
        if self.failure is None and self.engine.fault(step, self.number):
            self.failure = f"{step}: injected"
        if step == "update" and self.failure is None:
            self.pending = epoch
        if step == "update":
            self.broken = "half"
        if step == "finish":
            self.open = False
            if self.failure is None and not self.engine.fault("silent", self.number):
                self.holds, self.broken = self.pending, None

    def lose(self):
        """Its parameters: somebody who verifies has found that."""
        self.holds = None
        self.link.send({"lost": {"epoch": self.engine.installed, "why": f"rank {self.number}: 1 parameter"}})


class Engine:
    """A port, and the ranks behind it."""

    needs_thread = False
    look_seconds = 0.0

    def __init__(self, size=2, sessions=True):
        self.sleeps, self.running, self.requests = False, 0, threading.Condition()
        self.served = None
        self.sessions, self.active, self.installed = sessions, False, None
        self.size, self.log, self.faults, self.paused, self.version = size, [], {}, False, None
        self.ranks, self.emptied = [], []
        self.reached = lambda settings: settings  # the way to the driver

    def restart(self, says_goodbye=True):
        """Its processes end, or are killed. It serves what it was started with, when somebody initialises it again."""
        for rank in self.ranks:
            rank.link.close() if says_goodbye else rank.link.die()
        self.ranks, self.active, self.paused, self.served, self.version, self.faults = [], False, False, None, None, {}

    def fault(self, step, rank):
        left = self.faults.get((step, rank), 0)
        self.faults[step, rank] = left - 1
        return left > 0

    def serves(self):
        return {None if rank.broken else rank.holds for rank in self.ranks}

    def replicas(self, timeout):
        return None

    def init(self, settings, timeout):
        more = {} if self.sessions else {"sessions": False}
        settings = self.reached(settings)
        self.ranks = [Rank(number, self.size, settings, self, **more) for number in range(self.size)]

    def pause(self, mode, timeout):
        self.log.append(f"pause {mode}")
        with self.requests:
            if mode == "wait":
                assert self.requests.wait_for(lambda: not self.running, timeout)
            self.running = 0
            self.requests.notify_all()
        self.paused = True

    def end_requests(self):
        with self.requests:
            self.running = 0
            self.requests.notify_all()

    def start(self, draft, timeout, direct=False):
        assert not any(rank.open for rank in self.ranks) and not self.active, "already active"
        assert direct != self.sessions
        self.log.append("start")
        self.active = True
        if self.sessions:
            self.on_ranks("start")

    def update(self, ticket, timeout):
        assert self.active
        self.log.append("update")
        if not self.sessions:
            for rank in self.ranks:
                rank.failure = None
        self.on_ranks("update", ticket["epoch"], ("update",) if self.sessions else ("start", "update", "finish"))

    def finish(self, timeout):
        assert self.active, "without a matching start"
        self.log.append("finish")
        self.active = False
        if self.sessions:
            self.on_ranks("finish")

    def on_ranks(self, step, epoch=None, calls=None):
        """As vLLM after a failure: it returns although the last rank has not done it yet."""
        assert self.paused, f"{step} while requests run"
        for rank in self.ranks[:-1]:
            rank.call(calls or (step,), epoch)
        threading.Timer(0.05, self.ranks[-1].call, (calls or (step,), epoch)).start()

    def set_version(self, version, timeout):
        self.log.append(f"version {version}")

    def reset_prefix_cache(self, running, timeout):
        self.log.append("reset")
        return not self.fault("reset", 0)

    def resume(self, timeout):
        assert len(self.serves()) == 1, "ranks of different versions would answer"
        self.log.append("resume")
        self.paused = False

    def asleep(self, timeout):
        return bool(self.sleeps) or self.paused

    def sleep(self):
        """As level 2: its ranks hold nothing of any version."""
        self.sleeps, self.paused = {"weights", "kv_cache"}, True
        for rank in self.ranks:
            rank.holds = None

    def wake_up(self, tag, timeout):
        self.log.append(f"wake {tag}")
        self.sleeps -= {tag}
        if not self.sleeps:
            assert self.served == self.serves() or self.served is None, "requests see what lay there"
            self.paused = False

    def generate(self, prompt, max_tokens, timeout):
        return [1] * max_tokens

    def offer(self, epoch):
        for rank in self.ranks:
            rank.offer(epoch)


class Server:
    """`vllm serve` in dev mode before an Engine, on a port that stays its own while it is away."""

    def __init__(self, engine, port=0):
        self.engine = engine
        handler = type("Handler", (_Handler,), {"server_": self})
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def close(self):
        self._http.shutdown()
        self._http.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server_: Server

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        self.answer({"/health": {}, "/is_sleeping": {"is_sleeping": self.server_.engine.asleep(1)}}.get(path))

    def do_POST(self):
        url = urllib.parse.urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query, engine = dict(urllib.parse.parse_qsl(url.query)), self.server_.engine
        calls = {
            "/init_weight_transfer_engine": lambda: engine.init(body["init_info"], 5),
            "/pause": lambda: engine.pause(query["mode"], 5),
            "/start_weight_update": lambda: engine.start(False, 5),
            "/update_weights": lambda: engine.update(body["update_info"], 5),
            "/finish_weight_update": lambda: engine.finish(5),
            "/update_weight_version": lambda: engine.set_version(body["new_version"], 5),
            "/reset_prefix_cache": lambda: {"success": engine.reset_prefix_cache(False, 5)},
            "/resume": lambda: engine.resume(5)}
        call = calls.get(url.path)
        self.answer(call and (call() or {}))

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
