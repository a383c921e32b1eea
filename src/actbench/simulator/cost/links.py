"""How long processes on several devices take to exchange something, over links in a machine and between machines."""

from __future__ import annotations

from dataclasses import dataclass

from actbench.simulator.cost.collectives import Collective


@dataclass(frozen=True)
class Links:
    """What connects devices.

    Attributes:
        peer: Bytes a second that a device sends to others of its machine, all of its links together.
        network: Bytes a second that a machine sends to others, all of its network cards together.
        devices: In a machine.
    """

    peer: float
    network: float
    devices: int


@dataclass(frozen=True)
class LinkShares:
    """What collectives reach of links.

    Attributes:
        bandwidth: Share of it.
        start: Seconds before the first byte.
        peer_hop: Seconds from one device of a machine to the next.
        network_hop: Seconds from one machine to the next.
    """

    bandwidth: float
    start: float
    peer_hop: float
    network_hop: float


def exchanging(collective: Collective, links: Links, shares: LinkShares) -> float:
    """Return the seconds of a collective.

    Rings go through the devices of a machine one after the other and then to the next machine, one ring for each
    network card. A device sends over its peer links; between machines the processes of a group on one machine have
    their part of its network cards. What is sent from each to each goes straight there.
    """
    size = len(collective.ranks)
    if size == 1:
        return 0.0
    # torchrun numbers processes machine by machine
    machines = len({rank // links.devices for rank in collective.ranks})
    beside = size / machines
    network = links.network * min(1.0, beside / links.devices)
    # one that receives sends nothing, and lasts as long as what it gets is on its way
    sent = collective.total_bytes if collective.kind == "receive" else collective.sent_bytes
    if collective.kind == "all-to-all":
        # the share of the other processes that are on other machines
        away = (size - beside) / (size - 1)
        # the processes of a machine send at the same time over its network cards
        slowest = max(sent * (1 - away) / links.peer, sent * beside * away / network)
    elif machines == 1:
        slowest = sent / links.peer
    else:
        # a ring goes as fast as its slowest link
        slowest = sent / min(links.peer, network)
    return shares.start + slowest / shares.bandwidth + _hops(collective, machines, shares)


def _hops(collective: Collective, machines: int, shares: LinkShares) -> float:
    """Return the seconds on the way once around, which what all add up goes twice."""
    size = len(collective.ranks)
    if collective.kind in ("send", "receive", "all-to-all"):
        return shares.network_hop if machines > 1 else shares.peer_hop
    around = (size - machines) * shares.peer_hop + (machines - 1) * shares.network_hop
    return around * (2 if collective.kind == "all-reduce" else 1)
