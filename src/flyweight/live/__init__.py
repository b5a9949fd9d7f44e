"""Live updates: trainers hold offers of their model, and engines lease, copy and commit them.

publisher.py   the trainer's side            replica.py    the engine's side
source.py      a model, or opened files      target.py     what an engine wants
offer.py       a version in memory           link.py       the session that is in use
holder.py      serves offers                 session.py    all that a replica has of a trainer
shelf.py       who reads what of a holder    source_rank.py  the same of one of its ranks
catalog.py     what a trainer has            reader.py     one connection to a holder
plan.py        who copies what from where    incoming.py   one version on its way into a model
rows.py        copies and digests, prepared  fetch.py      ranges from several holders
messages.py    what goes over a connection   staging.py    a version that arrives over the network
buckets.py     a stream cut into pieces      loader.py     an engine's own loader
ring.py        slots that buckets go through fallback.py   where versions are while nobody publishes
report.py      what users get back           check_live.py  digests of what lies in live memory
relay.py       one staging for a host        watch.py      the state of a publisher, as it changes
front_store.py who listens at a front, and how ranks find each other there
lease_book.py, tracker.py, held_version.py   pure state: no sockets, no threads, no clock
"""

from flyweight.live.messages import News
from flyweight.live.publisher import Keep, Publisher
from flyweight.live.relay import Relay
from flyweight.live.replica import Replica
from flyweight.live.report import LiveReport, Publication, PublishReport
from flyweight.live.session import TRANSPORTS
from flyweight.live.watch import record, watch
from flyweight.ports import UpdateReport

__all__ = [
    "TRANSPORTS",
    "Keep",
    "LiveReport",
    "News",
    "Publication",
    "PublishReport",
    "Publisher",
    "Relay",
    "Replica",
    "UpdateReport",
    "record",
    "watch",
]
