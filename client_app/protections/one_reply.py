"""One reply for each question: a real site answers a training round, and the final evaluation, once in a Flower run.

A server that could repeat a question, with weights of its choice each time, would learn from a run of a few rounds as
much as from one of thousands. The record is written when the reply, or an error in its place, is ready: a task that was
killed before that may be done again. It lies on the site's own disk, so it outlives a restart.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from client_app.client import Client
from client_app.protections.base import Protection
from client_app.state import record_in
from protofl_common.experiment.settings import Settings
from protofl_common.wire.schema import RefusedMessage


class OneReply(Protection):
    """RefusedMessage for a question that has been answered; StateError if the record cannot be read or written."""

    name = "one reply to each question"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.key = f"{client.run_id} {client.settings.run.algo}"
        self.file = client.root / "privacy" / f"{client.name}.answered"

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return is_site

    def before(self) -> None:
        with self._answers():
            pass  # also where there is none yet: one that cannot be written refuses before anything is trained

    def after(self) -> None:
        """Record the answer. It is checked once more: the same question may have come twice at the same time."""
        number = self.client.instructions.round
        with self._answers() as answers:
            last, final = answers.get(self.key, (0, 0))
            answers[self.key] = (
                (number, final) if self.client.trains_now else (last, max(1, number))
            )

    @contextmanager
    def _answers(self) -> Iterator[dict[str, tuple[int, int]]]:
        """The record, key -> last round answered, the final evaluation's (0: none); it has not answered this yet."""
        number, training = self.client.instructions.round, self.client.trains_now
        with record_in(self.file, "what was answered") as answers:
            last, final = map(int, answers.get(self.key, (0, 0)))
            history = self.client.instructions.run_history
            if last and not history.counts(self.client.run_id, last):
                said = f"round.run_history is {history.text!r}, in which round {last} of the Flower run"
                raise RefusedMessage(
                    f"{said} {self.client.run_id} does not count, but this site has answered it"
                )
            if final or (training and number <= last):
                asked = f"training in round {number}" if training else "the final evaluation"
                answered = f"the reply to {'the final evaluation' if final else f'round {last}'}: one for each"
                raise RefusedMessage(f"asked for {asked}, but this Flower run has had {answered}")
            yield answers
