"""Leave the prototypes least like the others out of what a server trains on or clusters (``merging``, ``liars``)."""

from protofl_common.maths.aggregation import without_the_farthest
from protofl_common.wire.schema import vectors_in
from server_app.network.membership import Federation
from server_app.replies import Upload, vectors_of
from server_app.result import RoundResult


def accept(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Return the uploads without these; where prototypes are averaged, `merge_prototypes` does this by coordinate."""
    settings, merging = federation.settings, federation.bounds.prototypes
    if settings.row.averages_prototypes or merging[0] == "mean":
        return uploads
    for name in vectors_in(settings.exchange.up):
        sent = vectors_of(uploads, name)
        close = dict(zip(sent, without_the_farthest(list(sent.values()), *merging), strict=True))
        uploads = [one.having(**{name: close[one.site]}) if one.site in close else one for one in uploads]
    return uploads
