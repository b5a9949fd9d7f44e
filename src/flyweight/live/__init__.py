"""Live updates: a publisher sends versions of a model to replicas, on its host or on others.

What other rooms use of this one is imported here, and nowhere else.
"""

from flyweight.live.curve_keys import CurveClient, CurveKeys, CurveServer
from flyweight.live.lanes import TRANSPORTS
from flyweight.live.messages import News
from flyweight.live.publisher import Publisher
from flyweight.live.relay import Relay
from flyweight.live.replica import Replica
from flyweight.live.report import check_verified, unverified
from flyweight.live.tcp_address import TcpAddress, parse_address
from flyweight.live.watch import record, watch

__all__ = [
    "TRANSPORTS",
    "CurveClient",
    "CurveKeys",
    "CurveServer",
    "News",
    "Publisher",
    "Relay",
    "Replica",
    "TcpAddress",
    "check_verified",
    "parse_address",
    "record",
    "unverified",
    "watch",
]
