"""The wire: typed payloads to and from Flower's ``RecordDict``, as the catalog declares them (`schema.Exchange`).

Unpacking checks every name, shape, dtype and range, and raises :class:`RefusedMessage`. Arrays travel as raw
little-endian bytes: no pickle. A message has a record for each declared entry (`payloads.py`), or with secure
aggregation ``masked`` (`privacy/sums.py`), and beside them ``round``, ``report`` or ``site`` (`records.py`).
"""
