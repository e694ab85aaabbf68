"""Transports: how a collective is performed on one process group, a file for each way.

`all_gather` and `reduce_scatter` start and return a `Pending`; its `wait()` gives the result, once. Every rank calls
the same ones in the same order. The average is taken in a fixed order of ranks, so it is the same run after run. What
torch does for a collective is done inside of its `Begun`.
"""

import torch.distributed as dist

from fzero.ranks.members import Members
from fzero.ranks.transports.alone import Alone
from fzero.ranks.transports.board import common_board
from fzero.ranks.transports.native import Native
from fzero.ranks.transports.pending import Pending, Transport
from fzero.ranks.transports.point_to_point import PointToPoint
from fzero.ranks.transports.same_host import SameHost

__all__ = ["Alone", "Native", "Pending", "PointToPoint", "SameHost", "Transport", "transport"]


def transport(group: dist.ProcessGroup, device: str, members: Members) -> Transport:
    """The transport for a process group and the type of device that its tensors are on. With gloo it waits as long as
    the timeout of `members` for a rank, with others as long as they do. Collective."""
    if dist.get_world_size(group) == 1:
        return Alone()
    if device != "cpu" and dist.get_backend(group) != "gloo":
        return Native(group, members.twin(group))
    with members.begin("the first word of ranks to each other"):
        found = common_board(group, members.timeout) if device == "cpu" else None
    return PointToPoint(group, members.timeout) if found is None else SameHost(group, members, found)
