#!/bin/sh
# Slurm's Epilog: the node goes back to nodeagent when the last Slurm job has left it. It never fails for nodeagent's
# sake, since Slurm would drain the node; what could not be given back stays cordoned, and says so in Slurm's log.
set -u
. "$(dirname "$0")/node.sh"

rm -f "$MARKS/job-$SLURM_JOB_ID"
set -- "$MARKS"/job-*
[ ! -e "$1" ] || exit 0 # another Slurm job has the node
reason=$(closed_for) || { echo "nodeagent was not asked; give it back: nodeagentctl uncordon $NODEAGENT_NODE" >&2; exit 0; }
case "$reason" in
"$OURS"*) "$NODEAGENTCTL" uncordon "$NODEAGENT_NODE" >&2 || echo "$NODEAGENT_NODE stays cordoned" >&2 ;;
esac
exit 0
