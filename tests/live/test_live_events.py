"""Events and news of rounds, and listeners that raise."""

from contextlib import closing

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.events import listening
from flyweight.live.watch import watch
from live_rounds import updated
from versioned_models import holds, weights


def test_events_tell_of_each_round(address, threads):
    seen = []
    with (
        listening(seen.append),
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(2), address, name="engine") as replica,
    ):
        updated(threads, publisher, replica, 1)
        replica.close()
        until(lambda: any(e.kind == "replica.lost" for e in seen))
    kinds = [event.kind for event in seen]
    assert {"replica.joined", "publish.done", "update.done", "replica.lost"} <= set(kinds)
    done = next(event for event in seen if event.kind == "publish.done")
    assert (done.fields["version"], done.fields["strategy"]) == (1, "host")


def test_a_listener_that_raises_does_not_make_the_publisher_deaf(address, threads):
    def listener(event):
        if event.kind.startswith("replica."):
            raise RuntimeError("a listener of the user's")

    model, engine = weights(1), weights(50)
    with listening(listener), fw.Publisher(model, address) as publisher:
        fw.Replica(weights(51), address).close()
        with fw.Replica(engine, address) as replica:
            updated(threads, publisher, replica, 1)
            assert holds(engine, 1)


def test_a_watcher_is_told_of_news_however_short_the_silence_allowed(address):
    with (
        fw.Publisher(weights(1), address, silence_seconds=0.2),
        closing(watch(address, timeout_seconds=LIMIT)) as news,
    ):
        for _ in range(20):  # with every beat of the publisher's: four times that silence
            next(news)
