"""deploy/ for machines without Kubernetes: systemd units and the compose file start weightwired as it can be started."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from conftest import BINARIES, ROOT
from test_drain import job  # noqa: F401, a fixture

SYSTEMD = ROOT / "deploy/systemd"
UNITS = {"weightwired-coordinator.service": "weightwired-coordinator.service",
         "weightwired-agent@.service": "weightwired-agent@root.service"}


def weightwired(arguments, environment):
    done = subprocess.run([BINARIES / "weightwired", "--print-config", *arguments], env=environment, capture_output=True,
                          text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return yaml.load(done.stdout, yaml.BaseLoader)


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_the_unit_and_finds_it_confined(unit, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd here")
    text = (SYSTEMD / unit).read_text()
    assert "/usr/bin/weightwired" in text
    path = tmp_path / UNITS[unit]
    path.write_text(text.replace("/usr/bin/w", f"{BINARIES}/w"))
    for check in (["verify"], ["security", "--offline=true", "--threshold=30"]):
        done = subprocess.run(["systemd-analyze", *check, str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "Unknown" not in done.stderr, done.stdout + done.stderr


def environment_of(file):
    """An EnvironmentFile's, as systemd reads it."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and not line.startswith("#"))


@pytest.mark.parametrize("unit", UNITS)
def test_weightwired_takes_what_the_unit_passes(unit):
    text = (SYSTEMD / unit).read_text()
    command = re.search(r"^ExecStart=/usr/bin/weightwired (.*)$", text, re.M)[1].replace("%H-%i", "node1-alice")
    environment = {key: value for file in re.findall(r"^EnvironmentFile=/etc/weightwire/(.*)$", text, re.M)
                   for key, value in environment_of(SYSTEMD / file).items()}
    directories = {"${STATE_DIRECTORY}": "/var/lib/weightwire", "${RUNTIME_DIRECTORY}": "/run/weightwire-alice",
                   "/etc/weightwire": str(SYSTEMD)}
    for name, path in directories.items():
        command = command.replace(name, path)
    settings = weightwired(command.split(), environment)
    assert (settings["role"], settings["job"]) == ("coordinator" if "coordinator" in unit else "agent", "rl")
    if settings["role"] == "coordinator":
        assert settings["state_dir"] == "/var/lib/weightwire" and "StateDirectoryMode=0700" in text
    else:
        assert settings["agent_socket"] == "/run/weightwire-alice/agent.sock" and "RuntimeDirectoryMode=0700" in text
        assert settings["coordinator"].endswith(":7411") and settings["data_listen"].endswith(":7413")
        assert settings["name"] == "node1-alice", "its ExecStop= drains it by this name"


def stop_hook(name, coordinator, main_pid):
    """The agent unit's ExecStop= as systemd runs it for an agent of that name; `main_pid` is empty when it has died."""
    text = (SYSTEMD / "weightwired-agent@.service").read_text()
    failure_ignored, command = re.search(r"^ExecStop=(-?)(.*)$", text, re.M).groups()
    assert failure_ignored, "a trainer's agent cannot be drained, and its unit has not failed for that"
    waits, limit = int(re.search(r"--wait (\d+)", command)[1]), int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])
    assert waits < limit
    for written, meant in (("%H-%i", name), ("/usr/bin/", f"{BINARIES}/"), ("$$", "$")):
        command = command.replace(written, meant)
    environment = {"PATH": "/usr/bin:/bin", "WEIGHTWIRE_COORDINATOR": coordinator, **({"MAINPID": main_pid} if main_pid else {})}
    return subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, timeout=limit)


def test_an_agent_that_is_stopped_is_drained_first_and_one_that_died_is_not(job):  # noqa: F811
    drained = lambda: [engine.name for engine in job.status().engines if engine.drained]
    died = stop_hook("pod-1", job.address, "")
    assert (died.returncode, died.stdout, drained()) == (0, "", [])
    trainer = stop_hook("pod-trainer", job.address, "4711")
    assert trainer.returncode != 0 and "a rank of the trainer" in trainer.stderr
    stopped = stop_hook("pod-1", job.address, "4711")
    assert stopped.returncode == 0 and "pod-1 is drained; safe to stop (engine-1)" in stopped.stdout, stopped.stderr
    assert drained() == ["engine-1"]
    job.release_next(waiting=False)
    assert list(job.newest_publish().engines) == ["engine-0", "engine-2"]


def test_the_compose_file_starts_a_coordinator_and_agents_that_know_it():
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    settings = {}
    for name, service in compose["services"].items():
        assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").exists()
        assert {volume.split(":")[0] for volume in service["volumes"]} <= compose["volumes"].keys()
        assert service["entrypoint"][0] == "weightwired"
        settings[name] = weightwired(service["entrypoint"][1:], service.get("environment", {}))
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    assert settings.keys() == {"coordinator", "trainer", "engine"}
    for name in ("trainer", "engine"):
        assert settings[name]["coordinator"] == "coordinator:" + settings["coordinator"]["listen"].split(":")[1]
        assert (settings[name]["job"], settings[name]["advertise_host"]) == (settings["coordinator"]["job"], name)
        assert settings[name]["agent_socket"].startswith("/run/weightwire/agent/")
    # What leaves the machine's own network is nothing.
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["coordinator"]["ports"])
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert {target for entry in scraped for target in entry["targets"]} == {f"{name}:7412" for name in settings}
