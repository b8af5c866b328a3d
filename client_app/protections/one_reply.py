"""A real site answers a training round, and the final evaluation, once in a Flower run.

A server that could repeat a question, with weights of its choice each time, would learn from a run
of a few rounds as much as from one of thousands. The record is written when the reply, or an error
in its place, is ready: a task that was killed before that may be done again. It lies on the site's
own disk, so it outlives a restart.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from client_app.protections.base import Protection
from client_app.site.ledger_audit import AnswerRecord, answers_file
from client_app.site.record import record_in
from protofl_common.experiment.settings import Settings
from protofl_common.wire.schema import RefusedMessage


class OneReply(Protection):
    """Refuses a question that has been answered, with RefusedMessage.

    StateError if the record cannot be read or written.
    """

    name = "one reply to each question"

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return is_site

    def admit(self) -> None:
        """Refuse a question that has been answered, and one whose answer could not be recorded."""
        with self._answers():
            pass  # opening the record checks it, and fails in a folder that cannot be written to

    def record(self) -> None:
        """Record the question as answered.

        RefusedMessage if it was answered meanwhile: it may have come twice at the same time.
        """
        number = self.client.instructions.round
        with self._answers() as answers:
            trained, evaluated = answers.get(self._key, (0, 0))
            if self.client.trains_now:
                trained = number
            else:
                evaluated = max(1, number)  # 0 would mean that it was not answered
            answers[self._key] = (trained, evaluated)

    @property
    def _key(self) -> str:
        return f"{self.client.run_id} {self.client.settings.run.algo}"

    @contextmanager
    def _answers(self) -> Iterator[AnswerRecord]:
        """Yield the record of answers, and write back what the block changes in it.

        RefusedMessage where this question or a later one was answered, and where the server's run
        history leaves out a round that was answered.
        """
        file = answers_file(self.client.root, self.client.name)
        with record_in(file, "what was answered") as answers:
            trained, evaluated = map(int, answers.get(self._key, (0, 0)))
            self._check(trained, evaluated)
            yield answers

    def _check(self, trained: int, evaluated: int) -> None:
        """Raise RefusedMessage as `_answers` says.

        ``trained`` is the last training round and ``evaluated`` the round of the final evaluation
        that were answered, 0 for none. After the final evaluation nothing is answered. The history
        decides from which stored state of the model the client goes on, so a server must not change
        it within a Flower run.
        """
        client = self.client
        number = client.instructions.round
        history = client.instructions.run_history
        if trained and not history.counts(client.run_id, trained):
            raise RefusedMessage(
                f"round.run_history is {history.text!r}, in which round {trained} of the Flower run"
                f" {client.run_id} does not count, but this site has answered it"
            )
        is_past = client.trains_now and number <= trained
        if not evaluated and not is_past:
            return
        asked = f"training in round {number}" if client.trains_now else "the final evaluation"
        last = "the final evaluation" if evaluated else f"round {trained}"
        raise RefusedMessage(
            f"asked for {asked}, but this site has answered {last} of this Flower run, and answers"
            " nothing twice"
        )
