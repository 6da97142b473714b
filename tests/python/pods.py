"""Rendered pods as processes of this machine, as close to a kubelet as is cheap: each pod has its own network and IPC
namespace on one bridge; each container its own root of read-only binds, the pod's volumes, the user, no capability and
no new privileges, as its spec says. Not modelled: images, cgroups, seccomp, NetworkPolicy. Needs root.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from conftest import BINARIES, ROOT

_IMAGE = "/opt/weightwire"  # where an image would have weightwired
_PYTHON = os.path.realpath(sys.prefix)
#: What an image of the application would hold: Python with its packages, and the client.
_SOFTWARE = [_PYTHON, sys.base_prefix, str(ROOT / "client/python")]
_ROOT_SCRIPT = """
root=$1 image=$2 hosts=$3 mode=$4; shift 4
bind() { mkdir -p "$root$2"; mount --bind "$1" "$root$2"; [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"; }
if [ "$image" != "" ]; then mount --bind "$image" "$root"; else
  mount -t tmpfs -o mode=755 none "$root"
  bind /usr /usr ro; for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/$link"; done
  mkdir "$root/etc"; cp /etc/ld.so.cache "$root/etc/"
fi
mkdir -p "$root/proc" "$root/etc" "$root/dev" "$root/tmp"; chmod 1777 "$root/tmp"; mount --rbind /proc "$root/proc"
for device in null zero urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
touch "$root/etc/hosts"; mount --bind "$hosts" "$root/etc/hosts"
while [ "$1" != -- ]; do bind "$1" "$2" "$3"; shift 3; done
shift
[ "$mode" = rw ] || mount -o remount,bind,ro "$root"
exec /usr/sbin/chroot "$root" "$@"
"""


def possible() -> str:
    """Empty, or why this machine cannot run pods."""
    missing = [tool for tool in ("ip", "nsenter", "unshare", "setpriv", "chroot") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        return f"needs root and {', '.join(missing) or 'nothing else'}"
    tried = subprocess.run(["unshare", "--net", "--ipc", "--mount", "sh", "-ec", "ip link add name br0 type bridge; mount -t tmpfs none /mnt"],
                           capture_output=True, text=True, timeout=30)
    return tried.stderr.strip()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Namespace:
    """A process that holds namespaces open, and ends with this one."""

    def __init__(self, *kinds: str):
        self._popen = subprocess.Popen(["unshare", *kinds, "setpriv", "--pdeathsig", "KILL", "sh", "-c",
                                        "echo ready; exec sleep infinity"], stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout.readline() == "ready\n"
        self.pid = str(self._popen.pid)

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", "-t", self.pid, "--net", "--ipc", *command]

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._popen.stdout.close()


class Container:
    """One container of a pod; `start` again after its end is what a kubelet does."""

    def __init__(self, pod: "Pod", spec: dict):
        self.pod, self.spec = pod, spec
        self.log = pod.directory / f"{spec['name']}.log"
        self._popen = None

    def start(self) -> None:
        context = {**self.pod.spec["securityContext"], **self.spec["securityContext"]}
        assert context["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]} and not context["allowPrivilegeEscalation"]
        image = self.pod.cluster.image if self.spec["image"].startswith("weightwire:") else ""
        binds = [] if image else [str(BINARIES), _IMAGE, "ro", *(word for path in _SOFTWARE for word in (path, path, "ro"))]
        for mount in self.spec["volumeMounts"]:
            binds += [str(self.pod.volume(mount["name"])), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"]
        self.environment = {"PATH": f"{_IMAGE}:{_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin", "HOSTNAME": self.pod.name,
                            "PYTHONPATH": str(ROOT / "client/python")}
        for entry in self.spec.get("env", []):
            self.environment[entry["name"]] = entry.get("value") or self.pod.field(entry["valueFrom"]["fieldRef"]["fieldPath"])
        user, group = (str(context[key]) for key in ("runAsUser", "runAsGroup"))
        self._as_user = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs", "--bounding-set=-all",
                         "--inh-caps=-all", "--pdeathsig", "KILL"]
        private = [*self._as_user, *self.spec["command"], *self.spec.get("args", [])]
        root = self.pod.directory / f"{self.spec['name']}.root"
        root.mkdir(exist_ok=True)
        mode = "ro" if context.get("readOnlyRootFilesystem") else "rw"
        with open(self.log, "a") as log:
            self._popen = subprocess.Popen(
                self.pod.namespace.enter("unshare", "--mount", "--propagation", "private", "sh", "-euc", _ROOT_SCRIPT, "root",
                                         str(root), image, str(self.pod.cluster.hosts), mode, *binds, "--", *private),
                env=self.environment, stdout=log, stderr=log)

    def await_probe(self, name: str, seconds: float = 60) -> None:
        probe = self.spec[name]["httpGet"]
        port = next(port["containerPort"] for port in self.spec["ports"] if port["name"] == probe["port"])
        self.await_page(port, probe["path"], seconds, probe.get("scheme", "HTTP"))

    def await_page(self, port: int, path: str, seconds: float = 60, scheme: str = "HTTP") -> None:
        """From another host's view: at the pod's address, and without a look at its certificate, as a kubelet does."""
        url = f"{scheme.lower()}://{self.pod.address}:{port}{path}"
        ask = f"import ssl, urllib.request as u; u.urlopen('{url}', timeout=5, context=ssl._create_unverified_context())"
        end = time.monotonic() + seconds
        while True:
            done = subprocess.run(self.pod.cluster.switch.enter(sys.executable, "-c", ask), capture_output=True, text=True)
            if done.returncode == 0:
                return
            why = done.stderr.strip().splitlines()[-1:]
            assert self._popen.poll() is None and time.monotonic() < end, f"{self.pod.name} {path} (exit {self._popen.poll()}): {why}\n{self.log.read_text()}"
            time.sleep(0.2)

    def run_pre_stop(self) -> subprocess.CompletedProcess | None:
        """The hook as it ended, in the container's namespaces and with its environment; None where there is none."""
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook is None:
            return None
        grace = self.pod.spec.get("terminationGracePeriodSeconds", 30)
        enter = ["nsenter", "-t", str(self.pid), "--net", "--ipc", "--mount", "--root"]
        return subprocess.run([*enter, *self._as_user, *hook["exec"]["command"]], env=self.environment, capture_output=True,
                              text=True, timeout=grace)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait(30)

    def terminate(self) -> int:
        self._popen.terminate()
        return self._popen.wait(30)


class Pod:
    def __init__(self, cluster: "Cluster", name: str, template: dict, claims: dict[str, dict]):
        self.cluster, self.name, self.spec = cluster, name, template["spec"]
        self.directory = cluster.directory / name
        self.directory.mkdir()
        self._claims = claims
        self.namespace = Namespace("--net", "--ipc")
        self.address = cluster.connect(self.namespace)
        containers = self.spec.get("initContainers", []) + self.spec["containers"]
        self.containers = {spec["name"]: Container(self, spec) for spec in containers}

    def field(self, path: str) -> str:
        return {"metadata.name": self.name, "status.podIP": self.address}[path]

    def volume(self, name: str) -> pathlib.Path:
        """The volume's directory here, made as a kubelet makes it: root's, and the fsGroup's."""
        source = next((v for v in self.spec.get("volumes", []) if v["name"] == name), None)
        if source and "persistentVolumeClaim" in source:
            return self.cluster.claims[source["persistentVolumeClaim"]["claimName"]]
        path = self.directory / f"volume-{name}"
        if path.exists():
            return path
        path.mkdir()
        if source and "configMap" in source:
            data = self.cluster.find("ConfigMap", source["configMap"]["name"])["data"]
            for item in source["configMap"]["items"]:
                (path / item["path"]).write_text(data[item["key"]])
        elif source and "secret" in source:
            for file in self.cluster.secrets[source["secret"]["secretName"]].iterdir():
                copy = path / file.name
                copy.write_bytes(file.read_bytes())
                os.chown(copy, 0, self.spec["securityContext"]["fsGroup"])
                copy.chmod(source["secret"]["defaultMode"])
        else:
            assert name in self._claims or "emptyDir" in source, name
        os.chown(path, 0, self.spec["securityContext"]["fsGroup"])
        path.chmod(0o2775 if name in self._claims else 0o2777)
        return path

    def assert_confined(self) -> None:
        """Every running container is what its spec says, by what the kernel says."""
        for container in self.containers.values():
            status, mounts = (pathlib.Path(f"/proc/{container.pid}/{file}").read_text() for file in ("status", "mounts"))
            fields = dict(line.split(":\t", 1) for line in status.splitlines())
            assert fields["Uid"].split() == [str(self.spec["securityContext"]["runAsUser"])] * 4
            assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0 and fields["NoNewPrivs"] == "1"
            options = next(line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/")
            assert ("ro" in options.split(",")) == bool(container.spec["securityContext"].get("readOnlyRootFilesystem"))

    def start(self) -> None:
        """Sidecars first; the application once their startup probes answer."""
        for container in self.containers.values():
            container.start()
            if "startupProbe" in container.spec:
                container.await_probe("startupProbe")

    def stop(self) -> dict[str, subprocess.CompletedProcess]:
        """What a kubelet does to a pod that is deleted: all preStop hooks at once; SIGTERM to each application when its own
        has ended, to the sidecars when no application is left. The hooks, by container."""
        sidecars = [spec["name"] for spec in self.spec.get("initContainers", [])]
        applications = [spec["name"] for spec in self.spec["containers"]]
        with ThreadPoolExecutor(len(self.containers)) as pool:
            hooks = {name: pool.submit(container.run_pre_stop) for name, container in self.containers.items()}
            for name in applications:
                hooks[name].result()
                self.containers[name].terminate()
            for name in reversed(sidecars):
                hooks[name].result()
                assert self.containers[name].terminate() == 0, self.containers[name].log.read_text()
        return {name: hook.result() for name, hook in hooks.items() if hook.result()}

    def close(self) -> None:
        for container in self.containers.values():
            container.kill()
        self.namespace.close()


class Cluster:
    """Pods of all rendered workloads, on one bridge in a namespace of its own. `claims`: volumes by claim; `secrets`: folders
    of files. `image`: the root of weightwire's image; without one its containers see this machine's /usr and what was built
    here."""

    def __init__(self, manifests: list[dict], directory: pathlib.Path, claims: dict[str, pathlib.Path],
                 secrets: dict[str, pathlib.Path], image: str = ""):
        self.manifests, self.directory, self.claims, self.image = manifests, directory, claims, image
        self.secrets = secrets
        self._numbers = itertools.count(2)
        self.pods: dict[str, Pod] = {}
        self.switch = Namespace("--net", "--ipc")
        run(*self.switch.enter("sh", "-ec", "ip link set lo up; ip link add name br0 type bridge; ip link set br0 up;"
                                            "ip addr add 10.77.0.1/24 dev br0"))
        for item in manifests:
            if item["kind"] not in ("StatefulSet", "Deployment"):
                continue
            claims_of = {claim["metadata"]["name"]: claim for claim in item["spec"].get("volumeClaimTemplates", [])}
            for number in range(item["spec"]["replicas"]):
                name = f"{item['metadata']['name']}-{number}"
                self.pods[name] = Pod(self, name, item["spec"]["template"], claims_of)
        self.hosts = directory / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(self._service_lines()))

    def _service_lines(self):
        """What DNS would answer for Services; here each has one pod."""
        for item in self.manifests:
            if item["kind"] != "Service":
                continue
            spec, meta = item["spec"], item["metadata"]
            for workload in self.manifests:
                template = workload.get("spec", {}).get("template", {})
                if template and spec["selector"].items() <= template["metadata"]["labels"].items():
                    address = self.pods[f"{workload['metadata']['name']}-0"].address
                    yield f"{address} {meta['name']}.{meta['namespace']}.svc\n"

    def connect(self, namespace: Namespace) -> str:
        number = next(self._numbers)
        address = f"10.77.0.{number}"
        run(*self.switch.enter("sh", "-ec", f"ip link add name port{number} type veth peer name eth0 netns {namespace.pid};"
                                            f"ip link set port{number} master br0 up"))
        run(*namespace.enter("sh", "-ec", f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up"))
        return address

    def find(self, kind: str, name: str) -> dict:
        return next(item for item in self.manifests if (item["kind"], item["metadata"]["name"]) == (kind, name))

    def close(self) -> None:
        for pod in self.pods.values():
            pod.close()
        self.switch.close()
