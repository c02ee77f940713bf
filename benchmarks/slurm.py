"""Against Slurm, where Debian's slurm-wlm is installed: a slot taken and given back, and `salloc true`.

Slurm runs on this machine for the time of the benchmark, with one node and a folder of its own, tuned for answers
rather than for throughput: the plain scheduler, run at every submission, no accounting, no prolog, its state in
memory. Nothing of a Slurm that is in use here is touched. `salloc` is a process of its own for each cycle, as a
shell has it; so the slot is measured in a client that is connected, and its time for two bare calls stands beside
it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.cycles import ROOMY
from benchmarks.figures import Figure, middle, ratios, say, size, verdict
from benchmarks.live import Bare, live, quantile

ROUNDS, CYCLES = 5, 40
PROGRAMS = ("slurmctld", "slurmd", "salloc", "sinfo", "munged")
_START_S = 30.0

SLURM_CONF = """
ClusterName=benchmark
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={state}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldDebug=error
SlurmdDebug=error
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=1
MinJobAge=10
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing(path: str | None = None) -> list[str]:
    """Programs that are not installed; `path`: where to look, else PATH and where daemons are."""
    where = path if path is not None else f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=where) is None]


def _free_ports(count: int) -> list[int]:
    """Of this machine, at this moment."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            each = stack.enter_context(socket.socket())
            each.bind(("127.0.0.1", 0))
            found.append(int(each.getsockname()[1]))
    return found


@contextlib.contextmanager
def slurm() -> Iterator[Mapping[str, str]]:
    """One that is up, and the environment that its commands need."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-slurm-")))
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-slurm-", dir=memory))
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        config = SLURM_CONF.format(
            host=socket.gethostname().partition(".")[0],
            ports=_free_ports(2),
            folder=folder,
            state=state,
            user=getpass.getuser(),
            cpus=os.cpu_count(),
        )
        (folder / "slurm.conf").write_text(config)
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        munge = [
            *("munged", "--foreground", "--force", f"--socket={folder}/munge.socket"),
            *(f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid"),
            *(f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
        ]
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemon = subprocess.Popen(
                command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            if command is munge:
                _until((folder / "munge.socket").exists, folder)
        _until(lambda: _idle(env), folder)
        yield env


def _idle(env: Mapping[str, str]) -> bool:
    said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
    return said.stdout.strip() == "idle"


def _until(true: Callable[[], bool], folder: Path) -> None:
    ends_at = time.monotonic() + _START_S
    while not true():
        if time.monotonic() > ends_at:
            logs = [file.read_text(errors="replace")[-300:] for file in sorted(folder.glob("*.log"))]
            raise RuntimeError(f"Slurm does not start: {' '.join(' '.join(logs).split())[-600:]}")
        time.sleep(0.1)


def sallocs(env: Mapping[str, str], count: int) -> list[float]:
    """Seconds of each."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        subprocess.run(["salloc", "-Q", "-n1", "true"], env=env, check=True, stderr=subprocess.DEVNULL)
        found.append(time.perf_counter() - begun)
    return found


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    if lacking := missing():
        say(f"slurm: not measured, slurm-wlm is not installed here (no {', '.join(lacking)})")
        return
    count, salloc_s, slot_s, bare_s = size(CYCLES, 3), [], [], []
    with live(ROOMY) as bench, slurm() as env:
        bare = Bare()

        def slots() -> list[float]:
            found = []
            for _ in range(count):
                begun = time.perf_counter()
                bench.client.submit("loops", pool_resources={"seat": 1}).wait().release()
                found.append(time.perf_counter() - begun)
            return found

        slots(), sallocs(env, 2)
        for _ in range(ROUNDS):
            salloc_s.append(quantile(sallocs(env, count), 0.5))
            slot_s.append(quantile(slots(), 0.5))
            bare_s.append(2 * bare.p50(count))
        bare.close()
    for name, values in (("salloc true", salloc_s), ("two bare calls", bare_s), ("a slot", slot_s)):
        value, spread = middle(values)
        ratio, target, met = ratios(values, salloc_s), "", None
        if name == "a slot":
            target, met = "less than salloc true", verdict(ratio < 1)
        yield Figure(f"slurm: cycle of {name}, p50", value * 1e3, "ms", ratio, target, met, spread)
