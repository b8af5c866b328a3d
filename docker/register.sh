#!/bin/sh
# register.sh SITE...: register the sites' public keys with the SuperLink, those that it does not know yet.
set -eu
for site; do
    if said=$(sh /app/docker/operator.sh flwr supernode register "/keys/$site.pub" federation --name "$site" 2>&1); then
        echo "$said"
    else
        case $said in
            *"Public key already in use"*) echo "registered before: $site" ;;
            *) echo "$said"; exit 1 ;;
        esac
    fi
done
