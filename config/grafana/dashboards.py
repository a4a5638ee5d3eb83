"""The dashboards: cluster, job, node. Drawn into the JSON files beside this one: `python -m config.grafana.dashboards`.

What an agent says of the cluster is taken from agents whose store answers, as the largest of what they say
(docs/metrics.md). tests/e2e/test_prometheus.py asks a real Prometheus every query here.
"""

from __future__ import annotations

import json
from pathlib import Path

from config.grafana.panels import Json, Panel, dashboard, variable

FOLDER = Path(__file__).parent
RED, YELLOW = "red", "orange"


def reported(name: str, by: str, labels: str = "") -> str:
    """What agents say of the cluster, by these labels."""
    chosen = ", ".join(filter(None, ['cluster=~"$cluster"', labels]))
    return f"max by ({by}) (nodeagent_{name}{{{chosen}}} and on (cluster, instance) nodeagent_store_away_seconds == 0)"


def of_job(name: str, by: str = "job", labels: str = "") -> str:
    """The same, of the chosen jobs."""
    return reported(name, by, ", ".join(filter(None, ['job=~"$job"', labels])))


def named(expr: str) -> str:
    """Series of agents, with the ids of their nodes, of the chosen ones."""
    return (
        f'{expr} * on (cluster, instance) group_left (node) nodeagent_build_info{{cluster=~"$cluster", node=~"$node"}}'
    )


def quantile(q: float, name: str, by: str, labels: str = 'cluster=~"$cluster"') -> str:
    return f"histogram_quantile({q}, sum by ({by}le) (rate(nodeagent_{name}_bucket{{{labels}}}[$__rate_interval])))"


def average(name: str, by: str, labels: str) -> str:
    """Of a histogram, since the agents' start: the first that a series ever reported is no increase."""
    sums, counts = (
        f'sum by ({by}) (nodeagent_{name}_{end}{{cluster=~"$cluster", {labels}}})' for end in ("sum", "count")
    )
    return f"{sums} / ({counts} > 0)"


def node_quantile(q: float, name: str) -> str:
    each = named(f"rate(nodeagent_{name}_bucket[$__rate_interval])")
    return f"histogram_quantile({q}, sum by (node, le) ({each}))"


def device_time(device: str, by: str, of: str = "device") -> str:
    """How many devices were booked, on average; ``of`` ``lost_device``: in vain. Each node counts its own."""
    rate = f'rate(nodeagent_{of}_seconds_total{{cluster=~"$cluster", device="{device}"}}[$__rate_interval])'
    return f"sum by ({by}) ({rate})"


def device_goodput(device: str, by: str) -> str:
    """The part of their time that was neither lost nor overhead."""
    lost, overhead = device_time(device, by, "lost_device"), device_time(device, by, "overhead_device")
    return f"1 - ({lost} + {overhead}) / {device_time(device, by)}"


CLUSTER = variable("cluster", "label_values(nodeagent_build_info, cluster)")
JOB = variable("job", 'label_values(nodeagent_generation{cluster=~"$cluster"}, job)')
NODE = variable("node", 'label_values(nodeagent_build_info{cluster=~"$cluster"}, node)')

CLUSTER_PANELS = [
    Panel("Agents that have joined", "Of those that Prometheus reads.", "stat",
          [('sum(nodeagent_joined{cluster=~"$cluster"})', "joined"),
           ('count(nodeagent_joined{cluster=~"$cluster"})', "read")], width=4, height=4),
    Panel("GPUs", "Unfit ones get no work.", "stat",
          [('sum by (state) (nodeagent_gpus{cluster=~"$cluster"})', "{{state}}")], width=6, height=4),
    Panel("Jobs whose records are refused", "Not what was signed: agents run nothing of them.", "stat",
          [(f"sum({reported('jobs_refused', 'reason')})", "refused")], width=5, height=4, limits=[(1, RED)]),
    Panel("Agents without the store", "Redis does not answer them.", "stat",
          [('count(nodeagent_store_away_seconds{cluster=~"$cluster"} > 0) or vector(0)', "away")],
          width=5, height=4, limits=[(1, RED)]),
    Panel("Versions", "More than one for long: an upgrade that was not finished.", "stat",
          [('count by (version) (nodeagent_build_info{cluster=~"$cluster"})', "{{version}}")], width=4, height=4),
    Panel("Nodes", "By state.", "timeseries", [(reported("nodes", "state"), "{{state}}")]),
    Panel("Jobs", "With a record, by phase.", "timeseries", [(reported("jobs", "phase"), "{{phase}}")]),
    Panel("Alerts", "That fire (config/prometheus/rules).", "table",
          [('max by (alertname, severity, job) (ALERTS{alertname=~"Nodeagent.*", alertstate="firing"})', "")]),
    Panel("Live jobs", "Seconds in the phase, newest generation, restarts since the submission, budget spent.",
          "table",
          [(reported("phase_seconds", "job, phase"), "phase for"), (reported("generation", "job"), "generation"),
           (reported("job_restarts", "job"), "restarts"), (reported("budget_spent", "job"), "budget spent")], width=24),
    Panel("Restarts", "Of each live job since its submission, planned ones included.", "timeseries",
          [(reported("job_restarts", "job"), "{{job}}")]),
    Panel("Generations that ended", "Within the jobs' restart windows, by cause, planned ends included.", "timeseries",
          [(f"sum by (cause) ({reported('generation_ends', 'job, cause')})", "{{cause}}")]),
    Panel("Downtime of jobs", "To be re-formed, within the shown range, by cause.", "bargauge",
          [('sum by (cause) (increase(nodeagent_standstill_seconds_total{cluster=~"$cluster"}[$__range])) > 0',
            "{{cause}}")], unit="s"),
    Panel("GPUs in use, by queue", "Booked, on average.", "timeseries",
          [(device_time("gpu", "queue"), "{{queue}}")]),
    Panel("GPUs in use, by user", "Booked, on average. GPU hours: nodeagentctl usage.", "timeseries",
          [(device_time("gpu", "user"), "{{user}}")]),
    Panel("CPU slots in use, by queue", "Booked, on average.", "timeseries",
          [(device_time("slot", "queue"), "{{queue}}")]),
    Panel("Goodput, by class of node", "Part of the GPUs' time that was neither lost to faults nor overhead: of nodes "
          "that may be taken away (spot), and of the others.", "timeseries",
          [(device_goodput("gpu", "class"), "{{class}}")], unit="percentunit"),
    Panel("Goodput, by queue", "Part of the time of its jobs' GPUs (or CPU slots) that was neither lost to faults nor "
          "overhead.", "timeseries",
          [(device_goodput("gpu", "queue"), "{{queue}}"),
           (device_goodput("slot", "queue"), "{{queue}}: CPU slots")], unit="percentunit"),
    Panel("Jobs in line, by queue", "That wait for nodes.", "timeseries",
          [(reported("waiting_jobs", "queue"), "{{queue}}")]),
    Panel("Longest wait, by queue", "Of the jobs that are in line now.", "timeseries",
          [(reported("longest_wait_seconds", "queue"), "{{queue}}")], unit="s"),
    Panel("Nodes under repair", "By what comes next: docs/health.md.", "timeseries",
          [(reported("nodes_repairing", "stage"), "{{stage}}")]),
    Panel("Store: round trip", "Of a heartbeat.", "timeseries",
          [(quantile(0.5, "store_roundtrip_seconds", ""), "half"),
           (quantile(0.99, "store_roundtrip_seconds", ""), "99 of 100")], unit="s", limits=[(0.1, RED)]),
    Panel("Lease: the least time left", "Workers without failsafe time stop at its end.", "timeseries",
          [('min(nodeagent_lease_margin_seconds{cluster=~"$cluster"})', "least")], unit="s"),
    Panel("Heartbeats: late by", "The machine, or the agent, was too busy.", "timeseries",
          [(quantile(0.99, "heartbeat_late_seconds", ""), "99 of 100")], unit="s", limits=[(0.25, RED)]),
]  # fmt: skip

STANDSTILL = 'nodeagent_standstill_seconds_total{cluster=~"$cluster", job=~"$job"}'
TO_TRAIN = of_job("phase_seconds", labels='phase=~"forming|running|holding"')
LIVE = f"count_over_time(({TO_TRAIN})[$__range:$__interval]) * $__interval_ms / 1000"
RESTARTS = 'nodeagent_job_restarts{cluster=~"$cluster", job=~"$job"}'

JOB_PANELS = [
    Panel("Phase", "And for how long.", "stat", [(of_job("phase_seconds", "job, phase"), "{{job}}: {{phase}}")],
          unit="s", width=6, height=4),
    Panel("Restarts, in the shown range", "Of a job that was submitted in it: all. Exact: it is read from its record.",
          "stat", [(f"max by (job) (last_over_time({RESTARTS}[$__range])) - (max by (job) ({RESTARTS} offset $__range) "
                    f"or 0 * max by (job) (last_over_time({RESTARTS}[$__range])))", "{{job}}")],
          width=6, height=4, limits=[(1, YELLOW)]),
    Panel("Goodput", "Share of the time in which the job was to train and did not stand still to be re-formed. A "
          "downtime is reported when it is over.", "stat",
          [(f"1 - clamp_max(sum by (job) (increase({STANDSTILL}[$__range])) / ({LIVE}), 1)",
            "{{job}}")], unit="percentunit", width=6, height=4, more={"decimals": 3}),
    Panel("Devices' goodput", "Part of its GPUs' (or slots') time since the submission that was neither lost to "
          "faults nor overhead: docs/usage.md.", "stat",
          [(of_job("job_goodput"), "{{job}}")], unit="percentunit", width=6, height=4, more={"decimals": 3}),
    Panel("Restart budget", "Spent within its window, and the limit.", "stat",
          [(of_job("budget_spent"), "{{job}}: spent"), (of_job("budget_limit"), "{{job}}: of")], width=6, height=4),
    Panel("Generations", "Which was the newest, and what it was formed for. One that lived between two scrapes is not "
          "seen here, but it is counted.", "state-timeline",
          [(of_job("generation_cause", "job, cause"), "{{job}}: {{cause}}")], width=24, height=9),
    Panel("Phases", "As Prometheus saw them.", "state-timeline",
          [(f"({of_job('phase_seconds', 'job, phase')}) * 0 + 1", "{{job}}: {{phase}}")], width=24, height=6),
    Panel("Restarts", "Since the submission, planned ones included: k faults raise it by k.", "timeseries",
          [(of_job("job_restarts"), "{{job}}")], limits=[]),
    Panel("Restarts, by cause and node at fault", "Counted by the agents of now: an agent's restart forgets its own.",
          "table",
          [('sum by (job, cause, node) (nodeagent_restarts_total{cluster=~"$cluster", job=~"$job"})', "restarts")]),
    Panel("Places, by role", "Of jobs of several roles: that run, and that are wanted.", "timeseries",
          [(of_job("role_places", "job, role, state"), "{{job}} {{role}}: {{state}}")]),
    Panel("Workers, by role", "Of jobs of several roles, in the active generation; and those of services that were "
          "started again alone in it.", "timeseries",
          [(of_job("role_workers", "job, role"), "{{job}} {{role}}: workers"),
           (of_job("role_restarts_alone", "job, role"), "{{job}} {{role}}: started again alone")]),
    Panel("What the faults cost", "Downtime of the job while it was re-formed, within the shown range, by cause.",
          "bargauge", [(f"sum by (job, cause) (increase({STANDSTILL}[$__range])) > 0", "{{job}}: {{cause}}")],
          unit="s"),
    Panel("What a fault cost", "On average over all that the agents of now have seen, of all jobs: from the fault to "
          "the workers' start.", "timeseries", [(average("recovery_seconds", "cause", 'phase="whole"'), "{{cause}}")],
          unit="s"),
    Panel("What a recovery is made of", "On average over all that the agents of now have seen, of all jobs "
          "(docs/architecture.md).", "timeseries",
          [(average("recovery_seconds", "phase", 'phase!="whole"'), "{{phase}}")], unit="s"),
    Panel("Steps per second, net", "What is done again after a fault counts once. Of jobs that have `hang` only.",
          "timeseries", [('deriv(max by (job) (nodeagent_step{cluster=~"$cluster", job=~"$job"})'
                          "[$__rate_interval:])", "{{job}}")], more={"min": None}),
    Panel("Step", "The newest that workers reported, and that of the newest committed checkpoint.", "timeseries",
          [('max by (job) (nodeagent_step{cluster=~"$cluster", job=~"$job"})', "{{job}}: workers"),
           (of_job("checkpoint_step"), "{{job}}: checkpoint")], unit="none"),
    Panel("Workers that wait for the next start", "On all nodes.", "timeseries",
          [('sum by (job) (nodeagent_preforked_workers{cluster=~"$cluster", job=~"$job"})', "{{job}}")]),
    Panel("Memory kept for the next start", "By workers that wait, and for snapshots; on all nodes.", "timeseries",
          [('sum by (job) (nodeagent_preforked_bytes{cluster=~"$cluster", job=~"$job"})', "{{job}}: waiting workers"),
           ('sum by (job) (nodeagent_snapshot_bytes{cluster=~"$cluster", job=~"$job"})', "{{job}}: snapshots")],
          unit="bytes"),
]  # fmt: skip

FATAL = 'nodeagent_gpu_verdicts{severity="fatal"}'

NODE_PANELS = [
    Panel("Joined", "1 while the agent holds its node's id.", "stat", [(named("nodeagent_joined"), "{{node}}")],
          width=8, height=4),
    Panel("GPUs", "Unfit ones get no work.", "stat",
          [(f"sum by (node, state) ({named('nodeagent_gpus')})", "{{node}}: {{state}}")], width=8, height=4),
    Panel("Fatal verdicts", "On GPUs, or on the node itself: no work for what they are on.", "stat",
          [(f"sum by (node) ({named(FATAL)}) or sum by (node) ({named('nodeagent_joined')}) * 0", "{{node}}")],
          width=8, height=4, limits=[(1, RED)]),
    Panel("Verdicts", "In any stage; without a GPU: on the node itself (docs/health.md).", "table",
          [(f"sum by (node, gpu, rule, severity) ({named('nodeagent_gpu_verdicts')})", "")], width=12),
    Panel("Xids", "Since the agent's start.", "table",
          [(f"sum by (node, gpu, xid) ({named('nodeagent_xids_total')})", "times")], width=12),
    Panel("Repairs", "And verify runs, since the agent's start, by what became of them.", "table",
          [(f"sum by (node, kind, outcome) ({named('nodeagent_repairs_total')})", "times")]),
    Panel("GPU temperature", "As the driver reported last.", "timeseries",
          [(named("nodeagent_gpu_temperature_celsius"), "{{node}} {{gpu}}")], unit="celsius", limits=[(85, RED)]),
    Panel("Pods", "By phase; `stuck` ones outlive SIGKILL.", "timeseries",
          [(f"sum by (node, phase) ({named('nodeagent_pods')}) > 0", "{{node}}: {{phase}}")]),
    Panel("Pods without progress", "For longer than their jobs allow.", "timeseries",
          [(named("nodeagent_stalled_pods"), "{{node}}")], limits=[(1, RED)]),
    Panel("Members of gangs that cannot be reached", "By this node's agent, though they hold their leases.",
          "timeseries", [(named("nodeagent_unreachable_peers"), "{{node}} {{job}}")], limits=[(1, RED)]),
    Panel("Lease: time left", "Workers without failsafe time stop at its end.", "timeseries",
          [(named("nodeagent_lease_margin_seconds"), "{{node}}")], unit="s"),
    Panel("Lease: age when it was renewed", "Workers stop at the fence (2.2 s).", "timeseries",
          [(node_quantile(0.99, "lease_age_seconds"), "{{node}}: 99 of 100")], unit="s",
          limits=[(1.5, YELLOW), (2.2, RED)]),
    Panel("Heartbeats: late by", "The machine, or the agent, was too busy.", "timeseries",
          [(node_quantile(0.99, "heartbeat_late_seconds"), "{{node}}: 99 of 100"),
           (named("nodeagent_loop_lag_seconds"), "{{node}}: the last")], unit="s", limits=[(0.25, RED)]),
    Panel("Store: round trip", "Of a heartbeat.", "timeseries",
          [(node_quantile(0.99, "store_roundtrip_seconds"), "{{node}}: 99 of 100")], unit="s", limits=[(0.1, RED)]),
    Panel("Store: does not answer for", "0 while it does.", "timeseries",
          [(named("nodeagent_store_away_seconds"), "{{node}}")], unit="s", limits=[(10, RED)]),
    Panel("Store: heartbeats not answered", "A second.", "timeseries",
          [(named("rate(nodeagent_store_errors_total[$__rate_interval])"), "{{node}}")], unit="cps"),
    Panel("Disk: writing the jobs", "What an empty Redis is given back.", "timeseries",
          [(node_quantile(0.99, "save_seconds"), "{{node}}: 99 of 100")], unit="s", limits=[(0.25, RED)]),
    Panel("Disk: writes that failed", "Since the agents' start.", "timeseries",
          [(named("nodeagent_save_errors_total"), "{{node}}")], limits=[(1, RED)]),
    Panel("Jobs on failsafe time", "While the store is away; those that get no failsafe time end.", "timeseries",
          [(named("nodeagent_failsafe_jobs"), "{{node}}: given"),
           (named("nodeagent_failsafe_refused_jobs"), "{{node}}: not given")]),
    Panel("Records refused", "Jobs that are not run since their record is not what was signed; refusals in 5 minutes.",
          "timeseries", [(f"sum by (node, reason) ({named('increase(nodeagent_refused_signatures_total[5m])')}) > 0",
                          "{{node}}: {{reason}}")]),
    Panel("Jobs left as they are", "A decision about one failed: a defect; the agent's log has the traceback.",
          "timeseries", [(named("nodeagent_undecided_total"), "{{node}}: {{decision}}")]),
    Panel("Memory kept for the next start", "By workers that wait, and for snapshots.", "timeseries",
          [(named("nodeagent_preforked_bytes"), "{{node}} {{job}}: waiting workers"),
           (named("nodeagent_snapshot_bytes"), "{{node}} {{job}}: snapshots")], unit="bytes", width=12),
    Panel("Workers that wait for the next start", "By job.", "timeseries",
          [(named("nodeagent_preforked_workers"), "{{node}} {{job}}")], width=12),
]  # fmt: skip

DASHBOARDS: dict[str, Json] = {
    "cluster.json": dashboard("nodeagent-cluster", "nodeagent: cluster", "Nodes, jobs, and what they stand on.",
                              [CLUSTER], CLUSTER_PANELS),
    "job.json": dashboard("nodeagent-job", "nodeagent: job", "Generations, their causes, and what faults cost.",
                          [CLUSTER, JOB], JOB_PANELS),
    "node.json": dashboard("nodeagent-node", "nodeagent: node and GPUs", "One node's agent and its hardware.",
                           [CLUSTER, NODE], NODE_PANELS),
}  # fmt: skip
"""File to what is in it."""


def drawn(name: str) -> str:
    """The file's text."""
    return json.dumps(DASHBOARDS[name], indent=2) + "\n"


if __name__ == "__main__":
    for file in DASHBOARDS:
        (FOLDER / file).write_text(drawn(file))
