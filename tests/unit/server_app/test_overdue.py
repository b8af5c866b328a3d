"""Which messages the server still awaits an answer to after their round has closed."""

from types import SimpleNamespace

from server_app.network.exchange import MOST_OVERDUE, MessageExchange
from tests.support.fakes import server_of


def test_of_a_silent_site_only_the_last_messages_are_awaited(tmp_path):
    """It is silent for two rounds more than that, and another site in the first round alone."""
    federation = server_of("fedproto").federation
    federation.grid = None
    federation.start = SimpleNamespace(state={})  # of a new run
    exchange = MessageExchange(federation, tmp_path / "mine")

    for number in range(1, MOST_OVERDUE + 3):
        silent = ["north", "south"] if number == 1 else ["north"]
        exchange._pending = {site: message_with_id(f"{site} {number}") for site in silent}
        exchange._keep_overdue(asked=0.0)

    last_of_north = [f"north {number}" for number in range(3, MOST_OVERDUE + 3)]
    assert list(exchange._overdue) == ["south 1", *last_of_north]


def message_with_id(message_id):
    return SimpleNamespace(metadata=SimpleNamespace(message_id=message_id))
