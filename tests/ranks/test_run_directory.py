"""The directory that the ranks of an engine share, and how they prove it."""

import os
import subprocess
import sys

import pytest

from child_processes import LIMIT
from flyweight.errors import SpecError, StoreError
from flyweight.ranks import run_directory as module
from flyweight.ranks.run_directory import directory_id, run_directory


@pytest.fixture
def environment(monkeypatch):
    """Set or unset the variables that name the directory."""

    def change(**variables):
        for name in ("FLYWEIGHT_RUN_DIR", "XDG_RUNTIME_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return change


def test_the_directory_is_the_one_that_the_user_names(environment, tmp_path):
    environment(FLYWEIGHT_RUN_DIR=tmp_path / "a" / "b", XDG_RUNTIME_DIR=tmp_path)
    assert run_directory() == run_directory() == tmp_path / "a" / "b"
    environment(XDG_RUNTIME_DIR=tmp_path)
    assert run_directory() == tmp_path / "flyweight"
    assert os.stat(tmp_path / "flyweight").st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/at/all"])
def test_a_directory_of_the_session_that_does_not_exist_is_not_used(environment, value):
    environment(XDG_RUNTIME_DIR=value)
    assert str(run_directory()) == f"/tmp/flyweight-{os.geteuid()}"


def test_a_directory_that_others_can_enter_is_refused(environment, tmp_path):
    environment(FLYWEIGHT_RUN_DIR=tmp_path)
    tmp_path.chmod(0o755)
    with pytest.raises(SpecError, match="mode 755"):
        run_directory()
    environment(XDG_RUNTIME_DIR=tmp_path)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "flyweight").symlink_to("mine")  # as another user could in /tmp
    with pytest.raises(SpecError, match="directory"):
        run_directory()
    (tmp_path / "file").touch()
    environment(FLYWEIGHT_RUN_DIR=tmp_path / "file" / "below")
    with pytest.raises(StoreError, match="FLYWEIGHT_RUN_DIR"):
        run_directory()


def test_a_directory_has_one_id_under_all_its_names_and_no_other_has_it(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (tmp_path / "link").symlink_to("one")
    assert directory_id(one) == directory_id(tmp_path / "link") != directory_id(two)
    here = directory_id(one)
    monkeypatch.setattr(module, "boot_id", lambda: "another host")
    assert directory_id(one) != here
    with pytest.raises(StoreError, match="missing"):
        directory_id(tmp_path / "missing")


IN_CONTAINER = """
set -e
mount -t tmpfs none "$1"
"$0" "$2" "$1"
mkdir "$1/shared"
mount --bind "$3" "$1/shared"
"$0" "$2" "$1/shared"
"""
SHOW = """
import sys
from flyweight.ranks.run_directory import directory_id
print(directory_id(sys.argv[1]))
"""


def test_containers_have_the_same_id_only_if_they_have_the_same_directory(tmp_path):
    own, shared, script = tmp_path / "own", tmp_path / "shared", tmp_path / "show.py"
    own.mkdir()
    shared.mkdir()
    script.write_text(SHOW)
    command = ["unshare", "--mount", "sh", "-c", IN_CONTAINER, sys.executable, own, script, shared]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if (done.returncode and "not permitted" in done.stderr) or "denied" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr
    inside = done.stdout.split()
    assert inside[0] != directory_id(own)
    assert inside[1] == directory_id(shared)
