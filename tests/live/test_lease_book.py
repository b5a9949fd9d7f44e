"""The book of leases, in every order of events."""

from itertools import product

import pytest
from every_order import NotPossible, explore

from flyweight.errors import HandleGone, VersionError
from flyweight.live.lease_book import LeaseBook
from flyweight.live.publish_id import PublishId


def id_(version, session="3fa9c1d2"):
    return PublishId(session, version)


def test_memory_is_free_after_the_last_lease_of_a_withdrawn_version():
    book = LeaseBook()
    book.offer(id_(1))
    book.take(id_(1), 7)
    book.take(id_(1), 8)
    assert not book.is_free(id_(1))
    book.withdraw(id_(1))
    assert book.offered == set()
    with pytest.raises(VersionError, match="version 1 of session 3fa9c1 is not offered any more"):
        book.take(id_(1), 9)
    book.release(id_(1), 7)
    assert book.readers(id_(1)) == {8}
    assert not book.is_free(id_(1))
    book.lose(8)
    assert book.is_free(id_(1))


def test_a_reader_leases_several_versions_one_after_the_other():
    book = LeaseBook()
    book.offer(id_(1))
    book.offer(id_(2))
    book.take(id_(1), 7)
    with pytest.raises(
        VersionError, match="version 1 of .* is leased; release it, then lease version 2"
    ):
        book.take(id_(2), 7)
    book.release(id_(1), 7)
    book.take(id_(2), 7)
    assert book.end(id_(2)) == {7}
    book.take(id_(1), 7)


def test_a_lease_that_was_ended_by_its_holder_cannot_be_released():
    book = LeaseBook()
    book.offer(id_(1))
    book.take(id_(1), 7)
    assert book.end(id_(1)) == {7}
    with pytest.raises(HandleGone, match="version 1 of session 3fa9c1 has ended"):
        book.release(id_(1), 7)


def test_the_same_number_of_another_session_is_another_version():
    book = LeaseBook()
    book.offer(id_(1, "old"))
    with pytest.raises(VersionError, match="offered: 'version 1 of session old'"):
        book.take(id_(1, "new"), 7)


class Memory:
    """Two versions and two readers, and what is true of them by the events alone."""

    def __init__(self):
        self.book, self.offered, self.leases = LeaseBook(), set(), set()

    def offer(self, version):
        if not self.book.is_free(id_(version)):
            raise NotPossible  # its memory is not written, so there is nothing new to offer
        # Here the holder writes: nobody may read, and nobody may begin to.
        assert not any(leased == version for leased, _ in self.leases)
        assert version not in self.offered
        self.book.offer(id_(version))
        self.offered.add(version)

    def take(self, version, reader):
        others = {leased for leased, by in self.leases if by == reader} - {version}
        if version in self.offered and not others:
            self.book.take(id_(version), reader)
            self.leases.add((version, reader))
        else:
            with pytest.raises(VersionError):
                self.book.take(id_(version), reader)

    def release(self, version, reader):
        if (version, reader) in self.leases:
            self.book.release(id_(version), reader)
            self.leases.remove((version, reader))
        else:
            with pytest.raises(HandleGone):
                self.book.release(id_(version), reader)

    def lose(self, reader):
        self.book.lose(reader)
        self.leases = {each for each in self.leases if each[1] != reader}

    def withdraw(self, version):
        self.book.withdraw(id_(version))
        self.offered.discard(version)

    def end(self, version):
        assert self.book.end(id_(version)) == self.readers(version)
        self.offered.discard(version)
        self.leases = {each for each in self.leases if each[0] != version}

    def readers(self, version):
        return {reader for leased, reader in self.leases if leased == version}

    def check(self):
        assert self.book.offered == {id_(each) for each in self.offered}
        for version in (1, 2):
            readers, is_offered = self.readers(version), version in self.offered
            assert self.book.readers(id_(version)) == readers
            assert self.book.is_free(id_(version)) == (not readers and not is_offered)


def test_in_every_order_written_memory_has_no_lease_and_ended_leases_are_never_released():
    of_both = [(name, *both) for name in ("take", "release") for both in product((1, 2), (7, 8))]
    of_one = [(name, version) for name in ("offer", "withdraw", "end") for version in (1, 2)]
    assert explore(Memory, [*of_both, *of_one, ("lose", 7), ("lose", 8)], depth=8) > 30
