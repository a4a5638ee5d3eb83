# What prolog.sh and epilog.sh share; they read it. POSIX sh, with flock of util-linux and any python3.
#
# NODEAGENTCTL   the tool (default: nodeagentctl)
# NODEAGENT_NODE this node's name in nodeagent (default: Slurm's name of it)
# MARKS          a folder of root's, gone after a reboot: one file for each Slurm job that has this node

: "${NODEAGENTCTL:=nodeagentctl}"
: "${NODEAGENT_NODE:=${SLURMD_NODENAME:-$(hostname -s)}}"
: "${MARKS:=/run/nodeagent-slurm}"
OURS="slurm job"

# The reason for which the node takes no new work; empty if it does take some. "(by root)" is said anew at each drain.
closed_for() {
    "$NODEAGENTCTL" nodes "$NODEAGENT_NODE" -o json | python3 -c '
import json, sys
node = json.load(sys.stdin)
print(node["reason"].removesuffix(" (by root)") if node["state"] in ("cordoned", "draining", "drained") else "")'
}

mkdir -p -m 0700 "$MARKS" || exit 1
exec 9> "$MARKS/lock" || exit 1
flock -w "${LOCK_SECONDS:-120}" 9 || { echo "another prolog or epilog holds $MARKS/lock" >&2; exit 1; }
