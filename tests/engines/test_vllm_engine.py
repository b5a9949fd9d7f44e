"""VllmEngine with a stand-in for vLLM that fails where the real one cannot be made to."""

import threading
import time

import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from fake_vllm import FakeVllm, arrays, holds
from flyweight.engines.vllm import VllmEngine, publish_to, update_all
from flyweight.engines.vllm_control import _ROUTES, HttpControl
from flyweight.engines.vllm_workers import VllmWorkers
from flyweight.errors import (
    Busy,
    LifecycleError,
    MissingDependency,
    PeerFailed,
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.events import listening
from flyweight.lifecycle.states import State
from flyweight.ports import UpdateOptions

pytestmark = pytest.mark.check


@pytest.fixture
def vllm(request):
    num_workers, num_engines = getattr(request, "param", (2, 1))
    with FakeVllm(num_workers, num_engines=num_engines) as made:
        yield made


every_size = pytest.mark.parametrize(
    "vllm",
    [(1, 1), (2, 1), (1, 2)],
    ids=["one worker", "two workers", "two engines"],
    indirect=True,
)


@pytest.fixture
def publisher(address):
    model = arrays(1)
    with fw.Publisher(model, address, keep="in_place") as made:
        made.model = model
        yield made


@pytest.fixture
def stuck():
    """What a route does that never answers."""
    is_over = threading.Event()
    yield lambda: is_over.wait(LIMIT) and None
    is_over.set()


def publish(publisher, version):
    """Publish a version that stays available."""
    publisher.withdraw()
    for name, array in arrays(version).items():
        publisher.model[name][:] = array
    publisher.publish(version)
    return version


def are_at(vllm, version):
    return all(holds(each, version) for each in vllm.workers)


@every_size
def test_an_update_stages_pauses_loads_names_and_resumes_in_this_order(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    assert (engine.operations.state, engine.version) == (State.SERVING, None)
    vllm.calls.clear()
    report = engine.update(publish(publisher, 1))
    steps = [each for each in vllm.calls if each not in ("/collective_rpc", "/is_paused")]
    assert steps == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert are_at(vllm, 1)
    assert (vllm.version, engine.version, report.version) == ("1", 1, 1)
    assert report.nbytes == len(vllm.workers) * 6 * 8 * 16 * 4
    assert engine.operations.pause_seconds > 0


@every_size
def test_versions_follow_each_other_also_by_another_controller(vllm, publisher, address):
    first = VllmEngine(vllm.address, address)
    first.update(publish(publisher, 1))
    second = VllmEngine(vllm.address, address)
    assert second.version == 1
    second.update(publish(publisher, 2))
    assert are_at(vllm, 2)


@every_size
@pytest.mark.parametrize(
    "route", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_call_that_fails_while_weights_are_written_fails_the_engine_until_an_update_succeeds(
    vllm, publisher, address, route
):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    vllm.faults[route] = (500, '{"error": "no"}')
    with pytest.raises(TransportError):
        engine.update(publish(publisher, 2), timeout_seconds=LIMIT)
    assert engine.operations.state is State.FAILED
    assert engine.version is None
    assert vllm.is_paused
    for resume in (lambda: engine.resume(2), engine.operations.resume):
        with pytest.raises(LifecycleError):
            resume()
    del vllm.faults[route]
    engine.update(publish(publisher, 3))
    assert engine.operations.state is State.SERVING
    assert are_at(vllm, 3)
    assert (vllm.version, vllm.is_paused) == ("3", False)


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/pause", "/is_paused"])
def test_a_call_that_fails_before_weights_are_written_costs_nothing(
    vllm, publisher, address, route
):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    vllm.faults[route] = (500, "no")
    with pytest.raises(TransportError, match="500"):
        engine.update(publish(publisher, 2), timeout_seconds=LIMIT)
    assert engine.operations.state is State.SERVING
    assert are_at(vllm, 1)
    assert not vllm.is_paused
    vllm.faults.clear()
    engine.update(publish(publisher, 3))
    assert are_at(vllm, 3)


def test_an_engine_that_cannot_resume_stays_paused_with_its_version(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    vllm.faults["/resume"] = (500, "no")
    with pytest.raises(TransportError):
        engine.update(publish(publisher, 1))
    assert (engine.operations.state, engine.version) == (State.PAUSED, 1)
    vllm.faults.clear()
    engine.operations.resume()
    assert engine.operations.state is State.SERVING


@every_size
def test_a_restart_is_noticed_before_and_during_an_update(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    vllm.restart()
    with pytest.raises(PeerLost, match="(?s)restarted.*version 1"):
        engine.update(1)
    assert engine.version is None
    assert vllm.is_paused, "the weights of its start are not served in place of version 1"
    engine.update(1)
    assert are_at(vllm, 1)
    vllm.faults["/pause"] = lambda: vllm.restart()  # None: the route answers as ever
    with pytest.raises((PeerLost, LifecycleError, VersionError)):
        engine.update(publish(publisher, 2))
    vllm.faults.clear()
    assert engine.operations.state is State.FAILED
    update_until_it_works(engine, 2)
    assert are_at(vllm, 2)


def update_until_it_works(engine, version):
    for _ in range(3):
        try:
            return engine.update(version)
        except PeerLost:
            pass
    raise AssertionError


def test_a_restart_of_a_vllm_that_was_never_updated_is_not_held_against_it(vllm, address):
    engine = VllmEngine(vllm.address, address)
    vllm.restart()
    with pytest.raises(PeerLost, match="restarted"):
        engine.update(1, timeout_seconds=LIMIT)
    assert not vllm.is_paused


@every_size
def test_a_worker_that_ends_with_something_else_fails_the_engine(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))

    def lie():
        vllm.workers[vllm.num_workers - 1].extra = {"version": 1}

    vllm.faults["/start_weight_update"] = lie
    with pytest.raises(VersionError, match="update to 2"):
        engine.update(publish(publisher, 2))
    assert engine.operations.state is State.FAILED
    assert vllm.version == "1"


def test_workers_that_stage_different_versions_are_refused(publisher, address):
    with FakeVllm(2) as vllm:
        engine = VllmEngine(vllm.address, address)
        vllm.workers[1].extra = {"version": 9}
        with pytest.raises(VersionError, match="staged"):
            engine.update(publish(publisher, 2))
        assert engine.operations.state is State.SERVING
        assert "/pause" not in vllm.calls


def test_an_update_that_another_controller_takes_over_is_told_so(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    publish(publisher, 1)
    fault = iter([lambda: vllm.workers[0].begin(request("other", address))])

    def interfere():
        for each in fault:
            each()

    begun = vllm.answer

    def answer(path, query, body):
        found = begun(path, query, body)
        if path == "/init_weight_transfer_engine":
            interfere()
        return found

    vllm.answer = answer
    with pytest.raises(Busy, match="another"):
        engine.update(1, timeout_seconds=LIMIT)
    assert "/pause" not in vllm.calls


def request(update, address):
    return {
        "update": update, "address": address, "name": "other", "version": 1, "held": None,
        "may_keep": False, "verify": False, "staging_bytes": None, "timeout_seconds": 5.0,
    }  # fmt: skip


def test_an_update_left_open_by_a_killed_controller_is_ended_first(vllm, publisher, address):
    for each in vllm.workers:
        each.is_open = True
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    assert are_at(vllm, 1)


def test_a_vllm_that_stops_answering_ends_the_update_soon_after_its_deadline(
    vllm, publisher, address, stuck, monkeypatch
):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    publish(publisher, 2)
    for name in ("vllm_engine", "vllm_workers"):  # no other limit ends the wait
        monkeypatch.setattr(f"flyweight.engines.{name}.CALL_SECONDS", 3 * LIMIT)
    monkeypatch.setattr(VllmWorkers.look, "__defaults__", (3 * LIMIT,))
    vllm.faults["/collective_rpc"] = stuck
    with in_time(1.0), pytest.raises(TransferTimeout):
        engine.update(2, timeout_seconds=1)
    assert (engine.operations.state, vllm.is_paused) == (State.SERVING, False)
    vllm.faults.clear()
    engine.update(2)
    assert are_at(vllm, 2)


@every_size
def test_a_version_that_another_controller_has_brought_is_kept(vllm, publisher, address):
    VllmEngine(vllm.address, address).update(publish(publisher, 1))
    second = VllmEngine(vllm.address, address)
    vllm.calls.clear()
    for _ in range(2):
        assert second.update(1).version == 1
    assert "/pause" not in vllm.calls
    assert (second.operations.state, second.version) == (State.SERVING, 1)
    vllm.is_paused = True  # as by a controller that was killed before it resumed
    third = VllmEngine(vllm.address, address)
    assert third.operations.state is State.CLEARED
    assert third.update(1).version == 1
    assert (third.operations.state, vllm.is_paused, are_at(vllm, 1)) == (State.SERVING, False, True)


@pytest.mark.parametrize("left", [{"is_open": True}, {"is_whole": False}], ids=str)
def test_what_another_controller_has_left_is_not_resumed(vllm, publisher, address, left):
    engine = VllmEngine(vllm.address, address)
    engine.update(publish(publisher, 1))
    engine.operations.pause()
    for each in vllm.workers:
        vars(each).update(left)
    with pytest.raises(LifecycleError, match="another"):
        engine.operations.resume()
    assert vllm.is_paused
    engine.update(publish(publisher, 2))
    assert (are_at(vllm, 2), engine.operations.state) == (True, State.SERVING)
    assert not vllm.is_paused


@pytest.mark.parametrize("num_workers", [1, 2])
def test_data_parallel_engines_commit_together_although_one_is_seen(
    publisher, address, num_workers
):
    with FakeVllm(num_workers, num_engines=2) as vllm:
        engine = VllmEngine(vllm.address, address)
        engine.update(publish(publisher, 1))
        assert are_at(vllm, 1)
        vllm.workers[-1].loader.error = ValueError("a worker of the second engine")
        with pytest.raises(LifecycleError, match="second engine"):
            engine.update(publish(publisher, 2), timeout_seconds=LIMIT)
        assert (engine.operations.state, vllm.version) == (State.FAILED, "1")
        assert vllm.is_paused
        vllm.workers[-1].loader.error = None
        engine.update(2)
        assert are_at(vllm, 2)


def test_a_server_of_some_of_the_data_parallel_engines_is_refused(address):
    with FakeVllm(num_engines=2) as vllm:
        vllm.workers[0].extra = {"balancing": "hybrid"}
        with pytest.raises(LifecycleError, match="data parallel"):
            VllmEngine(vllm.address, address)


def test_a_server_of_one_of_the_data_parallel_engines_is_updated_alone(publisher, address):
    with FakeVllm() as vllm:
        vllm.workers[0].extra = {"balancing": "external"}
        vllm.faults["/get_world_size"] = (200, {"world_size": 8})
        engine = VllmEngine(vllm.address, address)
        engine.update(publish(publisher, 1))
        assert are_at(vllm, 1)


def test_an_engine_that_is_not_paused_is_not_updated(vllm, publisher, address):
    engine = VllmEngine(vllm.address, address)
    with pytest.raises(LifecycleError, match="paused"):
        engine.take(UpdateOptions(version=publish(publisher, 1), timeout_seconds=LIMIT))
    assert "/start_weight_update" not in vllm.calls
    assert not any(each.model for each in vllm.workers)
    engine.update(1)
    assert are_at(vllm, 1)


def test_a_paused_vllm_is_found_paused_and_the_first_update_resumes_it(vllm, publisher, address):
    vllm.is_paused = True
    engine = VllmEngine(vllm.address, address)
    assert engine.operations.state is State.CLEARED
    engine.update(publish(publisher, 1))
    assert (engine.operations.state, vllm.is_paused) == (State.SERVING, False)


@every_size
def test_a_worker_follows_the_trainer_and_a_restarted_vllm_catches_up(
    vllm, publisher, address, tmp_path
):
    engine = VllmEngine(vllm.address, address)
    publish(publisher, 1)
    with fw.Worker(engine, engine, tmp_path / "cell", is_serving=True) as worker:
        until(lambda: are_at(vllm, 1) and worker.operations.state is State.SERVING)
        publish(publisher, 2)
        until(lambda: are_at(vllm, 2) and worker.operations.state is State.SERVING)
        events = []
        with listening(events.append):
            vllm.restart()
            until(lambda: are_at(vllm, 2) and worker.operations.state is State.SERVING)
        states = [each.fields["state"] for each in events if each.kind == "state.changed"]
        assert State.FAILED in states, "it did not count as serving what it had lost"
        assert not vllm.is_paused


def test_cancel_ends_a_wait_and_the_next_update_works(vllm, publisher, address, threads):
    engine = VllmEngine(vllm.address, address)
    update = threads.submit(engine.update, 77, timeout_seconds=3 * LIMIT)
    until(lambda: all(each.update is not None for each in vllm.workers))
    engine.cancel()
    with pytest.raises(TransferTimeout):
        update.result(LIMIT)
    engine.update(publish(publisher, 1))
    assert are_at(vllm, 1)


@every_size
def test_cancel_ends_a_wait_for_a_trainer_that_is_not_there(vllm, address, threads):
    engine = VllmEngine(vllm.address, address)
    update = threads.submit(engine.update, 1, timeout_seconds=3 * LIMIT)
    until(lambda: all(each.update is not None for each in vllm.workers))
    engine.cancel()
    with pytest.raises(TransferTimeout):
        update.result(LIMIT)
    until(lambda: all(each.update.status()["state"] == "failed" for each in vllm.workers))


def test_publishing_to_engines_waits_for_those_that_come_and_for_no_others(publisher, address):
    with FakeVllm() as first, FakeVllm(2) as second, FakeVllm() as third:
        engines = [VllmEngine(each.address, address) for each in (first, second, third)]
        third.faults["/collective_rpc"] = (500, "no")
        began = time.monotonic()
        results = publish_to(engines, publisher, 1, timeout_seconds=3 * LIMIT)
        assert time.monotonic() - began < LIMIT, "it waited for the one that never comes"
        assert [each.error is None for each in results] == [True, True, False]
        assert isinstance(results[2].error, PeerFailed)
        assert are_at(first, 1)
        assert are_at(second, 1)
        assert [each.report.nbytes for each in results[:2]] == [3072, 6144]


def test_no_engines_are_updated_at_once():
    assert update_all([]) == []


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ((500, "x" * 5000), PeerFailed, "/is_paused.*500"),
        ((200, "no json"), PeerFailed, "JSON"),
        ((200, "[" * 100_000), PeerFailed, "JSON"),
        ((200, "[1]"), PeerFailed, r"\[1\]"),
        ((200, b"\xff\xfe"), PeerFailed, "JSON"),
        ((404, '{"detail":"Not Found"}'), PeerFailed, "404"),
    ],
    ids=["500", "no json", "deep", "list", "bytes", "404"],
)
def test_strange_answers_are_errors_with_their_place(fault, kind, text):
    with FakeVllm() as vllm:
        vllm.faults["/is_paused"] = fault
        control = HttpControl(vllm.address)
        with pytest.raises(kind, match=text) as raised:
            control.is_paused(time.monotonic() + LIMIT)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("status", [[], ["text"], [{}], None, [None]], ids=str)
def test_a_status_that_is_none_of_ours_means_that_the_backend_is_not_there(status, address):
    with FakeVllm() as vllm:
        vllm.faults["/collective_rpc"] = (200, {"results": status})
        with pytest.raises(LifecycleError, match="--weight-transfer-config"):
            VllmEngine(vllm.address, address)


def test_workers_with_another_version_of_flyweight_are_named(address):
    with FakeVllm() as vllm:
        status = vllm.workers[0].status()
        del status["is_whole"]
        vllm.faults["/collective_rpc"] = (200, {"results": [status]})
        with pytest.raises(LifecycleError, match="is_whole"):
            VllmEngine(vllm.address, address)


def test_a_server_that_does_not_answer_ends_the_call_at_its_deadline(stuck):
    with FakeVllm() as vllm:
        vllm.faults["/is_paused"] = stuck
        control = HttpControl(vllm.address)
        with in_time(0.2), pytest.raises(TransferTimeout):
            control.is_paused(time.monotonic() + 0.2)
        vllm.faults.clear()
        with pytest.raises(TransferTimeout, match="time"):
            control.is_paused(time.monotonic())


def test_a_vllm_without_the_routes_is_refused_by_their_names(address):
    refused = pytest.raises(MissingDependency, match="/pause, /resume")
    with FakeVllm(routes=_ROUTES[3:]) as vllm, refused:
        VllmEngine(vllm.address, address)


@pytest.mark.parametrize(
    "options",
    [
        {"in_flight": "later"},
        {"staging_bytes": -1},
        {"staging_bytes": 1.5},
        {"name": 3},
        {"tls": {"server_key": "a"}},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, address):
    with FakeVllm() as vllm, pytest.raises(SpecError):
        VllmEngine(vllm.address, address, **options)


@pytest.mark.parametrize("server", ["unix:x", "http://", "ftp://a:1", "", None, 8000], ids=str)
def test_what_is_no_server_is_refused(server, address):
    with pytest.raises(SpecError):
        VllmEngine(server, address)
