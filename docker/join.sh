#!/bin/sh
# A command of ablate in a container. Ray wants a node of its own where a sweep asks it for work: one without slots, gone with the container.
set -eu
listens="import os, socket; host, _, port = os.environ['ABLATE_RAY_ADDRESS'].rpartition(':'); socket.create_connection((host, int(port)), 3)"
if [ "${1:-}" = sweep ] && python -c "$listens" 2>/dev/null; then # Ray itself would ask a head that is not there for minutes
    # Where no node comes up, the sweep says in a sentence why it cannot use the cluster.
    export RAY_NUM_REDIS_GET_RETRIES=6
    ray start --address "$ABLATE_RAY_ADDRESS" --num-cpus 0 --num-gpus 0 --object-store-memory 134217728 --disable-usage-stats >/dev/null 2>&1 || true
fi
exec ablate "$@"
