#!/bin/sh
# submit.sh RUN_CONFIG: submit a run to the SuperLink `federation`, show its log, wait for its end; 1 when it failed.
# `flwr run --stream` would neither outlive a restart of the SuperLink nor tell whether the run failed.
set -eu
run=$(flwr run /app federation --run-config "$1" --format json | python -c 'import json, sys
answer = json.load(sys.stdin)
print(answer["run-id"] if answer["success"] else sys.exit(str(answer)))')
echo "run $run"
python /app/docker/follow.py "$run"
