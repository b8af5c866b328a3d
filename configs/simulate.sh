#!/bin/sh
# simulate.sh CLIENTS [RUN_CONFIG]: one run on a SuperLink of its own, which is stopped afterwards.
# Exits with 1 when the run failed; `flwr run --stream` itself does not tell.
set -eu
clients=$1
config=${2:-}
port=$FLWR_LOCAL_SUPERLINK_HTTP_API_PORT
python -m protofl_common.check "$config"
mkdir -p "$FLWR_HOME"

flower-superlink --insecure --simulation --host 127.0.0.1 --port "$port" \
    --control-api-address "127.0.0.1:$FLWR_LOCAL_CONTROL_API_PORT" \
    --disable-runtime-dependency-installation >"$FLWR_HOME/superlink.log" 2>&1 &
superlink=$!
trap 'kill $superlink 2>/dev/null || true; wait $superlink 2>/dev/null || true' EXIT INT TERM

healthy() { python -c "import httpx; httpx.get('http://127.0.0.1:$port/health').raise_for_status()" 2>/dev/null; }
until healthy; do
    kill -0 $superlink 2>/dev/null || { tail -5 "$FLWR_HOME/superlink.log"; exit 1; }
    sleep 0.5
done

flwr run . --stream --federation-config "num-supernodes=$clients client-resources-num-cpus=1" \
    ${config:+--run-config "$config"}
flwr ls --format json | python -c "
import json, sys
runs = json.load(sys.stdin)['runs']
sys.exit(0 if runs and 'completed' in str(runs[0]['status']) else 1)"
