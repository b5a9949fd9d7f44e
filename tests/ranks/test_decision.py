"""One verdict for all processes, whoever is killed, stopped or late, and nothing left behind."""

import errno
import fcntl
import os
import random
import signal
import time
from contextlib import ExitStack, closing

import pytest

from child_processes import Child, resources
from flyweight.errors import PeerLost, SpecError, StoreError
from flyweight.ranks.decision import RoundDecisions, remove_unused

SESSION = "0123456789abcdef"
VERDICT_FILES = {"write", "keep", "commit", "fail"}
PAIRS = [("write", "keep"), ("keep", "write"), ("commit", "fail"), ("fail", "commit")]


@pytest.fixture
def decisions(tmp_path):
    with closing(RoundDecisions.create(tmp_path, SESSION)) as opened:
        yield opened


def stored(directory, session=SESSION):
    """Return the names of the decisions that are stored."""
    return set(os.listdir(directory / f"decisions-{session}")) - VERDICT_FILES


# What a decision is.


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_first_proposal_wins_for_every_process(decisions, tmp_path, first, second):
    with closing(RoundDecisions(tmp_path, SESSION)) as rank:
        assert decisions.decide("a", 1, first) == first
        assert decisions.decide("a", 1, second) == rank.decide("a", 1, second) == first


def test_questions_rounds_and_replicas_are_decided_apart(decisions):
    assert decisions.decide("a", 1, "write") == "write"
    assert decisions.decide("a", 1, "fail") == "fail"
    assert decisions.decide("a", 2, "keep") == "keep"
    assert decisions.decide("b", 1, "commit") == "commit"
    assert decisions.decide("a", 11, "commit") == "commit"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../x", "/etc/x", "a/b", "a\0b", "x" * 10_000, "\ud800", "a.1.write"]
)
def test_a_name_of_a_replica_is_never_a_path(decisions, tmp_path, name):
    assert decisions.decide(name, 1, "commit") == "commit"
    assert decisions.decide(name, 1, "fail") == "commit"
    assert decisions.decide(f"{name}2", 1, "fail") == "fail"
    assert {len(each) for each in stored(tmp_path)} == {len("0" * 32 + ".1.commit")}
    assert os.listdir(tmp_path) == [f"decisions-{SESSION}"]


@pytest.mark.parametrize("session", ["", "..", "../x", "a/b", "a\0", "A", "a" * 65, "a\n"])
def test_a_session_that_is_not_a_number_is_refused(tmp_path, session):
    for opened in (RoundDecisions, RoundDecisions.create):
        with pytest.raises(SpecError, match="hexadecimal"):
            opened(tmp_path, session)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_stores_nothing_and_hides_nothing(decisions, monkeypatch):
    decisions.decide("a", 1, "commit")

    def link(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    assert decisions.decide("a", 1, "fail") == "commit"
    with pytest.raises(StoreError, match="cannot decide round 2 of 'a' .*No space left"):
        decisions.decide("a", 2, "fail")


def test_a_file_that_is_no_decision_is_refused(decisions, tmp_path):
    decisions.decide("a", 1, "commit")
    (name,) = stored(tmp_path)
    path = decisions.path / name
    path.unlink()
    keep = decisions.path / "keep"  # an answer to the other question
    for make in (path.touch, lambda: path.symlink_to("commit"), lambda: path.hardlink_to(keep)):
        make()
        with pytest.raises(StoreError, match="is not a decision"):
            decisions.decide("a", 1, "fail")
        path.unlink()


# Who may see it.


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_the_directory_is_private_whatever_the_umask(tmp_path, umask):
    def create(pipe):
        os.umask(umask)
        decisions = RoundDecisions.create(tmp_path, SESSION)
        verdicts = decisions.decide("a", 1, "commit"), decisions.decide("a", 1, "fail")
        paths = decisions.path, *(decisions.path / name for name in VERDICT_FILES)
        return verdicts, [os.stat(path).st_mode & 0o777 for path in paths]

    with Child(create) as child:
        verdicts, modes = child.result()
    assert modes == [0o700, *[0o600 & ~umask] * 4]
    assert verdicts == ("commit", "commit")


def test_a_directory_that_others_can_enter_is_refused(decisions, tmp_path):
    before = resources()
    decisions.path.chmod(0o755)
    with pytest.raises(SpecError, match="with mode 755; it has to belong to user"):
        RoundDecisions(tmp_path, SESSION)
    assert resources() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(decisions, tmp_path):
    os.chown(decisions.path, 65534, 65534)
    with pytest.raises(SpecError, match="is of user 65534 with mode 700"):
        RoundDecisions(tmp_path, SESSION)


def test_a_link_is_not_followed(decisions, tmp_path):
    (tmp_path / "decisions-b").symlink_to(decisions.path)
    with pytest.raises(StoreError, match="cannot open"):
        RoundDecisions(tmp_path, "b")
    with pytest.raises(StoreError, match="cannot create"):
        RoundDecisions.create(tmp_path, "b")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "write").touch()
    (tmp_path / "decisions-c").symlink_to("mine")
    remove_unused(tmp_path)
    assert os.listdir(tmp_path / "mine") == ["write"]


# Processes.


def test_all_processes_of_a_race_see_the_same_verdicts(decisions, tmp_path):
    num_rounds, num_processes = 3000, 6

    def race(number, pipe):
        choice = random.Random(number)
        proposals = choice.choices(["commit", "fail"], k=num_rounds)
        with closing(RoundDecisions(tmp_path, SESSION)) as mine:
            pipe.send("open")
            pipe.recv()
            return [mine.decide("a", n, each) for n, each in enumerate(proposals)], proposals

    with ExitStack() as stack:
        children = [stack.enter_context(Child(race, n)) for n in range(num_processes)]
        for child in children:
            assert child.told() == "open"
        for child in children:
            child.send("go")
        results = [child.result(60) for child in children]
    verdicts = results[0][0]
    assert all(found == verdicts for found, _ in results)
    assert verdicts == [decisions.decide("a", n, "fail") for n in range(num_rounds)]
    lost = [sum(a != b for a, b in zip(verdicts, asked, strict=True)) for _, asked in results]
    assert sum(count > 0 for count in lost) > 1  # it was a race


def test_ranks_agree_wherever_their_leader_is_killed(tmp_path):
    """The leader is killed at any moment; ranks give it up before, at that moment or after it."""
    num_rounds = 2000

    def lead(file, session, pipe):
        mine = RoundDecisions.create(tmp_path, session)
        pipe.send("open")
        pipe.recv()
        for number in range(num_rounds):
            os.write(file, mine.decide("a", number, "commit")[:1].encode())

    def settle(session, pipe):
        with closing(RoundDecisions(tmp_path, session)) as mine:
            pipe.send("open")
            pipe.recv()
            return [mine.decide("a", number, "fail") for number in reversed(range(num_rounds))]

    ends = set()
    for trial in range(15):
        session, num_early, (readable, writable) = f"{trial:x}", trial % 3, os.pipe()
        with ExitStack() as stack:
            children = [stack.enter_context(Child(lead, writable, session))]
            assert children[0].told() == "open"  # the leader makes what the ranks open
            children += [stack.enter_context(Child(settle, session)) for _ in range(2)]
            os.close(writable)
            leader, *ranks = children
            for rank in ranks:
                assert rank.told() == "open"
            for child in children[: num_early + 1]:
                child.send("go")
            time.sleep(trial * 0.002)
            leader.kill()
            for rank in ranks[num_early:]:
                rank.send("go")
            verdicts, others = (rank.result() for rank in ranks)
            leader.join()
        assert verdicts == others
        verdicts.reverse()
        with open(readable, "rb") as file:
            heard = file.read().decode()  # what the leader could have sent before it died
        assert heard == "".join(verdict[0] for verdict in verdicts[: len(heard)])
        ends.add(verdicts.count("commit"))
        remove_unused(tmp_path)  # the leader may have died last
        assert os.listdir(tmp_path) == []
    assert len(ends) > 5


CALLS = ["mkdir", "open", "close", "chmod", "stat", "link", "unlink", "listdir", "rmdir"]


def kill_at(number):
    """Kill this process at its system call `number` that concerns a directory or a file."""
    left = [number]
    for module, name in [*((os, each) for each in CALLS), (fcntl, "flock")]:
        original = getattr(module, name)

        def call(*args, _original=original, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return _original(*args, **kwargs)

        setattr(module, name, call)


def test_a_leader_killed_at_any_system_call_leaves_one_verdict_and_nothing_to_clean(tmp_path):
    def lead(number, pipe):
        kill_at(number)
        decisions = RoundDecisions.create(tmp_path, SESSION)
        for round_number in (1, 2):
            decisions.begin("a", round_number)
            decisions.decide("a", round_number, "write")
            decisions.decide("a", round_number, "commit")
        decisions.close()

    seen, number, is_killed = set(), 0, True
    while is_killed:
        with Child(lead, number) as child:
            is_killed = child.join() == -signal.SIGKILL
        try:
            with (
                closing(RoundDecisions(tmp_path, SESSION)) as one,
                closing(RoundDecisions(tmp_path, SESSION)) as two,
            ):
                found = one.decide("a", 2, "keep"), one.decide("a", 2, "fail")
                assert found == (two.decide("a", 2, "write"), two.decide("a", 2, "commit"))
                seen.add(found)
        except PeerLost:
            seen.add(None)  # nobody has joined: the leader was killed before, or has closed
        RoundDecisions.create(tmp_path, "b").close()
        assert os.listdir(tmp_path) == []
        number += 1
    assert number > 30
    assert seen == {None, ("keep", "fail"), ("write", "fail"), ("write", "commit")}


def test_a_stopped_process_delays_nobody(decisions, tmp_path):
    def decide(pipe):
        mine = RoundDecisions(tmp_path, SESSION)
        pipe.send("open")
        number = 0
        while True:
            mine.decide("stopped", number := number + 1, "commit")

    with Child(decide) as child:
        assert child.told() == "open"
        for trial in range(20):
            child.stop()
            started = time.monotonic()
            for number in range(10_000 + 50 * trial, 10_050 + 50 * trial):
                decisions.decide("a", number, "fail")
            assert time.monotonic() - started < 2
            child.go_on()


# How long it is kept.


def test_a_verdict_outlives_the_publisher_and_the_next_one_while_a_rank_can_ask(tmp_path):
    first = RoundDecisions.create(tmp_path, "a")
    rank = RoundDecisions(tmp_path, "a")
    first.decide("a", 1, "commit")
    first.close()
    second = RoundDecisions.create(tmp_path, "b")
    assert rank.decide("a", 1, "fail") == "commit"
    assert second.decide("a", 1, "fail") == "fail"  # another session, another round
    rank.close()
    assert os.listdir(tmp_path) == ["decisions-b"]
    second.close()
    assert os.listdir(tmp_path) == []


def test_the_next_publisher_removes_what_killed_processes_left(tmp_path):
    def decide(pipe):
        decisions = RoundDecisions.create(tmp_path, "a")
        decisions.decide("a", 1, "commit")
        pipe.send("decided")
        time.sleep(20)

    with Child(decide) as child:
        assert child.told() == "decided"
        child.kill()
        child.join()
    assert stored(tmp_path, "a")
    with closing(RoundDecisions.create(tmp_path, "b")):
        assert os.listdir(tmp_path) == ["decisions-b"]


def test_the_last_process_removes_the_decisions_even_if_all_close_at_once(tmp_path):
    def close(pipe):
        mine = RoundDecisions(tmp_path, SESSION)
        pipe.send("open")
        pipe.recv()
        mine.close()

    for _ in range(10):
        leader = RoundDecisions.create(tmp_path, SESSION)
        with ExitStack() as stack:
            children = [stack.enter_context(Child(close)) for _ in range(4)]
            for child in children:
                assert child.told() == "open"
            for child in children:
                child.send("close")
            leader.close()
            for child in children:
                child.result()
        assert os.listdir(tmp_path) == []


def test_thousands_of_rounds_leave_the_files_of_one(decisions, tmp_path):
    for number in range(2000):
        decisions.begin("a", number)
        assert decisions.decide("a", number, "keep" if number % 3 else "write")
        assert decisions.decide("a", number, "commit") == "commit"
    assert len(stored(tmp_path)) == 2


def test_replicas_that_come_and_go_leave_the_files_of_those_that_can_ask(decisions, tmp_path):
    """Also if they are killed. A replica that has lost its publisher still finds its verdict."""

    def rank(name, pipe):
        mine = RoundDecisions(tmp_path, SESSION, name)
        pipe.send("opened")
        pipe.recv()
        mine.decide(name, 0, "fail")  # late, and of a round that the leader knows nothing of

    with Child(rank, "stays") as staying:
        assert staying.told() == "opened"
        decisions.begin("stays", 1)
        assert decisions.decide("stays", 1, "commit") == "commit"
        for number, name in enumerate("abcde", 2):
            with Child(rank, name) as going, Child(rank, name) as other:
                assert going.told() == other.told() == "opened"
                decisions.begin(name, number)
                assert decisions.decide(name, number, "write") == "write"
                going.kill()
                going.join()
                other.send("go on")
                other.result()
            assert len(stored(tmp_path)) == 3
        assert decisions.decide("stays", 1, "fail") == "commit"
    decisions.begin("last", 9)
    assert stored(tmp_path) == set()


def test_files_of_others_are_left_alone(decisions, tmp_path):
    (decisions.path / "notes").touch()
    (decisions.path / "keep").unlink()
    (decisions.path / "keep").mkdir()
    (tmp_path / "decisions-Mine").mkdir(mode=0o700)
    (tmp_path / "decisions-c").mkdir(mode=0o755)
    decisions.close()
    assert set(os.listdir(decisions.path)) == {"notes", "keep"}
    RoundDecisions.create(tmp_path, "b").close()
    assert set(os.listdir(tmp_path)) == {decisions.path.name, "decisions-Mine", "decisions-c"}


def test_decisions_that_are_closed_or_were_never_made_are_not_there(decisions, tmp_path):
    before = resources()
    with pytest.raises(PeerLost, match="its publisher has ended"):
        RoundDecisions(tmp_path, "b")
    decisions.close()
    decisions.close()
    asks = {decisions.decide: ("a", 1, "fail"), decisions.begin: ("a", 1)}
    for ask, words in asks.items():
        with pytest.raises(StoreError, match="are closed"):
            ask(*words)
    assert len(resources()["files"]) == len(before["files"]) - 2


def test_a_rank_that_comes_while_the_decisions_are_removed_does_not_join(decisions, tmp_path):
    lock = os.open(decisions.path, os.O_RDONLY)
    try:
        fcntl.flock(decisions._file, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PeerLost, match="were removed"):
            RoundDecisions(tmp_path, SESSION)
    finally:
        os.close(lock)


def test_a_forked_child_neither_decides_nor_keeps_the_decisions(decisions, tmp_path):
    def inherited(pipe):
        with pytest.raises(StoreError, match="are closed"):
            decisions.decide("a", 1, "fail")
        decisions.close()
        pipe.send("closed")
        pipe.recv()

    with Child(inherited) as child:
        assert child.told() == "closed"
        remove_unused(tmp_path)
        assert decisions.decide("a", 1, "commit") == "commit"  # its parent still holds them
        decisions.close()
        assert os.listdir(tmp_path) == []
        child.send("end")
        child.result()
