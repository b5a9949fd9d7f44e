"""Live updates: trainers hold offers of their model, and engines lease, copy and commit them.

publisher.py   the trainer's side            replica.py    the engine's side
holder.py      serves offers                 reader.py     one connection to a holder
shelf.py       what a holder serves          session.py    all that a replica has of a trainer
offer.py       a version in memory           incoming.py   one version on its way into a model
stored_offer.py  a version in files          loader.py     an engine's own loader
catalog.py     what a trainer has            target.py     what an engine wants
plan.py        who copies what from where    rows.py       copies and digests, prepared once
check_live.py  digests of what lies in live memory
fetch.py       ranges from several holders   staging.py    a version that arrives over the network
buckets.py     a stream cut into pieces      ring.py       slots on a device that buckets go through
messages.py    what goes over a connection   report.py     what users get back
front_store.py where ranks find each other   fallback.py   where versions are while nobody publishes
relay.py       one staging for a host        watch.py      the state of a publisher, as it changes
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
