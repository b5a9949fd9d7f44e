"""Requests to an engine: each has one version from its beginning to its end, wherever it runs.

Threads, asyncio tasks, generators that move between threads, and a web server that streams: a
pause waits for all of them, and whatever begins after it waits for the next version.
"""

import asyncio
import contextvars
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.errors import LifecycleError, SpecError, TransferTimeout
from versioned_models import assign, holds, weights


@pytest.fixture
def engine():
    engine = fw.ModelEngine({"w": np.ones(4)})
    engine.resume(1)
    return engine


def is_closed(engine):
    """True if a request that is inside no other would have to wait."""

    def probe():
        with engine.request(0):
            pass

    try:
        contextvars.Context().run(probe)
    except LifecycleError:
        return True
    return False


class Pause:
    """A pause in a thread of its own, which has closed the gate; it may not have returned yet."""

    def __init__(self, engine):
        self.error = None
        self._thread = threading.Thread(target=self._pause, args=(engine,))
        self._thread.start()
        until(lambda: is_closed(engine))

    def _pause(self, engine):
        try:
            engine.pause(time.monotonic() + LIMIT)
        except TransferTimeout as error:
            self.error = error

    @property
    def has_returned(self):
        return not self._thread.is_alive()

    def join(self):
        self._thread.join(LIMIT)
        assert self.has_returned
        assert self.error is None


def check_waits(engine, end):
    """A pause waits for what runs now, and returns once `end` was called."""
    running, pause = engine.num_running, Pause(engine)
    assert not pause.has_returned
    assert engine.num_running == running > 0
    end()
    pause.join()
    assert engine.num_running == 0


def in_thread(function):
    """Call a function in a thread of its own, which ends afterwards."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(LIMIT)


# Counted, wherever they run.


def test_two_tasks_on_one_thread_are_two_requests(engine):
    """The second of them was not counted: a pause returned, and weights changed under it."""

    async def main():
        has_begun, may_end = [asyncio.Event() for _ in "ab"], [asyncio.Event() for _ in "ab"]

        async def answer(number):
            with engine.request():
                has_begun[number].set()
                await may_end[number].wait()

        tasks = [asyncio.create_task(answer(number)) for number in (0, 1)]
        for each in has_begun:
            await each.wait()
        assert engine.num_running == 2
        pause = Pause(engine)
        may_end[0].set()
        await tasks[0]
        assert engine.num_running == 1
        assert not pause.has_returned
        may_end[1].set()
        await tasks[1]
        await asyncio.to_thread(pause.join)

    asyncio.run(main())


def stream(engine, steps=3):
    with engine.request(LIMIT) as version:
        for _ in range(steps):
            yield version


def test_a_generator_that_moved_to_another_thread_leaves_nothing_in_the_first(engine):
    """The first thread was taken to be inside it for ever, and passed a closed gate."""
    with ThreadPoolExecutor(1) as first:
        generator = stream(engine)
        first.submit(next, generator).result(LIMIT)
        assert in_thread(lambda: list(generator)) == [1, 1]
        assert engine.num_running == 0
        engine.pause(time.monotonic())
        late = first.submit(lambda: list(stream(engine)))
        with pytest.raises(FutureTimeout):
            late.result(0.05)  # on a slow machine it may not wait yet: not seen, never red
        engine.resume(2)
        assert late.result(LIMIT) == [2, 2, 2]


@pytest.mark.parametrize("close", [lambda each: each.close(), lambda each: list(each)])
def test_a_generator_ends_its_request_in_whatever_context_it_is_closed(engine, close):
    generator = stream(engine)
    contextvars.copy_context().run(next, generator)
    check_waits(engine, lambda: contextvars.Context().run(close, generator))


def test_a_generator_that_is_dropped_ends_its_request(engine):
    held = [stream(engine)]
    next(held[0])
    check_waits(engine, lambda: in_thread(held.clear))


def test_generators_of_one_thread_that_end_in_any_order_are_all_counted(engine):
    first, second, third = stream(engine), stream(engine), stream(engine)
    for each in (first, second, third):
        next(each)
    assert engine.num_running == 3
    first.close()
    third.close()
    check_waits(engine, second.close)
    assert is_closed(engine)
    with pytest.raises(LifecycleError, match="accepted no requests"), engine.request(0):
        pass


def test_what_a_request_leaves_behind_in_a_context_does_not_keep_the_model():
    engine = fw.ModelEngine({"w": np.ones(4)})
    engine.resume(1)
    generator, found = stream(engine), weakref.ref(engine)
    next(generator)
    in_thread(generator.close)  # this context still knows of it
    del engine, generator
    gc.collect()
    assert found() is None


def test_requests_that_always_overlap_keep_no_trail_of_those_that_ended(engine):
    kind, last = type(engine.request()), stream(engine)
    next(last)
    for _ in range(200):
        newer = stream(engine)
        next(newer)
        last.close()
        last = newer
    gc.collect()
    assert sum(type(each) is kind for each in gc.get_objects()) < 20
    last.close()


# Inside each other.


def test_a_request_inside_an_open_one_passes_a_closed_gate_with_its_version(engine):
    with engine.request() as outer:
        pause = Pause(engine)
        with engine.request(0) as inner, engine.request(0) as innermost:
            assert inner == innermost == outer == 1
            assert not pause.has_returned
        assert not pause.has_returned
    pause.join()


def test_a_request_keeps_the_version_of_the_one_around_it_whatever_the_engine_is_told(engine):
    with engine.request():
        engine.resume(2)
        with engine.request() as version:
            assert version == 1
        assert in_thread(lambda: next(stream(engine))) == 2


def test_the_drain_waits_for_a_request_that_outlives_the_one_around_it(engine):
    with engine.request():
        generator = stream(engine)
        next(generator)
    check_waits(engine, generator.close)


def test_a_request_passes_inside_one_that_outlived_the_one_around_it(engine):
    with engine.request():
        generator = stream(engine)
        next(generator)
    pause = Pause(engine)
    with engine.request(0) as version:
        assert version == 1
    generator.close()
    pause.join()


def test_a_request_is_inside_the_outer_one_though_a_generator_between_them_has_ended(engine):
    with engine.request():
        generator = stream(engine)
        next(generator)
        in_thread(generator.close)
        pause = Pause(engine)
        with engine.request(0) as version:
            assert version == 1
    pause.join()


def test_a_child_task_is_inside_only_while_the_outer_request_is_open(engine):
    async def main():
        is_closed, has_passed, has_ended = (asyncio.Event() for _ in range(3))

        async def child():
            await is_closed.wait()
            async with engine.request(0) as version:
                assert version == 1
            has_passed.set()
            await has_ended.wait()
            with pytest.raises(LifecycleError, match="accepted no requests"):
                async with engine.request(0):
                    pass
            async with engine.request(LIMIT) as version:
                return version

        async with engine.request():
            task = asyncio.create_task(child())
            pause = await asyncio.to_thread(Pause, engine)
            is_closed.set()
            await asyncio.wait_for(has_passed.wait(), LIMIT)
        await asyncio.to_thread(pause.join)
        has_ended.set()
        for _ in range(10):  # turns of the loop: it has come to the gate
            await asyncio.sleep(0)
        assert not task.done()
        engine.resume(2)
        assert await task == 2

    asyncio.run(main())


def test_a_thread_of_to_thread_is_inside_the_request_of_its_task(engine):
    def step():
        with engine.request(0) as version:
            return version

    async def main():
        async with engine.request() as outer:
            pause = await asyncio.to_thread(Pause, engine)
            assert await asyncio.to_thread(step) == outer
            assert not pause.has_returned
        await asyncio.to_thread(pause.join)
        with pytest.raises(LifecycleError, match="accepted no requests"):
            await asyncio.to_thread(step)

    asyncio.run(main())


def test_a_request_to_another_engine_is_inside_nothing(engine):
    other = fw.ModelEngine({"w": np.ones(4)})
    other.resume(7)
    with engine.request(), other.request() as version:
        assert version == 7
        pauses = Pause(engine), Pause(other)
        with engine.request(0) as inner, other.request(0) as again:
            assert (inner, again) == (1, 7)
    for pause in pauses:
        pause.join()
    other.resume(8)
    with other.request(0), pytest.raises(LifecycleError), engine.request(0):
        pass


# At a closed gate.


def test_async_with_waits_without_blocking_the_loop_and_a_resume_of_another_thread_wakes_it(engine):
    engine.pause(time.monotonic())

    async def main():
        began = asyncio.Event()

        async def answer():
            began.set()
            async with engine.request(3 * LIMIT) as version:
                return version

        tasks = [asyncio.create_task(answer()) for _ in range(20)]
        await began.wait()
        for _ in range(10):  # the loop goes on
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        await asyncio.to_thread(engine.resume, 2)
        assert await asyncio.wait_for(asyncio.gather(*tasks), LIMIT) == [2] * 20

    asyncio.run(main())
    assert engine.num_running == 0


def test_async_with_ends_at_its_deadline(engine):
    engine.pause(time.monotonic())

    async def main():
        with pytest.raises(LifecycleError, match="accepted no requests"):
            async with engine.request(0.05):
                pass

    asyncio.run(main())
    engine.resume(2)
    check_free(engine)


def test_a_gate_that_closes_again_before_a_task_ran_keeps_it_waiting(engine):
    engine.pause(time.monotonic())
    errors = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, error: errors.append(error))

        async def answer():
            async with engine.request(LIMIT) as version:
                return version

        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        for version in (2, 3):
            engine.resume(version)
            engine.pause(time.monotonic())
        for _ in range(10):  # turns of the loop: it has come to the gate
            await asyncio.sleep(0)
        assert not task.done()
        engine.resume(4)
        assert await asyncio.wait_for(task, LIMIT) == 4

    asyncio.run(main())
    assert errors == []


def test_a_plain_with_on_an_event_loop_is_refused_at_a_closed_gate(engine):
    async def main():
        with engine.request() as version:
            assert version == 1
        engine.pause(time.monotonic())
        with pytest.raises(LifecycleError, match="async with"), engine.request(LIMIT):
            pass

    asyncio.run(main())


def check_free(engine):
    """Nothing of a request is left: the engine can be paused at once, and serve again."""
    assert engine.num_running == 0
    engine.pause(time.monotonic())
    engine.resume(9)
    with engine.request(0) as version:
        assert version == 9


def test_a_task_that_is_cancelled_at_the_gate_leaves_nothing_behind(engine):
    engine.pause(time.monotonic())

    async def main():
        async def answer():
            async with engine.request(LIMIT):
                pytest.fail("it was cancelled")

        async def cancelled():
            task = asyncio.create_task(answer())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=LIMIT)
            assert task.cancelled()

        def num_futures():
            gc.collect()
            return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())

        await cancelled()
        before = num_futures()
        for _ in range(20):
            await cancelled()
        assert num_futures() <= before
        # Cancelled after the gate opened for it, and before it ran.
        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        engine.resume(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    check_free(engine)


def test_a_task_that_waits_when_its_loop_ends_leaves_nothing_behind(engine):
    engine.pause(time.monotonic())

    async def main():
        async def answer():
            async with engine.request(LIMIT):
                pytest.fail("its loop is gone")

        main.task = asyncio.create_task(answer())  # asyncio.run cancels it
        await asyncio.sleep(0)

    asyncio.run(main())
    engine.resume(2)
    check_free(engine)


def test_a_task_that_is_cancelled_inside_its_request_ends_it(engine):
    async def main():
        has_begun = asyncio.Event()

        async def answer():
            async with engine.request():
                has_begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(answer())
        await has_begun.wait()
        pause = await asyncio.to_thread(Pause, engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(pause.join)

    asyncio.run(main())
    engine.resume(2)
    check_free(engine)


def test_an_exception_ends_the_request_and_is_raised(engine):
    with pytest.raises(ZeroDivisionError), engine.request():
        1 / 0

    async def main():
        with pytest.raises(ZeroDivisionError):
            async with engine.request():
                1 / 0

    asyncio.run(main())
    check_free(engine)


def test_a_request_is_good_for_one_block(engine):
    async def entered(request):
        async with request:
            pass

    engine.pause(time.monotonic())
    late = engine.request(0)
    with pytest.raises(LifecycleError, match="accepted no requests"), late:
        pass
    engine.resume(1)
    request, other = engine.request(), engine.request()
    with request, pytest.raises(LifecycleError, match="was entered before"), request:
        pass
    asyncio.run(entered(other))
    for used in (request, other, late):
        with pytest.raises(LifecycleError, match="call engine.request\\(\\) for another"), used:
            pass
        with pytest.raises(LifecycleError, match="was entered before"):
            asyncio.run(entered(used))
        used.__exit__(None, None, None)  # and ends once
    engine.request().__exit__(None, None, None)
    check_free(engine)


@pytest.mark.parametrize("seconds", [None, -1, float("inf"), float("nan")])
def test_a_wait_has_a_deadline(engine, seconds):
    with pytest.raises(SpecError, match="timeout_seconds"):
        engine.request(seconds)


@pytest.mark.check
def test_a_forked_child_finds_the_engine_usable_whatever_other_threads_did(engine):
    """A lock that another thread holds at the fork is nobody's in the child."""
    is_over = threading.Event()

    def ask_on():
        while not is_over.is_set():
            with engine.request():
                pass

    def ask(pipe):
        with engine.request(LIMIT) as version:
            return version

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            for _ in range(15):
                with Child(ask) as child:
                    assert child.result() == 1
        finally:
            is_over.set()
    for each in asking:
        each.result(LIMIT)


# With a trainer that publishes meanwhile.

NUM_VERSIONS = 12


@contextmanager
def served(address, tmp_path, *, must_publish=NUM_VERSIONS):
    """Yield an engine that follows a trainer, its model, and whether the trainer is done."""
    model, trained, is_over = weights(0), weights(1), threading.Event()
    engine = fw.ModelEngine(model)

    def train(publisher):
        try:
            for version in range(1, must_publish + 1):
                assign(trained, version)
                publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
                # What answers has to be asked with it before the next one comes.
                until(lambda version=version: version in asked or is_over.is_set())
        finally:
            is_over.set()

    asked = set()
    with (
        fw.Publisher(trained, address) as publisher,
        fw.Replica(model, address) as replica,
        fw.Worker(engine, replica, tmp_path / "engine.cell") as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        training = pool.submit(train, publisher)
        try:
            yield engine, model, asked, is_over
        finally:
            was_over = is_over.is_set()
            is_over.set()
        training.result(LIMIT)
        assert was_over
        assert worker.operations.failure is None
    assert engine.num_running == 0


def test_each_asyncio_request_sees_one_version_while_a_trainer_publishes(address, tmp_path):
    with served(address, tmp_path) as (engine, model, asked, is_over):

        async def ask_on(number):
            is_first = True
            while is_first or not is_over.is_set():
                async with engine.request(LIMIT) as version:
                    is_first = False
                    for step in range(3 + number):
                        assert holds(model, version), f"step {step} of {version}"
                        await asyncio.sleep(0)
                    assert await asyncio.to_thread(nested, version)
                asked.add(version)

        def nested(version):
            with engine.request(LIMIT) as inner:
                return inner == version and holds(model, version)

        async def main():
            await asyncio.gather(*(ask_on(number) for number in range(6)))

        asyncio.run(main())
        assert asked == set(range(1, NUM_VERSIONS + 1))


def test_each_generator_sees_one_version_though_every_step_is_on_another_thread(address, tmp_path):
    with served(address, tmp_path) as (engine, model, asked, is_over):

        def answer():
            with engine.request(LIMIT) as version:
                for _ in range(4):
                    yield version, holds(model, version)

        def ask_on(number):
            while True:
                generator, told = answer(), []
                with suppress(StopIteration):
                    while True:
                        number += 1
                        told.append(pools[number % 2].submit(next, generator).result(LIMIT))
                assert told == [(told[0][0], True)] * 4
                asked.add(told[0][0])
                if is_over.is_set():
                    return

        # A thread for each: one that waits at the gate must not be in the way of one that runs.
        with ThreadPoolExecutor(3) as one, ThreadPoolExecutor(3) as two:
            pools = one, two
            with ThreadPoolExecutor(3) as askers:
                for each in [askers.submit(ask_on, number) for number in range(3)]:
                    each.result(LIMIT)
        assert asked == set(range(1, NUM_VERSIONS + 1))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_streaming_response_is_of_one_version_from_its_first_byte_to_its_last(
    kind, address, tmp_path
):
    """Starlette runs each step of a plain generator in any thread of its pool."""
    applications = pytest.importorskip("starlette.applications")
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    with served(address, tmp_path) as (engine, model, asked, is_over):

        def plain():
            with engine.request(LIMIT) as version:
                for _ in range(4):
                    yield f"{version} {holds(model, version)} {os.getpid()}\n"

        async def awaiting():
            async with engine.request(LIMIT) as version:
                for _ in range(4):
                    yield f"{version} {holds(model, version)} {os.getpid()}\n"
                    await asyncio.sleep(0)

        async def answer(request):
            return StreamingResponse(plain() if kind == "def" else awaiting())

        app = applications.Starlette(routes=[Route("/", answer)])
        with web_server(app) as port, ThreadPoolExecutor(4) as clients:

            def ask_on():
                is_first = True
                while is_first or not is_over.is_set():
                    is_first = False
                    told = got(port).split("\n")[:-1]
                    version = told[0].split()[0]
                    assert told == [f"{version} True {os.getpid()}"] * 4
                    asked.add(int(version))

            for each in [clients.submit(ask_on) for _ in range(4)]:
                each.result(LIMIT)
        assert asked == set(range(1, NUM_VERSIONS + 1))


def got(port):
    """Return the body of an answer."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.status == 200
        return response.read().decode()
    finally:
        connection.close()


@contextmanager
def web_server(app):
    """Serve an application with uvicorn, in a thread; yield its port."""
    import socket

    import uvicorn

    config = uvicorn.Config(app, log_config=None, loop="asyncio", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(LIMIT)
            assert not thread.is_alive()
