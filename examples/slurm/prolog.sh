#!/bin/sh
# Slurm's Prolog (or PrologSlurmctld's on each node): nodeagent's work leaves this node before a Slurm job has it.
# A failure keeps the Slurm job away: Slurm drains the node and puts the job back into its queue.
set -eu
. "$(dirname "$0")/node.sh"

touch "$MARKS/job-$SLURM_JOB_ID"
reason=$(closed_for)
case "$reason" in
"$OURS"* | "") reason="$OURS $SLURM_JOB_ID" ;; # a person's own reason stays, and so does the cordon after the job
esac
"$NODEAGENTCTL" drain "$NODEAGENT_NODE" --reason "$reason" --timeout "${DRAIN_TIMEOUT:-5m}" >&2 && exit 0

code=$?
rm -f "$MARKS/job-$SLURM_JOB_ID"
echo "nodeagent's work has not left $NODEAGENT_NODE: nodeagentctl describe $NODEAGENT_NODE" >&2
exit "$code"
