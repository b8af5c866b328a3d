#!/bin/sh
# operator.sh COMMAND...: the command, where `flwr` knows the SuperLink as `federation`.
set -eu
mkdir -p "$HOME/.flwr"
cat >"$HOME/.flwr/config.toml" <<END
[superlink.federation]
address = "superlink:8000"
root-certificates = "/keys/ca.crt"
END
exec "$@"
