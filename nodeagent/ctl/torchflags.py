"""torchrun's options, and what each means here: the one table behind ``run``'s command line, its one line on what is
not needed, and docs/torchrun.md. Standard library only; must never import torch.

``tests/unit/ctl/test_torchflags.py`` compares it with the parser of the torch that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of torchrun's."""

    name: str
    """The long form, with ``-`` (``_`` in its place means the same)."""
    there: str
    """What torchrun does with it."""
    here: str
    """What it means here; of one that is not needed, why."""
    value: str = ""
    """How its value is written; empty for an option without one."""
    short: str = ""
    needed: bool = True
    """It changes something here; otherwise it is taken, and named."""
    environ: bool = True
    """torchrun reads ``PET_NAME`` in its place."""
    also: tuple[str, ...] = ()
    """Variables that it reads after that."""

    @property
    def variable(self) -> str:
        """The environment's word for it, which the command line beats."""
        return "PET_" + self.name.removeprefix("--").replace("-", "_").upper()


def _unneeded(name: str, there: str, here: str, *, value: str = "", environ: bool = True) -> Flag:
    return Flag(name, there, here, value, needed=False, environ=environ)


_MEETING = "the agents know each other: the nodes, rank 0's address and its port are chosen for each generation"
_RANK = "the line is given once, on one machine; ranks are chosen for each generation"

FLAGS: tuple[Flag, ...] = (
    Flag("--nnodes", "nodes of the job, on each of which torchrun is started by hand",
         "nodes of the job, on which the agents start it; `--nodes` is the same", "N|MIN:MAX"),
    Flag("--nproc-per-node", "workers per node; `auto`: one per accelerator, else per core",
         "the same; `gpu` is one per GPU of each node (one on a node without), `cpu` one per core of the machine where "
         "the line is given, `auto` the first if a node has GPUs, else the second", "N|gpu|cpu|auto"),
    Flag("--standalone", "one node, with a rendezvous of its own",
         "one node (or all of `--nnodes`) is brought up on this machine for the command, as by `--local`"),
    Flag("--max-restarts", "failures of workers after which all are started again",
         "the same, of the last hour (most: 60); nodes lost, drained or added cost nothing", "N"),
    Flag("--role", "`ROLE_NAME`, and the beginning of a prefix", "the same (a-z, 0-9 and `-`)", "NAME"),
    Flag("--module", "the script is a module's name, as for `python -m`", "the same", short="-m"),
    Flag("--no-python", "the script is a program", "the same"),
    Flag("--run-path", "the script is run by `runpy` in the worker's interpreter", "`python -u SCRIPT`"),
    Flag("--log-dir", "folder for the files of `-r` and `-t`, one below it for each node",
         "the same layout, written where the line is given: `JOB_NODE_*/attempt_N/LOCAL_RANK/stdout.log`; N counts "
         "generations", "DIR"),
    Flag("--redirects", "1 (stdout), 2 (stderr) or 3 (both) to files, not to the console; `0:1,1:2` by local rank",
         "the same", "STD", "-r"),
    Flag("--tee", "the same to files and to the console, there with a prefix `[role0]:`",
         "the same; `nodeagent-run` has the rank in it (or what `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` says), "
         "`nodeagentctl run` always a prefix of its own", "STD", "-t"),
    Flag("--local-ranks-filter", "local ranks that the console shows", "the same", "N,N"),
    Flag("--duplicate-stdout-filters", "lines of `-t` with one of these words to `filtered_stdout.log` too",
         "the same", "WORD,WORD"),
    Flag("--duplicate-stderr-filters", "lines of `-t` with one of these words to `filtered_stderr.log` too",
         "the same", "WORD,WORD"),
    Flag("--signals-to-handle", "signals that torchrun passes on to the workers before it ends",
         "signals that stop the job with its grace, which begins with SIGTERM; SIGHUP (a lost terminal) leaves a job "
         "of a cluster running", "SIG,SIG"),
    Flag("--shutdown-timeout", "seconds from the first signal to SIGKILL; else `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else "
         "30", "the same: the job's grace", "SECONDS", also=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",)),
    Flag("--virtual-local-rank", "`LOCAL_RANK` is 0 for all, `CUDA_VISIBLE_DEVICES` holds the worker's own GPU",
         "the same"),
    Flag("--numa-binding", "binds each worker to the cores of its GPU's NUMA node or socket, or to a part of them",
         "the same, without `numactl`; `exclusive` divides among all GPUs of the NUMA node, those of other jobs too; a "
         "worker that cannot be bound says so and runs", "node|socket|exclusive|core-complex", environ=False),
    _unneeded("--rdzv-backend", "how the nodes find each other", _MEETING, value="NAME"),
    _unneeded("--rdzv-endpoint", "where the nodes find each other", _MEETING, value="HOST:PORT"),
    _unneeded("--rdzv-id", "a name that the nodes share", "`--name` names the job; `TORCHELASTIC_RUN_ID` is its uid",
              value="ID"),
    _unneeded("--rdzv-conf", "more about how the nodes find each other", _MEETING, value="K=V,K=V"),
    _unneeded("--node-rank", "this node's rank", _RANK, value="N"),
    _unneeded("--master-addr", "rank 0's address", _MEETING, value="HOST"),
    _unneeded("--master-port", "rank 0's port", _MEETING, value="PORT"),
    _unneeded("--local-addr", "this node's address", "`address` in the agent's configuration", value="HOST"),
    _unneeded("--monitor-interval", "seconds between two looks at the workers", "an end is seen when it happens",
              value="SECONDS"),
    _unneeded("--start-method", "how `multiprocessing` starts functions", "workers are commands",
              value="spawn|fork|forkserver"),
    _unneeded("--event-log-handler", "where torchrun's events go", "`nodeagentctl events` has ours", value="NAME"),
    _unneeded("--logs-specs", "a plug-in that writes the logs", "`nodeagentctl logs` reads ours", value="NAME",
              environ=False),
)  # fmt: skip
