"""Peaks: the bytes that a simulated step keeps alive, by place."""

from __future__ import annotations

from typing import Any

from programs import list_programs, tensors

from fzero.files import OnDisk
from fzero.program.operation import Node
from fzero.program.places import find_places, where_of
from fzero.program.program import Program
from fzero.program.records import body_of


class Peaks:
    """The most bytes that a rank's values keep alive on the device, on the host and on a disk, each storage once."""

    def __init__(self, program: Program) -> None:
        self._programs = list(list_programs(program))
        self._graphs: dict[Any, dict[str, Any]] = {}  # of the program that runs, an equal one -> places by name
        given = zip(program.placeholders, program.arguments)
        self._batches = {node.name for node, argument in given if argument.bucket is None}
        self.most = {"device": 0, "host": 0, "disk": 0}

    def watch(self, node: Node, ranks: list[dict[Node, Any]]) -> None:
        if node.graph not in self._graphs:
            self._graphs[node.graph] = find_where(self._programs[len(self._graphs)])
        for held in ranks:
            now: dict[str, dict[Any, int]] = {"device": {}, "host": {}, "disk": {}}
            for each, value in held.items():
                place = self._graphs[each.graph].get(each.name, "device")
                # while a loop runs, the last of its results are there
                for here, item in zip(place[-len(value) :], value) if isinstance(place, list) else [(place, value)]:
                    for x in tensors(item):
                        if isinstance(x, OnDisk):
                            now["disk"][id(x.extent), x.start] = x.nbytes
                            continue
                        rows_only = each.name in self._batches
                        size = x.nbytes if rows_only else x.untyped_storage().nbytes()
                        now[here][x.untyped_storage()._cdata] = size
            for place, storages in now.items():
                self.most[place] = max(self.most[place], sum(storages.values()))


def find_where(program: Program) -> dict[str, Any]:
    """The name of each node -> where its value lies; of a loop, where each of its results does."""
    places: dict[str, Any] = {node.name: place for node, place in find_places(program).items()}
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None:
            places[node.name] = [where_of(result) for result in body.results]
    return places
