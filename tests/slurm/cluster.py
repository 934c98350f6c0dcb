"""A real Slurm of two nodes on this host, for the tests: munged, slurmctld and a slurmd
for each of n1 and n2.

Invariant: all that it writes lies in one folder of its own, its ports are free ones, no
service of the host is touched, and every process that it started is ended by its id.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from megatron_2bw.base.processes import free_port, stop_tree

PACKAGES = "slurm-wlm munge"
NODES = ("n1", "n2")
SBIN = "/usr/sbin:/sbin"  # where Debian has the daemons; not in everybody's PATH

# Slurm waits some minutes where a test cannot: a requeued job for its old credential, a
# node for its registration.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=200000
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=60
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
PartitionName=named Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Cluster:
    """`with Cluster(folder) as cluster:`, then `cluster.call("sbatch", ...)`.
    AssertionError if it does not start."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                stop_tree(daemon)
                daemon.wait()
        # a slurmstepd is no child of its slurmd any more
        for process in self._strays():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def call(self, *words: object, cwd: Path | None = None, **environment: str) -> str:
        """What a command of Slurm prints. AssertionError with its stderr if it
        fails."""
        done = self.try_call(*words, cwd=cwd, **environment)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def try_call(
        self, *words: object, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            cwd=cwd,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        text = ""
        for path in sorted(self.folder.glob("*.log")):
            text += f"--- {path.name}\n{path.read_text()[-2000:]}\n"
        return text

    def _start(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        host = os.uname().nodename
        nodes = ""
        for name in NODES:
            address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            nodes += f"NodeName={name} {address} CPUs=2\n"
        configuration = CONFIGURATION.format(
            host=host.split(".")[0],
            port=free_port(),
            user=getpass.getuser(),
            folder=self.folder,
            nodes=nodes,
        )
        (self.folder / "slurm.conf").write_text(configuration)
        words = f"""--foreground --force --key-file={key}
            --socket={self.folder}/munge.socket --pid-file={self.folder}/munged.pid
            --log-file={self.folder}/munged.log --seed-file={self.folder}/munge.seed"""
        self._daemon("munged", *words.split())
        self._await("munged", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        self._await("idle nodes", lambda: self._states() == {"idle"})

    def _daemon(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "a") as out:
            daemon = subprocess.Popen(
                [find(name), *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.daemons.append(daemon)

    def _states(self) -> set[str]:
        done = self.try_call("sinfo", "--noheader", "--Node", "--format=%T")
        return set(done.stdout.split())

    def _await(self, what: str, ready) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            ended = [each.args[0] for each in self.daemons if each.poll() is not None]
            assert not ended and time.monotonic() < deadline, (
                f"no {what}; ended: {ended}\n{self.logs()}"
            )
            time.sleep(0.2)

    def _strays(self) -> list[psutil.Process]:
        """What the daemons have left: what runs with this cluster's configuration, and
        who writes to its folder."""
        configuration = str(self.folder / "slurm.conf")
        strays = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = process.environ().get("SLURM_CONF") == configuration
                for file in process.open_files():
                    mine |= Path(file.path).is_relative_to(self.folder)
                if mine and process.pid != os.getpid():
                    strays.append(process)
        return strays


def missing() -> str:
    """What to install, in one line; empty if all is there."""
    for name in ("sbatch", "slurmctld", "slurmd", "munged"):
        if not find(name):
            return f"{name} is not installed: apt-get install {PACKAGES}"
    return ""


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
