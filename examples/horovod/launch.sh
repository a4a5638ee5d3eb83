#!/bin/sh
# horovodrun on the hosts of the role worker, which it reaches through bin/ssh. What is given is what it starts.
# It exports the environment it has: what was this process's own is of no use there.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TF_CONFIG
here=$(dirname "$(readlink -f "$0")")
hosts=$(python3 "$here/reach.py" hosts) || exit
count=$(echo "$hosts" | tr ',' '\n' | awk -F: '{ n += $2 } END { print n }')
PATH=$here/bin:$PATH exec horovodrun -np "$count" -H "$hosts" "$@"
