"""How long an exchange waits for late sites."""

from server_app.network.patience import ReplyTimes

MINUTE = 60.0


def test_how_long_training_takes_does_not_follow_from_an_exchange_of_keys():
    """Times of one kind of message are not those of another; all queries are of one kind.

    The server waits ``grace`` times as long as the site took before, and ``min_wait`` seconds at
    least. The replies of other sites that have come in the meantime (``taken``) were fast.
    """
    times = ReplyTimes()
    times.note("query.advertise", "west", asked=0.0, answered=0.5)

    assert times.has("query.share")
    assert not times.has("train")  # so the first training waits `round-timeout`

    times.note("train", "west", asked=1.0, answered=1.0 + 30 * MINUTE)

    limits = {"grace": 3.0, "min_wait": 2 * MINUTE}
    for_training = times.patience("train", taken=[2 * MINUTE], pending=["west"], **limits)
    assert for_training == 3 * 30 * MINUTE
    for_keys = times.patience("query.unmask", taken=[0.5], pending=["west"], **limits)
    assert for_keys == 2 * MINUTE


def waited_for(site, times):
    """Return how many seconds a round waits for a site when the others trained for a minute."""
    limits = {"grace": 3.0, "min_wait": 2 * MINUTE}
    return times.patience("train", taken=[MINUTE], pending=[site], **limits)


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
