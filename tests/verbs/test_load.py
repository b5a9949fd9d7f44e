import os
import re
import resource
import shutil
import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, run_python
from conftest import drop_cache, flip, odd_arrays, random_bytes, same, zeros_like
from flyweight.errors import (
    ChecksumMismatch,
    DTypeMismatch,
    PlanError,
    ShapeMismatch,
    SnapshotNotFound,
    SpecError,
    StoreError,
    VersionError,
)
from flyweight.events import listening


def test_the_newest_version_is_loaded_unless_another_is_asked_for(run):
    target = zeros_like(odd_arrays())
    assert fw.load(run, into=target).version == 5
    assert same(target, odd_arrays(5))
    assert fw.load(run, into=target, version=2).version == 2
    assert same(target, odd_arrays(2))


def test_an_opened_source_loads_too(run):
    target = zeros_like(odd_arrays())
    with fw.open(run, version=1) as source:
        fw.load(source, into=target)
        with pytest.raises(VersionError, match="holds version 1, not 2"):
            fw.load(source, into=target, version=2)
        assert same(target, odd_arrays(1))
        shutil.rmtree(run)  # its files stay open between loads
        target = zeros_like(odd_arrays())
        fw.load(source, into=target)
    assert same(target, odd_arrays(1))


def test_the_report_says_what_was_done(run):
    report = fw.load(run, into=zeros_like(odd_arrays()))
    nbytes = sum(array.nbytes for array in odd_arrays().values())
    assert (report.format, report.version, report.num_tensors) == ("snapshot", 5, 9)
    assert report.nbytes == report.read_bytes == report.checked_bytes == nbytes
    assert report.seconds > 0
    assert report.gb_per_second > 0
    assert fw.load(run, into=zeros_like(odd_arrays()), should_verify=False).checked_bytes == 0


# C13: what does not fit is refused before anything is written.


def refused(run, change, error, message, **options):
    target = {name: np.ones_like(array) for name, array in odd_arrays().items()}
    change(target)
    with pytest.raises(error, match=message):
        fw.load(run, into=target, **options)
    assert all((array == 1).all() for array in target.values() if array.dtype != bool)


def test_c13_another_dtype_is_a_type_error_with_both(run):
    def change(target):
        target["reversed"] = np.ones(9, np.float32)

    refused(run, change, DTypeMismatch, "'reversed' is f64 in .* and f32 in the target")
    refused(run, change, TypeError, "1 tensors differ in dtype")


def test_c13_another_shape_is_a_value_error_with_both(run):
    def change(target):
        target["reversed"] = np.ones((3, 3))

    refused(run, change, ShapeMismatch, r"'reversed' is \(9,\) in .* and \(3, 3\) in the target")
    refused(run, change, ValueError, "1 tensors differ in shape")


def test_c13_a_tensor_that_no_source_covers_is_an_error_unless_it_is_vouched_for(run):
    def change(target):
        target["more"] = np.ones(2)

    refused(run, change, PlanError, "target wants 1 tensors that .* lacks: 'more'")
    target = zeros_like(odd_arrays()) | {"more": np.ones(2)}
    report = fw.load(run, into=target, partial_over=4)
    assert report.kept == ["more"]
    assert target.pop("more").tolist() == [1, 1]
    assert same(target, odd_arrays(5))


def test_c13_a_tensor_the_target_lacks_is_refused_or_counted(run):
    def change(target):
        del target["flag"]

    refused(run, change, PlanError, "has 1 tensors that the target lacks: 'flag'.*extra='report'")
    target = zeros_like(odd_arrays())
    del target["flag"]
    assert fw.load(run, into=target, extra="report").unused == ["flag"]


def test_c35_c36_a_state_dict_loads_from_a_checkpoint_with_more_keys(tmp_path, caplog):
    """C35, C36: by the keywords of Paddle's calls; what was left out is told three ways."""
    saved = {"w": np.arange(6.0), "b": np.ones(2), "head": {"w": np.zeros(3)}, "step": 7}
    assert fw.save_state_dict(state_dict=saved, path=tmp_path / "run").version == 0
    target = {"w": np.zeros(6)}
    events = []
    with listening(events.append), caplog.at_level("WARNING", "flyweight.verbs"):
        report = fw.load_state_dict(state_dict=target, path=tmp_path / "run")
    assert target["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert report.unused == ["b", "head.w"]
    (event,) = [each for each in events if each.kind == "load.unused"]
    assert (event.fields["num_tensors"], event.fields["names"]) == (2, "'b', 'head.w'")
    (line,) = caplog.messages
    assert re.search(r"run.* has 2 tensors that the target lacks: 'b', 'head.w'", line)

    with pytest.raises(PlanError, match="has 2 tensors that the target lacks: 'b', 'head.w'"):
        fw.load_state_dict(target, tmp_path / "run", extra="refuse")
    with pytest.raises(PlanError, match="target wants 1 tensors .* lacks: 'more'"):
        fw.load_state_dict({**target, "more": np.zeros(1)}, tmp_path / "run")
    assert fw.load_state_dict({**saved, "step": 0}, tmp_path / "run").unused == []
    assert len(caplog.messages) == 1


def test_many_faults_are_counted_and_five_are_named(run):
    target = {f"w{n}": np.zeros(1) for n in range(8)}
    with pytest.raises(PlanError, match="8 tensors.*'w0', 'w1', 'w2', 'w3', 'w4' and 3 more"):
        fw.load(run, into=target)


def test_a_value_the_source_lacks_is_missing_too(run):
    target = zeros_like(odd_arrays()) | {"step": 3}
    with pytest.raises(PlanError, match="'step'"):
        fw.load(run, into=target)


@pytest.mark.parametrize("path", ["gone", "gone/deeper"])
def test_a_path_that_is_not_there_is_a_file_not_found(tmp_path, path):
    with pytest.raises(SnapshotNotFound, match="is not there"):
        fw.load(tmp_path / path, into={"a": np.zeros(1)})
    with pytest.raises(FileNotFoundError):
        fw.load(tmp_path / path, into={"a": np.zeros(1)})


def test_a_directory_without_permission_is_named(run, tmp_path):
    """As a user whom modes stop: root is let in everywhere."""
    run.chmod(0)
    code = (
        "import os, sys, numpy as np, flyweight as fw\n"
        "fw.load, fw.FlyweightError\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: fw.load(sys.argv[1], into={'a': np.zeros(1)})\n"
        "except fw.FlyweightError as error: print(type(error).__name__, error)\n"
    )
    for parent in [run.parent, *run.parent.parents]:
        if parent.owner() == run.owner() and parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o005)
        if str(parent) == "/tmp":
            break
    done = run_python(code, run, check=True)
    run.chmod(0o700)
    assert done.stdout.startswith("StoreError cannot list"), done.stdout + done.stderr
    assert "Permission denied" in done.stdout


@pytest.mark.parametrize("should_verify", [True, False])
def test_a_tensor_wanted_twice_beside_one_not_wanted_at_all(tmp_path, should_verify):
    """The bytes to be moved add up to those of the window, and are not those of the window."""
    shared = random_bytes(1000, 1)
    source = {"a": shared, "b": shared, "x": random_bytes(1000, 2), "y": random_bytes(1000, 3)}
    fw.save(source, tmp_path)
    target = {name: np.zeros(1000, np.uint8) for name in ("a", "b", "y")}
    fw.load(tmp_path, into=target, extra="report", should_verify=should_verify)
    assert all(target[name].tobytes() == source[name].tobytes() for name in target)


# Damage found on the way.


def damaged(place, nbytes):
    """A snapshot of one tensor whose last byte is wrong."""
    fw.save({"w": random_bytes(nbytes)}, place)
    part = place / "v0000000000" / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    return part


@pytest.mark.parametrize("is_cold", [False, True])
def test_damage_after_the_first_write_is_told_as_such(tmp_path, is_cold):
    part = damaged(tmp_path, 64 << 20)
    part.read_bytes() if not is_cold else drop_cache(part)
    target = {"w": np.zeros(64 << 20, np.uint8)}
    with pytest.raises(ChecksumMismatch, match="must not be used before a whole load") as refusal:
        fw.load(tmp_path, into=target)
    assert "bytes had been written" in str(refusal.value)
    assert target["w"].any()


def test_damage_in_the_first_chunk_that_is_read_from_disk_leaves_the_target_untouched(tmp_path):
    drop_cache(damaged(tmp_path, 3 << 20))  # one chunk, too long for read-ahead of the head
    target = {"w": np.zeros(3 << 20, np.uint8)}
    with pytest.raises(ChecksumMismatch, match="the target was not touched"):
        fw.load(tmp_path, into=target)
    assert not target["w"].any()


def test_damage_read_in_place_is_told_even_in_the_first_chunk(tmp_path):
    damaged(tmp_path, 1000).read_bytes()
    target = {"w": np.zeros(1000, np.uint8)}
    with pytest.raises(ChecksumMismatch, match="1000 bytes had been written"):
        fw.load(tmp_path, into=target)


def test_without_verification_damage_passes_as_asked(tmp_path):
    fw.save({"w": random_bytes(1000)}, tmp_path)
    part = tmp_path / "v0000000000" / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    target = {"w": np.zeros(1000, np.uint8)}
    fw.load(tmp_path, into=target, should_verify=False)
    assert np.count_nonzero(target["w"] != random_bytes(1000)) == 1


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_way_of_reading_gives_the_same_bytes(tmp_path, is_cold, unbuffered, num_threads):
    shapes = [(3001, 1001), (1, 5_000_001), (100, 3, 7), (9_000_001,)]
    source = {f"w{i}": random_bytes(int(np.prod(s)), i).reshape(s) for i, s in enumerate(shapes)}
    fw.save(source, tmp_path, part_bytes=8 << 20)
    if is_cold:
        for part in tmp_path.glob("*/*.safetensors"):
            drop_cache(part)
    target = zeros_like(source)
    fw.load(tmp_path, into=target, unbuffered=unbuffered, num_threads=num_threads)
    assert same(target, source)


def test_transposed_targets_larger_than_a_chunk_are_filled(tmp_path):
    source = random_bytes(12 << 20).view(np.float32).reshape(1536, -1)
    fw.save({"w": source}, tmp_path)
    target = np.zeros(source.shape[::-1], np.float32).T
    fw.load(tmp_path, into={"w": target})
    assert target.tobytes() == source.tobytes()


# Memory.


@pytest.mark.parametrize("is_cold", [False, True])
def test_extra_memory_stays_within_the_budget_for_one_tensor_larger_than_it(tmp_path, is_cold):
    """In a process of its own, so that the peak is its own: 256 MiB tensor, 16 MiB budget."""
    fw.save({"w": random_bytes(256 << 20)}, tmp_path)
    if is_cold:
        drop_cache(next(tmp_path.glob("*/*.safetensors")))
    code = """
import sys, numpy as np, flyweight as fw
def anonymous():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line[:8] in ("RssAnon:", "RssShmem")) << 10
target = {"w": np.ones(256 << 20, np.uint8)}
fw.load(sys.argv[2], into={"w": np.ones(4, np.uint8)})   # what importing and starting threads takes
before = anonymous()
peak = 0
import threading
done = threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch); watcher.start()
fw.load(sys.argv[1], into=target, memory_bytes=16 << 20)
done.set(); watcher.join()
print(peak - before)
"""
    fw.save({"w": random_bytes(4)}, tmp_path / "small")
    done = run_python(code, tmp_path, tmp_path / "small", timeout=100, check=True)
    assert int(done.stdout) < (16 << 20) + (2 << 20)


def test_a_budget_below_a_chunk_is_refused_with_both_numbers(tmp_path):
    fw.save({"w": random_bytes(8 << 20)}, tmp_path)
    with pytest.raises(
        SpecError, match="memory_bytes is 2097152, chunks of this size need 4202496"
    ):
        fw.load(tmp_path, into={"w": np.zeros(8 << 20, np.uint8)}, memory_bytes=2 << 20)
    with pytest.raises(SpecError, match="memory_bytes is 5, at least"):
        fw.load(tmp_path, into={"w": np.zeros(8 << 20, np.uint8)}, memory_bytes=5)


def test_a_budget_of_one_chunk_is_enough_also_where_nothing_is_checked(tmp_path):
    source = {"w": random_bytes(20 << 20)}
    fw.save(source, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    for path in ("run", "hf"):
        target = zeros_like(source)
        fw.load(tmp_path / path, into=target, memory_bytes=5 << 20, should_verify=False)
        assert same(target, source)


def test_a_small_budget_means_fewer_threads_not_a_refusal(tmp_path):
    source = {"w": random_bytes(32 << 20)}
    fw.save(source, tmp_path)
    target = zeros_like(source)
    fw.load(tmp_path, into=target, memory_bytes=9 << 20, num_threads=8)
    assert same(target, source)


# Behaviour around it.


def test_progress_grows_to_the_total(tmp_path):
    source = {"w": random_bytes(40 << 20)}
    fw.save(source, tmp_path)
    seen = []
    with listening(seen.append):
        fw.load(tmp_path, into=zeros_like(source))
    progress = [event.fields for event in seen if event.kind == "progress"]
    assert len(progress) > 3
    assert max(event["done_bytes"] for event in progress) == 40 << 20
    assert {event["total_bytes"] for event in progress} == {40 << 20}
    assert seen[-1].kind == "load.done"


def test_a_load_leaves_no_descriptor_and_no_thread(run):
    fw.load(run, into=zeros_like(odd_arrays()))
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        fw.load(run, into=zeros_like(odd_arrays()))
        with pytest.raises(PlanError):
            fw.load(run, into={"x": np.zeros(1)})
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


def test_a_failed_open_leaves_no_descriptor(run):
    os.truncate(run / "v0000000005" / "model.safetensors", 4096)
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(fw.FlyweightError):
            fw.open(run)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_running_out_of_descriptors_is_named(run):
    fw.load(run, into=zeros_like(odd_arrays()))  # imports what needs files of its own
    target = zeros_like(odd_arrays())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(StoreError, match="Too many open files"):
            fw.load(run, into=target)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not any(array.any() for array in target.values())


def test_a_version_pruned_while_it_is_open_can_still_be_read(run):
    with fw.open(run, version=1) as source:
        assert fw.prune(run, keep=1) == [1, 2]
        target = zeros_like(odd_arrays())
        fw.load(source, into=target)
    assert same(target, odd_arrays(1))


def test_two_loads_at_once_do_not_disturb_each_other(run):
    targets = [zeros_like(odd_arrays()) for _ in range(6)]
    threads = [
        threading.Thread(target=fw.load, args=(run,), kwargs={"into": target, "version": version})
        for target, version in zip(targets, [1, 2, 5] * 2, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    for target, version in zip(targets, [1, 2, 5] * 2, strict=True):
        assert same(target, odd_arrays(version))
