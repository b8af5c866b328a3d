"""Health of a container: every address in HEALTH_URLS answers, with a valid certificate.

Else the exit status is 1, and the reason is printed. A role lists its own API, and the SuperLink's
where it depends on that: a SuperNode that is cut off is not healthy.
"""

from __future__ import annotations

import os
import sys
from urllib.request import ProxyHandler, build_opener


def main() -> int:
    """Ask each address once."""
    addresses = os.environ.get("HEALTH_URLS", "").split()
    if not addresses:
        print("HEALTH_URLS names nothing to check")
        return 1
    ask = build_opener(ProxyHandler({}))
    for address in addresses:
        try:
            with ask.open(address, timeout=3) as answer:
                if answer.status != 200:
                    print(f"{address}: {answer.status}")
                    return 1
        except OSError as error:
            print(f"{address}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
