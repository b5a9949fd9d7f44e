"""Events: listeners learn who comes, takes a version and leaves."""

import logging

from child_processes import LIMIT, until
from flyweight.errors import LifecycleError
from flyweight.events import listening
from flyweight.live import Publisher, Replica
from live.one_process import TOKEN, in_background, model, raising, reader, taken

SHOWN = ("replica.joined", "serve.done", "replica.lost")


def test_listeners_of_a_trainer_learn_who_joins_takes_a_version_fails_and_leaves():
    events = []

    def error_of(event):
        return event.fields.get("error", "")

    with (
        listening(lambda event: events.append(event) if event.kind in SHOWN else None),
        Publisher(model(), "tcp://127.0.0.1:0", token=TOKEN) as publisher,
    ):
        with reader(model(), publisher.address, name="engine") as replica:
            taken(publisher, 1, replica)
            refuse = raising(ValueError("not now"))
            with in_background(replica.update, before=refuse, timeout_seconds=LIMIT) as result:
                until(lambda: publisher.waiting)
                publisher.publish(2)
                assert isinstance(result(), LifecycleError)
        until(lambda: len(events) == 4)
    assert [each.kind for each in events] == [SHOWN[0], SHOWN[1], SHOWN[1], SHOWN[2]]
    assert {(each.fields["name"], each.fields["rank"]) for each in events} == {("engine", 0)}
    assert [each.fields["version"] for each in events[1:3]] == [1, 2]
    assert not error_of(events[1])
    assert "not now" in error_of(events[2])


def test_an_engine_that_goes_back_to_an_older_version_says_so(tmp_path, caplog):
    address, events = f"unix:{tmp_path}", []
    with (
        listening(lambda event: events.append(event) if "went_back" in event.kind else None),
        caplog.at_level(logging.WARNING),
        Replica(model(), address, name="engine") as replica,
    ):
        for version in (7, 3):
            with Publisher(model(), address) as publisher:
                taken(publisher, version, replica)
    assert [(each.fields["version"], each.fields["before"]) for each in events] == [(3, 7)]
    assert "engine went back from version 7 to 3" in caplog.text


def test_a_listener_that_fails_harms_nobody(caplog):
    def fail(event):
        raise ValueError("no listener")

    with (
        Publisher(model(), "tcp://127.0.0.1:0", token=TOKEN) as publisher,
        listening(fail),
        reader(model(), publisher.address, name="engine") as replica,
    ):
        report, _ = taken(publisher, 1, replica)
    assert not report.failed
    assert "a listener of replica.joined failed" in caplog.text
