"""What a power cut may leave of files that were written by recorded calls.

A file's content is what it was when the file was last synced. A name stands for what it stood for
when its directory was last synced, or for anything it has stood for since: each name by itself,
since nothing orders them. So a cut leaves one of several disks.
"""

import os
from base64 import b64decode
from itertools import product

MANY = 10  # names that are not synced: up to here every combination is tried


class File:
    def __init__(self, synced=None):
        self.content, self.synced = bytearray(synced or b""), synced

    def after_cut(self):
        """What was never synced has a name and a size at best."""
        return bytes(len(self.content)) if self.synced is None else self.synced


class Directory:
    def __init__(self):
        self.seen = {}
        """For each name what it has stood for since the last sync, newest last."""

    def entry(self, name):
        return self.seen.get(name, [None])[-1]

    def set(self, name, entry):
        self.seen.setdefault(name, [None]).append(entry)

    def sync(self):
        self.seen = {name: [seen[-1]] for name, seen in self.seen.items()}

    def after_cut(self):
        """Yield each way its names may be, as a dict."""
        ways = {name: list(dict.fromkeys(seen)) for name, seen in self.seen.items()}
        unclear = [name for name, seen in ways.items() if len(seen) > 1]
        assert len(unclear) <= MANY, f"{len(unclear)} names are not synced, too many to try all"
        yield from (dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values()))


class Disk:
    """The directory `root` as it is on the disk now, and then as recorded calls change it."""

    def __init__(self, root):
        self._root = os.path.realpath(root)
        self._top = self._copied(self._root)

    def _copied(self, path):
        directory = Directory()
        for each in os.scandir(path):
            if each.is_dir():
                directory.set(each.name, self._copied(each.path))
            else:
                with open(each.path, "rb") as file:
                    directory.set(each.name, File(file.read()))
        directory.sync()
        return directory

    def _at(self, path):
        """Return the directory that a path is in, its name there, and what it stands for."""
        *above, name = os.path.relpath(path, self._root).split(os.sep)
        directory = self._top
        for each in above:
            directory = directory.entry(each)
        return directory, name, self._top if name == "." else directory.entry(name)

    def _has(self, path):
        return path == self._root or path.startswith(self._root + os.sep)

    def apply(self, call):
        """Change the disk as one line of the record says."""
        name, place, args, _ = call
        path = args[0] if place is None else place
        if not self._has(path):
            return
        directory, base, entry = self._at(path)
        if name == "mkdir":
            directory.set(base, Directory())
        elif name == "open":
            if args[1] & os.O_CREAT and entry is None:
                directory.set(base, File())
        elif name in ("pwrite", "posix_fallocate"):
            data = b64decode(args[1]) if name == "pwrite" else b""
            end = args[2] + len(data) if name == "pwrite" else args[1] + args[2]
            entry.content.extend(bytes(max(0, end - len(entry.content))))
            entry.content[end - len(data) : end] = data
        elif name == "fsync":
            if isinstance(entry, File):
                entry.synced = bytes(entry.content)
            else:
                entry.sync()
        elif name in ("rename", "link"):
            goal, goal_name, _ = self._at(args[1])
            goal.set(goal_name, entry)
            if name == "rename":
                directory.set(base, None)
        else:
            assert name in ("unlink", "rmdir"), name
            directory.set(base, None)

    def cuts(self):
        """Yield each tree that a power cut may leave now: {path: content}, hidden names left out."""
        yield from self._trees(self._top)

    def _trees(self, directory):
        for names in directory.after_cut():
            shown = {n: each for n, each in names.items() if each and not n.startswith(".")}
            files = {n: each.after_cut() for n, each in shown.items() if isinstance(each, File)}
            below = [
                [{f"{n}/{path}": data for path, data in tree.items()} for tree in self._trees(each)]
                for n, each in shown.items()
                if isinstance(each, Directory)
            ]
            for trees in product(*below):
                yield {**files, **{path: data for tree in trees for path, data in tree.items()}}


def every_cut(disk, log):
    """Yield every tree that a power cut before, between or after the calls may leave, once each."""
    known = set()
    for number in range(len(log) + 1):
        for tree in disk.cuts():
            key = frozenset(tree.items())
            if key not in known:
                known.add(key)
                yield tree
        if number < len(log):
            disk.apply(log[number])


def durable(disk):
    """Return the one tree that every power cut leaves by now."""
    trees = {frozenset(tree.items()) for tree in disk.cuts()}
    assert len(trees) == 1, f"a power cut leaves one of {len(trees)} trees: not all is synced"
    return dict(trees.pop())


def put(tree, root):
    """Write a tree to a directory that is not there yet."""
    root.mkdir()
    for path, data in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
