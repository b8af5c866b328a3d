"""How long an exchange waits for late sites."""

from server_app.network.patience import ReplyTimes

MINUTE = 60.0


def test_how_long_training_takes_does_not_follow_from_an_exchange_of_keys():
    """Times of one kind of message are not those of another; all queries are of one kind.

    The server waits ``grace`` times as long as the site took before, and ``least`` seconds.
    """
    times = ReplyTimes()
    times.note("query.advertise", "west", asked=0.0, answered=0.5)

    assert times.has("query.share")
    assert not times.has("train")  # so the first training waits `round-timeout`

    times.note("train", "west", asked=1.0, answered=1.0 + 30 * MINUTE)
    assert times.patience("train", [2 * MINUTE], ["west"], grace=3.0, min_wait=120.0) == 90 * MINUTE
    assert times.patience("query.unmask", [0.5], ["west"], grace=3.0, min_wait=120.0) == 120.0


def waited_for(site, times):
    """Return how many seconds a round waits for a site when the others trained for a minute."""
    return times.patience("train", [MINUTE], [site], grace=3.0, min_wait=120.0)


def test_a_site_that_was_given_up_has_the_time_it_needed_in_later_rounds():
    times = ReplyTimes()
    times.note("train", "west", asked=0.0, answered=30 * MINUTE)

    assert waited_for("west", times) == 3 * 30 * MINUTE
    assert waited_for("east", times) == 3 * MINUTE


def test_time_in_which_a_message_waited_for_the_one_before_it_does_not_count():
    """The second message was worked on from minute 30, the end of the first, to minute 65."""
    times = ReplyTimes()
    times.note("train", "west", asked=0.0, answered=30 * MINUTE)
    times.note("train", "west", asked=6 * MINUTE, answered=65 * MINUTE)

    assert waited_for("west", times) == 3 * 35 * MINUTE
