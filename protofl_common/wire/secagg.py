"""The record ``secagg`` of a message of secure aggregation: some bytes for each of several sites."""

from collections.abc import Mapping

from flwr.app import ConfigRecord, RecordDict

from protofl_common.basics.text import is_site_name
from protofl_common.wire.limits import RefusedMessage

RECORD = "secagg"
FINAL = "_final"  # after the name of a stage in a message about the final evaluation
MOST_SITES = 1000  # in one sum: every client sends something to every other


def pack_by_site(content: Mapping[str, bytes]) -> dict[str, ConfigRecord]:
    return {RECORD: ConfigRecord(dict(content))}


def unpack_by_site(content: RecordDict, size: int) -> dict[str, bytes]:
    """The record; RefusedMessage if it is missing, names no site, or holds anything but ``size`` bytes for each."""
    record = content.config_records.get(RECORD, ConfigRecord())
    if not 1 <= len(record) <= MOST_SITES:
        raise RefusedMessage(f"a record {RECORD!r} of {len(record)} sites, not from 1 to {MOST_SITES}")
    found = {}
    for site, value in record.items():
        if not is_site_name(site) or not isinstance(value, bytes) or len(value) != size:
            raise RefusedMessage(f"a record {RECORD!r} with other than {size} bytes for {site!r}")
        found[site] = value
    return found
