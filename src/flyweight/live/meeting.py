"""The meeting of the ranks that publish a model together, before the first publish.

They meet through the key-value store of their process group, never through a collective. Rank 0
learns what each rank holds, and checks that it is one model; every rank learns if that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyweight.adapters.model import Model
from flyweight.adapters.parts import emptied_names, partial_names, undeclared_shards
from flyweight.checks import check_ranks
from flyweight.errors import PlanError, SpecError, listed
from flyweight.live.address import Address
from flyweight.live.published_model import PublishedModel
from flyweight.live.rank_messages import Holding
from flyweight.live.source import PublishedSource
from flyweight.live.source_blocks import Places, SourceBlocks, held_table
from flyweight.live.tcp_address import TcpAddress
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.merged_source import HeldTable
from flyweight.plans.tables import Boxes, Tensors, numbers, packed
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.process_group import default_group, rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous


def rendezvous_for(
    published: PublishedModel,
    address: Address | TcpAddress,
    process_group: object,
    rank: int | None,
    num_ranks: int | None,
) -> Rendezvous:
    """Return where the ranks of a publisher meet.

    A model whose tensors do not say how they are cut over ranks is published alone, unless the
    caller says otherwise.
    """
    model = published.source.source
    has_layout = isinstance(model, Model) and model.has_layout
    if isinstance(model, Model) and (emptied := emptied_names(model, published.thing)):
        raise PlanError(
            f"{len(emptied)} parameters are partitioned by ZeRO-3 and empty on this rank: "
            f"{listed(emptied)}; make the publisher and publish inside of "
            f"deepspeed.zero.GatheredParameters(model.parameters()), which every rank enters"
        )
    if rank is not None or num_ranks is not None:
        if process_group is not None:
            raise SpecError("give a process_group, or rank and num_ranks, not both")
        rank, num_ranks = check_ranks(rank, num_ranks)
        found = Rendezvous()
        if num_ranks > 1:
            if isinstance(address, TcpAddress):
                raise SpecError(
                    f"ranks that publish at {address} need a process group to meet: "
                    f"process_group=, in place of rank= and num_ranks="
                )
            address.make_directory()
            store = FileStore(address.directory / "ranks")
            found = Rendezvous(rank, num_ranks, store, f"flyweight/{address}")
    elif process_group is not None or (has_layout and default_group() is not None):
        found = rendezvous_of(process_group)
        if isinstance(address, TcpAddress) and not address.is_any:
            found = replace(found, host=address.host)
    else:
        found = Rendezvous()
    parts = partial_names(model) if isinstance(model, Model) else []
    if parts and found.num_ranks == 1:
        raise PlanError(
            f"{len(parts)} tensors are only in part on this rank: {listed(parts)}; make a "
            f"publisher on every rank that holds a part, with process_group=, or with rank= and "
            f"num_ranks="
        )
    if found.num_ranks == 1 and not published.source.manifest.names:
        raise SpecError(f"{type(published.thing).__name__} holds no tensors")
    return found


def holding_of(published: PublishedModel, settings: str) -> Holding:
    """Return what this rank holds, as a message to rank 0; raise SpecError if that is not known.

    settings: what must be the same on all ranks.
    """
    source = published.source
    if published.stored is not None:
        raise SpecError(
            "a snapshot is whole, so one publisher serves it; make it on one rank, without "
            "process_group=, rank= and num_ranks="
        )
    if unknown := undeclared_shards(published.thing):
        raise SpecError(
            f"{len(unknown)} tensors are marked as the part of one rank and do not say which "
            f"part: {listed(unknown)}; put flyweight.Sharded(tensor, shape, offset) in their place"
        )
    places = Places.of(source.memory)
    return Holding(
        Tensors.of(source.tensors),
        dict(source.manifest.tied),
        dict(source.manifest.values),
        Boxes.of(source.boxes),
        tuple(places.names),
        packed(places.index),
        settings,
    )


def blocks_alone(source: PublishedSource) -> SourceBlocks:
    """Return the blocks of a publisher of one rank."""
    return SourceBlocks([held_table(source)], [Places.of(source.memory)])


def blocks_together(holdings: Sequence[Holding]) -> SourceBlocks:
    """Return the blocks of all ranks; raise an error that names ranks if they do not fit."""
    for rank, each in enumerate(holdings):
        if each.settings != holdings[0].settings:
            raise SpecError(
                f"publishers of one model need the same options, and every rank makes them in the "
                f"same order: rank 0 has {holdings[0].settings}, rank {rank} {each.settings}"
            )
    held, places = [], []
    for rank, each in enumerate(holdings):
        tensors = each.tensors.specs()
        boxes = each.boxes.table(BoxTable.whole(tensors.values()))
        index = numbers(each.place)
        if len(index) != len(boxes):
            raise SpecError(f"rank {rank}: {len(boxes)} blocks have {len(index)} devices")
        held.append(HeldTable(tensors, each.tied, each.values, boxes))
        places.append(Places(each.places, index))
    return SourceBlocks(held, places)
