"""With ``keep-best`` clients learn which round is the best so far, and at the end which one was the best of all."""

from protofl_common.basics.text import in_order
from protofl_common.runs.folder import RoundRow
from protofl_common.wire.records import pack_best
from server_app.callbacks.base import Callback, Run
from server_app.network.exchange import Records
from server_app.replies import RoundResult


class BestModel(Callback):
    """The client's half is `client_app/trained_model.py`: the models stay where they are."""

    def records(self, run: Run) -> Records:
        return pack_best(run.best) if run.settings.run.keep_best else {}

    def on_end(self, run: Run, row: RoundRow, result: RoundResult) -> None:
        if run.settings.run.keep_best and run.best:
            sites = in_order(set(run.federation.answering(result.number)) - run.federation.new_clients)
            contents = dict.fromkeys(sites, pack_best(run.best, final=True))
            run.exchange.ask("query.best", contents, RoundResult(result.number))
