#!/bin/sh
# Horovod's --host-discovery-script: HOST:SLOTS, a line for each node that the job trains on now. Its driver runs it each
# second; while the job is formed anew this ends with 6, and the driver keeps what it knew and asks again.
exec "${NODEAGENTCTL:-nodeagentctl}" hosts "${NODEAGENT_HOROVOD_JOB:-horovod}" --format horovod
