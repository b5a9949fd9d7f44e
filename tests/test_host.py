"""Which boot this is, how many files there may be, whose are exposed: all modes, all owners."""

import os
import resource
import uuid

import pytest

from child_processes import Child
from flyweight.host import boot_id, exposure, has_room, identity, opened, raise_file_limit


def found(mode, user):
    return os.stat_result((0o100000 | mode, 1, 1, 1, user, user, 0, 0, 0, 0))


def test_a_boot_has_one_name_for_all_processes_of_a_machine():
    name = boot_id()
    assert str(uuid.UUID(name)) == name
    with Child(lambda pipe: boot_id()) as child:
        assert child.result() == name


@pytest.mark.parametrize("bits", [0o077, 0o022])
def test_a_file_is_exposed_if_others_have_one_of_the_bits(bits):
    for mode in range(0o1000):
        told = exposure(found(mode, os.geteuid()), bits=bits)
        assert bool(told) == bool(mode & bits)
        assert told in ("", f"is of user {os.geteuid()} with mode {mode:o}")


def test_a_file_of_another_user_is_exposed_whatever_its_mode():
    other = os.geteuid() + 12345
    for mode in range(0o1000):
        assert exposure(found(mode, other)) == f"is of user {other} with mode {mode:o}"


def test_a_file_of_root_is_as_private_as_our_own():
    assert exposure(found(0o600, 0)) == ""
    assert exposure(found(0o640, 0)) == "is of user 0 with mode 640"


def test_a_file_that_is_really_there_is_looked_at(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    assert exposure(path.stat()) == ""
    path.chmod(0o604)
    assert exposure(path.stat()) == f"is of user {os.geteuid()} with mode 604"


def limited(more, pipe):
    """How many more files are said to fit, how many do, and whether the limit can be raised yet."""
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 100
    hard = soft + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(number for number in range(hard + 1) if has_room(number))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = []
    try:
        while True:
            files.append(opened(os.devnull, os.O_RDONLY))
    except OSError:
        return room, len(files), raise_file_limit()


@pytest.mark.parametrize("more", [0, 100])
def test_there_is_room_for_as_many_files_as_can_be_opened_up_to_the_hard_limit(more):
    with Child(limited, more) as child:
        room, num_opened, is_raised = child.result()
    assert room == num_opened >= 90 + more
    assert not is_raised


def test_a_host_is_its_boot_unless_the_environment_names_it(monkeypatch):
    monkeypatch.delenv("FLYWEIGHT_HOST", raising=False)
    assert identity() == boot_id()
    monkeypatch.setenv("FLYWEIGHT_HOST", "")
    assert identity() == boot_id()
    monkeypatch.setenv("FLYWEIGHT_HOST", "a")
    assert identity() == "a"
