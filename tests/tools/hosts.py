"""Hosts that are namespaces of this machine: each has a name, an address, a network and a /dev/shm of its own; all see the same files.

    hosts.enter()               # the script starts itself anew in namespaces, or ends as skipped, with the reason
    with hosts.Hosts(2) as of:
        subprocess.run(of.on(1, ["hostname"]))

All processes are in one process namespace, which ends with the script, however that ends: nothing stays behind.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

INSIDE = "TESSERA_TEST_HOSTS"
# What a host is, until its standard input ends.
HOST = """
mount -t tmpfs tmpfs /dev/shm && hostname "$0" && ip link set lo up && echo ready && exec cat
"""
SKIPPED = 77


def enter():
    """Returns inside of the namespaces."""
    if os.environ.get(INSIDE):
        return
    unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        tried = subprocess.run([*unshare, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
        reason = tried.stderr.strip().splitlines()[-1] if tried.returncode else ""
    except FileNotFoundError as missing:
        reason = f"there is no {missing.filename}"
    if reason:
        print(f"skipped: no network namespace can be made here ({reason}); root can, with util-linux and iproute2")
        sys.exit(SKIPPED)
    os.execvpe(unshare[0], [*unshare, sys.executable, *sys.argv], os.environ | {INSIDE: "1"})


class Hosts:
    """n1, n2, ...; this script itself is on a host of its own, n0, which reaches them all."""

    def __init__(self, count):
        self.names = [f"n{k}" for k in range(1, count + 1)]
        self.folder = tempfile.TemporaryDirectory(prefix="hosts-")
        self.processes = []

    def __enter__(self):
        folder = pathlib.Path(self.folder.name)
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{k} n{k}\n" for k in (254, *range(1, len(self.names) + 1))).replace("n254", "n0"))
        run("mount", "--make-rprivate", "/")
        run("mount", "--bind", names, "/etc/hosts")
        (folder / "resolv.conf").write_text("")  # nobody is asked, where a network that isn't there would be waited for
        run("mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf")
        run("hostname", "n0")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "addr", "add", "10.77.0.254/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        for k, name in enumerate(self.names, 1):
            host = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", HOST, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(host)
            if host.stdout.readline() != "ready\n":
                raise RuntimeError(f"host {name} can't be made")
            run("ip", "link", "add", f"v{k}", "type", "veth", "peer", "name", "eth0", "netns", host.pid)
            run("ip", "link", "set", f"v{k}", "master", "br0", "up")
            run(*self.on(k, ["ip", "addr", "add", f"10.77.0.{k}/24", "dev", "eth0"]))
            run(*self.on(k, ["ip", "link", "set", "eth0", "up"]))
            (folder / f"{name}.pid").write_text(str(host.pid))
        # What stands in for ssh: agent [-OPTION...] HOST COMMAND...
        self.agent = folder / "agent"
        self.agent.write_text(f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\nexec nsenter -t "$(cat {folder}/$host.pid)" -n -u -m sh -c "cd {os.getcwd()}; $*"\n')
        self.agent.chmod(0o755)
        return self

    def on(self, host, command, shm="own"):
        """The command that runs `command` on host 1, 2, ..., in this folder. `shm`: with a /dev/shm of its own, or that of n0."""
        mounts = {"own": ["-m"], "shared": []}[shm]
        return ["nsenter", "-t", str(self.processes[host - 1].pid), "-n", "-u", *mounts, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *map(str, command)]

    def segments(self, host):
        """What is left of ours in a host's /dev/shm."""
        names = subprocess.run(self.on(host, ["ls", "/dev/shm"]), check=True, capture_output=True, text=True).stdout.split()
        return [name for name in names if name.startswith("tessera-")]

    def __exit__(self, *_):
        for host in self.processes:
            host.stdin.close()
            host.wait()
        self.folder.cleanup()


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


SLURM = """ClusterName=tessera
SlurmctldHost=n0
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller on n0, and a daemon on each of the hosts. Its `environment` is what srun needs."""

    def __init__(self, of):
        self.hosts = of
        self.folder = tempfile.TemporaryDirectory(prefix="slurm-")
        self.daemons = []

    @staticmethod
    def missing():
        """Why there can be none, or None."""
        found = dict(os.environ)["PATH"] + ":/usr/sbin:/sbin"
        return next((f"there is no {name} (Debian: slurmctld, slurmd, slurm-client)" for name in ("slurmctld", "slurmd", "srun")
                     if not any(os.access(pathlib.Path(folder) / name, os.X_OK) for folder in found.split(":"))), None)

    def __enter__(self):
        folder = pathlib.Path(self.folder.name)
        config = folder / "slurm.conf"
        config.write_text(SLURM.format(folder=folder, nodes=",".join(self.hosts.names)))
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")  # /tmp is that of all hosts here
        (folder / "state").mkdir()
        for name in self.hosts.names:
            (folder / f"spool-{name}").mkdir()
        self.environment = os.environ | {"SLURM_CONF": str(config), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        self.start(["slurmctld", "-D", "-f", config])
        for k, name in enumerate(self.hosts.names, 1):
            self.start(self.hosts.on(k, ["slurmd", "-D", "-f", config, "-N", name]))
        for _ in range(300):
            states = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=self.environment, capture_output=True, text=True).stdout.split()
            if states == ["idle", str(len(self.hosts.names))]:
                return self
            time.sleep(0.1)
        raise RuntimeError(f"Slurm does not come up: {states}; " + (folder / "slurmctld.log").read_text()[-2000:])

    def start(self, command):
        self.daemons.append(subprocess.Popen(list(map(str, command)), env=self.environment, stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()
        self.folder.cleanup()
