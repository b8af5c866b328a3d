"""The wire: typed payloads to and from Flower's ``RecordDict``.

Both directions are declared in the catalog as a `schema.Exchange` of named entries. Packing
anything undeclared is a programming error (counts of prototypes are left out); unpacking checks
every name, shape, dtype and range, and raises :class:`RefusedMessage` with the reason. Arrays
travel as raw little-endian bytes: no pickle, and 4 bytes a number.

Records of a message
    an entry's name one for each declared entry, such as ``prototypes`` and ``weights``, with the
                    arrays that its codec declares (`payloads.py`)
    ``masked``      in their place, with secure aggregation: a vector [L] int64 of figures and sums
                    (`privacy/sums.py`); its keys, shares and sites have a record beside it
                    (`wire/records.py`)
    ``round``       server to client: :class:`Instructions`
    ``report``      client to server: :class:`Report`, scalars only
    ``site``        client to server, once: :class:`SiteCard`
"""
