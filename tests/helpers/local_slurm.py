"""A real Slurm on this machine, in a folder of its own, for tests and to try a sweep on.

    apt-get install --no-install-recommends slurmctld slurmd slurm-client munge    # Debian, Ubuntu
    python -m tests.helpers.local_slurm start DIR --cpus 4 --nodes 2
    source DIR/env.sh; sinfo                                                       # sbatch, or hydra/launcher=slurm
    python -m tests.helpers.local_slurm stop DIR

Nodes are pretended: daemons on ports of their own, with as many CPUs as --cpus says.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool.%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory} State=UNKNOWN"
)
# without a database there is no sacct; launchers that poll it are answered from the controller's memory
SACCT = """\
#!/bin/sh
echo 'JobID|State|NodeList'
while [ $# -gt 0 ]; do
    if [ "$1" = -j ]; then shift; scontrol show job -o "$1" 2>/dev/null; fi
    shift
done | awk '{
    split("", v)
    for (i = 1; i <= NF; i++) { at = index($i, "="); v[substr($i, 1, at - 1)] = substr($i, at + 1) }
    job = v["JobId"]; task = v["ArrayTaskId"]
    if (task != "") job = v["ArrayJobId"] "_" (task ~ /^[0-9]+$/ ? task : "[" task "]")
    print job "|" v["JobState"] "|" v["NodeList"]
}'
"""


def missing() -> str | None:
    """Why Slurm cannot be started here; None where it can."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM}"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "Slurm's daemons want root"


class LocalSlurm:
    """Slurm in `folder` (a short path: sockets may have 108 characters); a context manager.

    nodes: node0, node1, .., each with `cpus` CPUs. Raises RuntimeError where it cannot be started, saying why.
    """

    def __init__(self, folder: Path, nodes: int = 1, cpus: int = 4, memory: int = 16384) -> None:
        self.folder, self.nodes, self.cpus, self.memory = folder.resolve(), nodes, cpus, memory

    @property
    def env(self) -> dict[str, str]:
        """Variables with which sbatch, srun, squeue find this Slurm, and the ranks of a job each other."""
        path = f"{self.folder}/bin:{os.environ.get('PATH', '')}:{SYSTEM}"
        return {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path, "MASTER_ADDR": "127.0.0.1"}

    def start(self) -> None:
        """Write the configuration, start the daemons, wait until every node is idle."""
        if reason := missing():
            raise RuntimeError(reason)
        for name in ("munge", "state", "bin"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge/key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o400)
        shim = self.folder / "bin/sacct"
        shim.write_text(SACCT)
        shim.chmod(0o755)
        host, ports = socket.gethostname().split(".")[0], _free_ports(self.nodes + 1)
        nodes = [
            NODE.format(name=f"node{i}", host=host, port=port, cpus=self.cpus, memory=self.memory)
            for i, port in enumerate(ports[1:])
        ]
        conf = CONF.format(host=host, port=ports[0], dir=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(conf)
        exports = (f"export {k}='{v}'\n" for k, v in self.env.items())
        (self.folder / "env.sh").write_text("".join(exports))
        folder = self.folder
        munge = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
        munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge/seed"]
        self.call(*munge, f"--log-file={folder}/munged.log")
        self.call("slurmctld")
        for i in range(self.nodes):
            self.call("slurmd", "-N", f"node{i}")
        deadline = time.time() + 30
        while self.call("sinfo", "-h", "-N", "-o", "%T").split() != ["idle"] * self.nodes:
            if time.time() > deadline:
                raise RuntimeError(f"the nodes are not idle after 30 s; see {folder}/slurmctld.log, slurmd.node0.log")
            time.sleep(0.1)

    def call(self, *command: str) -> str:
        """Output of a command of this Slurm. Raises RuntimeError with what it said where it fails."""
        program = shutil.which(command[0], path=self.env["PATH"])
        if program is None:
            raise RuntimeError(f"there is no {command[0]} here: {missing()}")
        env = {**os.environ, **self.env}
        found = subprocess.run([program, *command[1:]], env=env, capture_output=True, text=True, timeout=60)
        if found.returncode:
            raise RuntimeError(f"{' '.join(command)}: {found.stdout}{found.stderr}")
        return found.stdout

    def stop(self) -> None:
        """Cancel every job, then end the daemons by their pid files."""
        if (self.folder / "slurmctld.pid").exists():
            self.call("scancel", "--user", "root")
            deadline = time.time() + 15
            while self.call("squeue", "-h").strip() and time.time() < deadline:
                time.sleep(0.2)
        for file in (*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid", self.folder / "munged.pid"):
            if file.exists():
                _end(int(file.read_text()))
                file.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _end(pid: int) -> None:
    """SIGTERM, and wait until the process is gone."""
    try:
        os.kill(pid, signal.SIGTERM)
        for _ in range(600):
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return
    raise RuntimeError(f"process {pid} does not end")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=4, help="of each node; may be more than there are (default 4)")
    args = parser.parse_args()
    slurm = LocalSlurm(args.folder, args.nodes, args.cpus)
    try:
        slurm.start() if args.action == "start" else slurm.stop()
    except RuntimeError as error:
        sys.exit(f"local_slurm: {error}")
    if args.action == "start":
        print(f"source {slurm.folder}/env.sh")


if __name__ == "__main__":
    main()
