#!/bin/sh
# demo.sh: a federation in containers, one run, its result. Exits with 1 when the run failed.
# demo.sh down: take it down, with its volumes.   docker/containers.md names the variables.
set -eu
cd "$(dirname "$0")/.."
image=${PROTOFL_IMAGE:-protofl:local}
name=demo-$(date +%Y%m%d-%H%M%S)
config=${RUN_CONFIG:-algo=\"fedtgp\" rounds=5 partition=\"feature-shift\" train-samples=150 local-epochs=5 num-clients=3 threads=1}

if [ -n "${COMPOSE:-}" ]; then compose=$COMPOSE
elif docker compose version >/dev/null 2>&1; then compose="docker compose"
else compose=docker-compose
fi
compose() { $compose --project-name "${PROJECT:-protofl}" --file docker/compose.yaml "$@"; }
operator() { compose run --rm -T operator "$@"; }

down() { compose down --volumes --remove-orphans --timeout 5; }
if [ "${1:-}" = down ]; then down; exit; fi

if [ -z "${SKIP_BUILD:-}" ]; then
    # shellcheck disable=SC2086  # several options
    DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --tag "$image" ${BUILD_OPTIONS:-} .
fi

failed() {
    echo "demo: $1" >&2
    compose ps || true
    compose logs --tail 30 || true
    exit 1
}
if [ -z "${KEEP:-}" ]; then trap down EXIT; fi
trap 'exit 130' INT TERM
compose up --detach || failed "the federation does not start"
operator sh /app/docker/submit.sh "$config run-name=\"$name\"" || failed "the run failed"
operator env PYTHONPATH=/app python /app/docker/result.py "/results/runs/$name" || failed "the run left no result"
