"""Hardware: the figures of makers' data sheets, and the rates that a plan reckons with."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from fzero.base.mesh import VirtualMesh
from fzero.program.rates import GUESSES, Rates

ATTAINED = 0.7
"""The part of the figures of data sheets that large matrix products, copies and collectives attain. An assumption, the
same for all hardware: `step.calibrate` measures rates, and `--rates` takes them."""


class Hardware(NamedTuple):
    """One device of a host, as its maker describes it: dense `flops` of bfloat16 a second, bytes of memory, bytes a
    second of memory, those that a device sends to others of its `host` (how many there are), and those that it sends to
    other hosts; `source` says where the figures stand."""

    flops: float
    nbytes: int
    memory: float
    inside: float
    between: float
    host: int
    source: str

    def rates(self, mesh: VirtualMesh) -> Rates:
        """The rates on a mesh. The last axes of a mesh vary first, so that their ranks are neighbours: an axis whose
        ranks, with those of the axes behind it, fit into one host is as fast as the host is inside."""
        axes = []
        for i, axis in enumerate(mesh.names):
            span = math.prod(mesh.size(each) for each in mesh.names[i:])
            axes.append((axis, ATTAINED * (self.inside if span <= self.host else self.between)))
        slowest = min(wire for _, wire in axes)
        flops, memory = ATTAINED * self.flops, ATTAINED * self.memory
        return GUESSES["cuda"]._replace(flops=flops, memory=memory, wire=slowest, axes=tuple(axes))


_HBM2E = "torchtitan's page of 2024-12; flops of the SXM data sheet: the page says less, at 500 W"

HARDWARE = {
    "a100-sxm": Hardware(312e12, 80 * 10**9, 2.04e12, 300e9, 25e9, 8, "NVIDIA A100 80GB data sheet; one 200 Gb/s port"),
    "h100-sxm": Hardware(989e12, 80 * 10**9, 3.35e12, 450e9, 50e9, 8, "NVIDIA H100 data sheet; one 400 Gb/s port"),
    "h100-hbm2e": Hardware(989e12, 96 * 10**9, 2.4e12, 450e9, 50e9, 8, _HBM2E),
    "h200": Hardware(989e12, 141 * 10**9, 4.8e12, 450e9, 50e9, 8, "NVIDIA H200 data sheet; one 400 Gb/s port"),
    "b200": Hardware(2250e12, 180 * 10**9, 8.0e12, 900e9, 50e9, 8, "NVIDIA DGX B200 data sheet; one 400 Gb/s port"),
    "mi300x": Hardware(1307e12, 192 * 10**9, 5.3e12, 448e9, 50e9, 8, "AMD MI300X data sheet; one 400 Gb/s port"),
}
"""Devices by name. A byte is eight bits, a port sends as much as it takes, and GB are 10^9 bytes."""

_NAMES = {
    r"NVIDIA A100-SXM4-\d+GB": "a100-sxm",
    r"NVIDIA H100 80GB HBM3": "h100-sxm",
    r"NVIDIA H200": "h200",
    r"NVIDIA B200": "b200",
    r"AMD Instinct MI300X.*": "mi300x",
}
"""torch's name of a device -> its name here. Other forms of a chip, such as PCIe cards, have other figures."""


def find_hardware(device: str) -> Hardware | None:
    """The hardware that torch calls so (`torch.cuda.get_device_name()`), None where the table lacks it."""
    return next((HARDWARE[name] for pattern, name in _NAMES.items() if re.fullmatch(pattern, device)), None)
