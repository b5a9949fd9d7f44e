"""A reader that is stopped costs the trainer one deadline, once, and others nothing."""

import pytest

from child_processes import LIMIT, in_time
from live.live_processes import check_holds, check_next_update, shared

DEADLINE = 1.0


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("stop_at", ["before", "copy"])
def test_a_stopped_reader_costs_one_deadline_and_commits_nothing_torn(processes, stop_at, verify):
    """Invariants 7 and 11."""
    trainer = processes.trainer(make=shared, verify=verify)
    address = trainer.told()
    stopped, other = (processes.engine(address, name=name) for name in ("stopped", "other"))
    for each in (stopped, other):
        each.told()
    check_next_update([trainer], [stopped, other], 1)

    for each, point in ((stopped, stop_at), (other, None)):
        each.send(("update", {"timeout_seconds": LIMIT, "stop_at": point}))
    with in_time(DEADLINE):
        trainer.send(("publish", 2, {"waiting": 2, "timeout_seconds": DEADLINE}))
        assert stopped.told() == stop_at
        stopped.stop()
        check_holds(other.told(), 2)  # it was served at once
        report = trainer.told()
    assert [each.name for each in report.replicas] == ["other"]
    assert report.pending == ("stopped",)

    other.send(("update", {"timeout_seconds": LIMIT}))
    trainer.send(("publish", 3, {"num_replicas": 1, "timeout_seconds": 600}))  # or it would hang
    check_holds(other.told(), 3)
    assert not trainer.told().failed

    stopped.send("go on")
    stopped.go_on()
    found = stopped.told()
    if stop_at == "before":  # nothing was written
        check_holds(found, 1)
        assert "ended the lease" in found["error"]
    else:
        assert (found["version"], found["state"]) == (None, "FAILED")
        assert ("DigestMismatch" if verify else "HandleGone") in found["error"]
    check_next_update([trainer], [stopped, other], 4)


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
@pytest.mark.parametrize("keep", ["memory", "in_place"])
def test_a_reader_stopped_before_it_asks_costs_nothing(processes, transport, keep):
    trainer = processes.trainer(keep=keep, make=shared)
    address = trainer.told()
    stopped, other = (
        processes.engine(address, name=name, transport=transport) for name in ("stopped", "other")
    )
    for each in (stopped, other):
        each.told()
    check_next_update([trainer], [other], 1)
    stopped.stop()
    check_next_update([trainer], [other], 2)
    stopped.go_on()
    check_next_update([trainer], [stopped, other], 3)
