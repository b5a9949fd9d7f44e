"""One verdict for all processes, whoever is killed, stopped or late, and nothing left behind."""

import errno
import fcntl
import os
import random
import signal
from contextlib import ExitStack, closing

import pytest

from child_processes import Child, resources
from flyweight.errors import SpecError, StoreError
from flyweight.ranks import decision
from flyweight.ranks.decision import RoundDecisions, remove_unused

SESSION = "0123456789abcdef"
VERDICT_FILES = {"write", "keep", "commit", "fail"}
PAIRS = [("write", "keep"), ("keep", "write"), ("commit", "fail"), ("fail", "commit")]


@pytest.fixture
def decisions(tmp_path):
    with closing(RoundDecisions(tmp_path, SESSION, "a")) as opened:
        yield opened


def stored(directory, session=SESSION):
    """Return the names of the decisions that are stored."""
    return set(os.listdir(directory / f"decisions-{session}")) - VERDICT_FILES


# What a decision is.


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_first_proposal_wins_for_every_process(decisions, tmp_path, first, second):
    with closing(RoundDecisions(tmp_path, SESSION, "a")) as rank:
        assert decisions.decide(1, first) == first
        assert decisions.decide(1, second) == rank.decide(1, second) == first


def test_questions_rounds_and_replicas_are_decided_apart(decisions, tmp_path):
    assert decisions.decide(1, "write") == "write"
    assert decisions.decide(1, "fail") == "fail"
    assert decisions.decide(2, "keep") == "keep"
    assert decisions.decide(11, "commit") == "commit"
    with closing(RoundDecisions(tmp_path, SESSION, "b")) as other:
        assert other.decide(1, "commit") == "commit"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../x", "/etc/x", "a/b", "a\0b", "x" * 10_000, "\ud800", "a.1.write"]
)
def test_a_name_of_a_replica_is_never_a_path(tmp_path, name):
    with (
        closing(RoundDecisions(tmp_path, SESSION, name)) as one,
        closing(RoundDecisions(tmp_path, SESSION, f"{name}2")) as two,
    ):
        assert one.decide(1, "commit") == one.decide(1, "fail") == "commit"
        assert two.decide(1, "fail") == "fail"
        assert {len(each) for each in stored(tmp_path)} == {len("0" * 32 + ".1.commit")}
        assert os.listdir(tmp_path) == [f"decisions-{SESSION}"]


@pytest.mark.parametrize("session", ["", "..", "../x", "a/b", "a\0", "A", "a" * 65, "a\n"])
def test_a_session_that_is_not_a_number_is_refused(tmp_path, session):
    with pytest.raises(SpecError, match="hexadecimal"):
        RoundDecisions(tmp_path, session, "a")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_stores_nothing_and_hides_nothing(decisions, monkeypatch):
    decisions.decide(1, "commit")

    def link(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    assert decisions.decide(1, "fail") == "commit"
    with pytest.raises(StoreError, match="No space left"):
        decisions.decide(2, "fail")


def test_a_file_that_is_no_decision_is_refused(decisions, tmp_path):
    decisions.decide(1, "commit")
    (name,) = stored(tmp_path)
    path = decisions.path / name
    path.unlink()
    keep = decisions.path / "keep"  # an answer to the other question
    for make in (path.touch, lambda: path.symlink_to("commit"), lambda: path.hardlink_to(keep)):
        make()
        with pytest.raises(StoreError, match="is not a decision"):
            decisions.decide(1, "fail")
        path.unlink()


# Who may see it.


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_the_directory_is_private_whatever_the_umask(tmp_path, umask):
    def create(pipe):
        os.umask(umask)
        decisions = RoundDecisions(tmp_path, SESSION, "a")
        verdicts = decisions.decide(1, "commit"), decisions.decide(1, "fail")
        paths = decisions.path, *(decisions.path / name for name in VERDICT_FILES)
        return verdicts, [os.stat(path).st_mode & 0o777 for path in paths]

    with Child(create) as child:
        verdicts, modes = child.result()
    assert modes == [0o700, *[0o600 & ~umask] * 4]
    assert verdicts == ("commit", "commit")


def test_a_directory_that_others_can_enter_is_refused(decisions, tmp_path):
    before = resources()
    decisions.path.chmod(0o755)
    with pytest.raises(SpecError, match="mode 755"):
        RoundDecisions(tmp_path, SESSION, "a")
    assert resources() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(decisions, tmp_path):
    os.chown(decisions.path, 65534, 65534)
    with pytest.raises(SpecError, match="user 65534"):
        RoundDecisions(tmp_path, SESSION, "a")


def test_a_link_is_not_followed(decisions, tmp_path):
    (tmp_path / "decisions-b").symlink_to(decisions.path)
    with pytest.raises(StoreError, match="cannot open"):
        RoundDecisions(tmp_path, "b", "a")
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
        with closing(RoundDecisions(tmp_path, SESSION, "a")) as mine:
            pipe.send("open")
            pipe.recv()
            return [mine.decide(n, each) for n, each in enumerate(proposals)], proposals

    with ExitStack() as stack:
        children = [stack.enter_context(Child(race, n)) for n in range(num_processes)]
        for child in children:
            assert child.told() == "open"
        for child in children:
            child.send("go")
        results = [child.result() for child in children]
    verdicts = results[0][0]
    assert all(found == verdicts for found, _ in results)
    assert verdicts == [decisions.decide(n, "fail") for n in range(num_rounds)]
    lost = [sum(a != b for a, b in zip(verdicts, asked, strict=True)) for _, asked in results]
    assert sum(count > 0 for count in lost) > 1  # it was a race


@pytest.mark.parametrize(
    "num_trials",
    [pytest.param(3, marks=pytest.mark.check), pytest.param(15, marks=pytest.mark.campaign)],
)
def test_ranks_agree_wherever_one_of_them_is_killed(tmp_path, num_trials):
    """One rank hears commits, and is killed at any moment; others have lost their publisher."""
    num_rounds = 2000

    def hear(file, session, pipe):
        mine = RoundDecisions(tmp_path, session, "a")
        pipe.send("open")
        pipe.recv()
        for number in range(num_rounds):
            os.write(file, mine.decide(number, "commit")[:1].encode())

    def settle(session, pipe):
        with closing(RoundDecisions(tmp_path, session, "a")) as mine:
            pipe.send("open")
            pipe.recv()
            return [mine.decide(number, "fail") for number in reversed(range(num_rounds))]

    for trial in range(num_trials):
        session, num_early, (readable, writable) = f"{trial:x}", trial % 3, os.pipe()
        with ExitStack() as stack:
            children = [stack.enter_context(Child(hear, writable, session))]
            children += [stack.enter_context(Child(settle, session)) for _ in range(2)]
            os.close(writable)
            hearing, *ranks = children
            for each in children:
                assert each.told() == "open"
            for child in children[: num_early + 1]:
                child.send("go")
            obeyed = b""
            while len(obeyed) < 40 * trial:
                obeyed += os.read(readable, 1 << 16)
            hearing.kill()
            for rank in ranks[num_early:]:
                rank.send("go")
            verdicts, others = (rank.result() for rank in ranks)
            hearing.join()
        assert verdicts == others
        verdicts.reverse()
        with open(readable, "rb") as file:
            obeyed = (obeyed + file.read()).decode()  # what it may have done before it died
        assert obeyed == "".join(verdict[0] for verdict in verdicts[: len(obeyed)])
        remove_unused(tmp_path)  # it may have died last
        assert os.listdir(tmp_path) == []


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


@pytest.mark.check
def test_a_rank_killed_at_any_system_call_leaves_one_verdict_and_nothing_to_clean(tmp_path):
    def take_part(number, pipe):
        kill_at(number)
        decisions = RoundDecisions(tmp_path, SESSION, "a")
        for round_number in (1, 2):
            decisions.begin(round_number)
            decisions.decide(round_number, "write")
            decisions.decide(round_number, "commit")
        decisions.close()

    def opened():
        return closing(RoundDecisions(tmp_path, SESSION, "a"))

    seen, number, is_killed = set(), 0, True
    while is_killed:
        is_killed = False
        # With and without another rank that has opened them before.
        for is_alone in (True, False):
            with ExitStack() as stack:
                others = [] if is_alone else [stack.enter_context(opened()) for _ in range(2)]
                with Child(take_part, number) as child:
                    is_killed |= child.join() == -signal.SIGKILL
                one, two = others or [stack.enter_context(opened()) for _ in range(2)]
                found = one.decide(2, "keep"), one.decide(2, "fail")
                assert found == (two.decide(2, "write"), two.decide(2, "commit"))
                seen.add((is_alone, found))
            RoundDecisions(tmp_path, "b", "a").close()
            assert os.listdir(tmp_path) == []
        number += 1
    assert number > 30
    # The first to open them after a killed process, with nobody else, makes them anew.
    after = {("keep", "fail"), ("write", "fail"), ("write", "commit")}
    assert seen == {(True, ("keep", "fail")), *((False, each) for each in after)}


def test_a_stopped_process_delays_nobody(decisions, tmp_path):
    def decide(pipe):
        mine = RoundDecisions(tmp_path, SESSION, "stopped")
        pipe.send("open")
        number = 0
        while True:
            mine.decide(number := number + 1, "commit")

    with Child(decide) as child:
        assert child.told() == "open"
        for trial in range(20):
            child.stop()
            for number in range(10_000 + 50 * trial, 10_050 + 50 * trial):
                decisions.decide(number, "fail")
            child.go_on()


# How long it is kept.


def test_a_verdict_outlives_the_rank_that_stored_it_while_another_can_ask(tmp_path):
    first = RoundDecisions(tmp_path, "a", "a")
    rank = RoundDecisions(tmp_path, "a", "a")
    first.decide(1, "commit")
    first.close()
    second = RoundDecisions(tmp_path, "b", "a")
    assert rank.decide(1, "fail") == "commit"
    assert second.decide(1, "fail") == "fail"  # another session, another round
    rank.close()
    assert os.listdir(tmp_path) == ["decisions-b"]
    second.close()
    assert os.listdir(tmp_path) == []


def test_whoever_opens_the_directory_next_removes_what_killed_processes_left(tmp_path):
    def decide(pipe):
        decisions = RoundDecisions(tmp_path, "a", "a")
        decisions.decide(1, "commit")
        pipe.send("decided")
        signal.pause()

    with Child(decide) as child:
        assert child.told() == "decided"
        child.kill()
        child.join()
    assert stored(tmp_path, "a")
    with closing(RoundDecisions(tmp_path, "b", "a")):
        assert os.listdir(tmp_path) == ["decisions-b"]


def test_the_last_process_removes_the_decisions_even_if_all_close_at_once(tmp_path):
    def close(pipe):
        mine = RoundDecisions(tmp_path, SESSION, "a")
        pipe.send("open")
        pipe.recv()
        mine.close()

    for _ in range(10):
        first = RoundDecisions(tmp_path, SESSION, "a")
        with ExitStack() as stack:
            children = [stack.enter_context(Child(close)) for _ in range(4)]
            for child in children:
                assert child.told() == "open"
            for child in children:
                child.send("close")
            first.close()
            for child in children:
                child.result()
        assert os.listdir(tmp_path) == []


def test_thousands_of_rounds_leave_the_files_of_one(decisions, tmp_path):
    for number in range(2000):
        decisions.begin(number)
        assert decisions.decide(number, "keep" if number % 3 else "write")
        assert decisions.decide(number, "commit") == "commit"
    assert len(stored(tmp_path)) == 2


def test_replicas_that_come_and_go_leave_the_files_of_those_that_can_ask(decisions, tmp_path):
    """Also if they are killed. A replica that has lost its publisher still finds its verdict."""

    def rank(name, number, pipe):
        mine = RoundDecisions(tmp_path, SESSION, name)
        mine.begin(number)
        mine.decide(number, "commit")
        pipe.send("decided")
        pipe.recv()
        mine.decide(0, "fail")  # late, and of a round that nobody knows of

    decisions.begin(1)
    with Child(rank, "stays", 1) as staying:
        assert staying.told() == "decided"
        for number, name in enumerate("bcdef", 2):
            with Child(rank, name, number) as going, Child(rank, name, number) as other:
                assert going.told() == other.told() == "decided"
                going.kill()
                going.join()
                other.send("go on")
                other.result()
            assert len(stored(tmp_path)) == 3
        with closing(RoundDecisions(tmp_path, SESSION, "stays")) as sibling:
            assert sibling.decide(1, "fail") == "commit"
            sibling.begin(2)  # those of the others, and of the last round
            assert stored(tmp_path) == set()
            assert sibling.decide(2, "write") == "write"
    with closing(RoundDecisions(tmp_path, SESSION, "last")) as last:
        last.begin(9)
    assert stored(tmp_path) == set()


def test_files_of_others_are_left_alone(decisions, tmp_path):
    (decisions.path / "notes").touch()
    (decisions.path / "keep").unlink()
    (decisions.path / "keep").mkdir()
    (tmp_path / "decisions-Mine").mkdir(mode=0o700)
    (tmp_path / "decisions-c").mkdir(mode=0o755)
    decisions.close()
    assert set(os.listdir(decisions.path)) == {"notes", "keep"}
    RoundDecisions(tmp_path, "b", "a").close()
    assert set(os.listdir(tmp_path)) == {decisions.path.name, "decisions-Mine", "decisions-c"}


def test_decisions_that_are_closed_are_not_there(decisions):
    before = resources()
    decisions.close()
    decisions.close()
    asks = {decisions.decide: (1, "fail"), decisions.begin: (1,)}
    for ask, words in asks.items():
        with pytest.raises(StoreError, match="are closed"):
            ask(*words)
    assert len(resources()["files"]) == len(before["files"]) - 2


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="missing"):
        RoundDecisions(tmp_path / "missing", SESSION, "a")


def test_a_rank_whose_decisions_were_removed_takes_part_in_no_round(decisions, tmp_path):
    decisions.begin(1)
    moved = decisions.path.rename(tmp_path / "moved")
    with pytest.raises(StoreError, match="removed"):
        decisions.begin(2)
    other = RoundDecisions(tmp_path, SESSION, "a")
    with closing(other), pytest.raises(StoreError, match="removed"):
        decisions.begin(2)
    for each in moved.iterdir():
        each.unlink()
    moved.rmdir()
    with pytest.raises(StoreError, match="cannot decide"):
        decisions.decide(1, "commit")


def test_one_file_for_two_verdicts_is_refused(decisions, tmp_path):
    (decisions.path / "fail").unlink()
    (decisions.path / "fail").hardlink_to(decisions.path / "commit")
    with pytest.raises(StoreError, match="two verdicts"):
        RoundDecisions(tmp_path, SESSION, "a")


def test_a_rank_that_comes_while_the_decisions_are_removed_waits_and_makes_them_anew(
    decisions, tmp_path, monkeypatch
):
    lock = os.open(decisions.path, os.O_RDONLY)
    try:
        fcntl.flock(decisions._file, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(decision, "_TRIES", 2)
            with pytest.raises(StoreError, match="locked"):
                RoundDecisions(tmp_path, SESSION, "a")

        def remove(_):
            for name in os.listdir(decisions.path):
                (decisions.path / name).unlink()
            decisions.path.rmdir()

        monkeypatch.setattr(decision, "sleep", remove)
        with closing(RoundDecisions(tmp_path, SESSION, "a")) as rank:
            assert rank.decide(1, "commit") == "commit"
    finally:
        os.close(lock)


@pytest.mark.parametrize(("where", "call"), [(decision, "opened"), (fcntl, "flock")])
def test_a_directory_that_another_process_removes_while_it_is_opened_is_made_anew(
    tmp_path, monkeypatch, where, call
):
    original, path, calls = getattr(where, call), tmp_path / f"decisions-{SESSION}", []

    def removed(*args):
        calls.append(args)
        if len(calls) == 1:
            path.rename(tmp_path / "removed")
        return original(*args)

    monkeypatch.setattr(where, call, removed)
    with (
        closing(RoundDecisions(tmp_path, SESSION, "a")) as one,
        closing(RoundDecisions(tmp_path, SESSION, "a")) as two,
    ):
        assert one.decide(1, "commit") == two.decide(1, "fail") == "commit"


def test_ranks_that_come_and_go_at_once_always_share_their_decisions(tmp_path):
    """Directories are made and removed all the time; two ranks that are open see the same one."""
    num_trials = 150

    def come_and_go(is_proposing, pipe):
        found = []
        for number in range(num_trials):
            mine = RoundDecisions(tmp_path, SESSION, "a")
            pipe.send("open")
            pipe.recv()
            found.append(mine.decide(number, "commit" if is_proposing else "fail"))
            mine.close()
        return found

    with Child(come_and_go, True) as one, Child(come_and_go, False) as two:
        for _ in range(num_trials):
            assert one.told() == two.told() == "open"
            one.send("go")
            two.send("go")
        assert one.result() == two.result()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_neither_decides_nor_keeps_the_decisions(decisions, tmp_path):
    def inherited(pipe):
        with pytest.raises(StoreError, match="are closed"):
            decisions.decide(1, "fail")
        decisions.close()
        pipe.send("closed")
        pipe.recv()

    with Child(inherited) as child:
        assert child.told() == "closed"
        remove_unused(tmp_path)
        assert decisions.decide(1, "commit") == "commit"  # its parent still holds them
        decisions.close()
        assert os.listdir(tmp_path) == []
        child.send("end")
        child.result()
