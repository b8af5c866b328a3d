#!/bin/sh
# init.sh SITE...: what is missing of keys and certificates, in /authority; then each role's own, in /keys/ROLE.
# Runs as root in compose's `init`, without a network; the other containers see only their own role's folder.
set -eu
owner=protofl
set_of() { for site; do printf ' --node %s' "$site"; done; }
# shellcheck disable=SC2046  # the sites' names are plain words
python /app/docker/certificates.py /authority --server superlink --server gate --server 127.0.0.1 $(set_of "$@")

give() { # give ROLE FILE NAME
    install -o "$owner" -m 0400 "/authority/$2" "/keys/$1/$3"
}
for role in superlink gate worker operator "$@"; do give "$role" ca.crt ca.crt; done
for role in superlink gate; do
    give $role server.crt server.crt
    give $role server.key server.key
done
give superlink superexec.secret superexec.secret
give worker superexec.secret superexec.secret
for site; do
    give "$site" "nodes/$site" key
    give operator "nodes/$site.pub" "$site.pub"
done
