"""Transports: ways to perform a collective on one process group, one file a way.

`all_gather` and `reduce_scatter` start a collective and return a `Pending`, whose `wait()` gives the result, once. All
ranks call the same collectives in the same order. An average is taken in a fixed order of ranks, so that its bits are
the same run after run. Every call to torch for a collective stands in a `with` of the collective's `Attempt`.
"""

import torch.distributed as dist

from fzero.ranks.members import Members
from fzero.ranks.transports.board import share_board
from fzero.ranks.transports.native import Native
from fzero.ranks.transports.pending import Alone, Pending, Splits, Transport
from fzero.ranks.transports.point_to_point import PointToPoint
from fzero.ranks.transports.same_host import SameHost, are_cores_spare

__all__ = ["Alone", "Native", "Pending", "PointToPoint", "SameHost", "Splits", "Transport", "choose_transport"]


def choose_transport(group: dist.ProcessGroup, device: str, members: Members) -> Transport | Alone:
    """Make the transport for a process group whose tensors are on this type of device. All ranks of the group call.

    A transport on gloo waits for a rank no longer than the timeout of `members`; other backends have their own timeout.
    """
    if dist.get_world_size(group) == 1:
        return Alone()
    if device != "cpu" and dist.get_backend(group) != "gloo":
        return Native(group, members.new_twin(group))
    spare = are_cores_spare(dist.get_world_size(group))
    with members.begin("the first word of ranks to each other"):
        board = share_board(group, members.timeout, spare) if device == "cpu" else None
    return PointToPoint(group, members.timeout) if board is None else SameHost(group, members, board)
