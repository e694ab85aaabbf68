"""Hosts: two hosts on this machine, made of namespaces of networks and processes, and a wire. A helper of the tests.

    with two_hosts() as hosts:
        agent = hosts[0].start(["torchrun", ...], {"OMP_NUM_THREADS": "1"})

No process of a host sees the processes of the other, and neither host sees the network of this machine. Both see its
files. A host ends with its first process, which ends with a pipe from here: nothing outlives a test that is killed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Way(NamedTuple):
    """A way to the right to make namespaces."""

    prefix: tuple[str, ...] = ()
    users: bool = False  # whether a namespace of users is made too, in which this user is root


WAYS = Way(users=True), Way(), Way(prefix=("sudo", "-n"))
SPACES = "--net", "--uts", "--mount", "--pid"
FIRST = """
set -e
read -r number rest </proc/self/stat  # the number outside of the host: /proc is still that of this machine
mount -t proc proc /proc
mount --bind "$1" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
hostname "$2"
ip link set lo up
echo "$number"
exec cat
"""
"""What the first process of a host does, given a file of the names of all hosts and its own name."""
NAMES = {"localhost": "127.0.0.1", "host0": "10.77.0.1", "host1": "10.77.0.2"}


class Host:
    """A host, not connected yet. `file` has the names of hosts. `peer` is the host that this one is made beside."""

    def __init__(self, name: str, file: str, way: Way, peer: Host | None = None) -> None:
        self.name, self._way = name, way
        users = ("--user", "--map-root-user") if way.users and peer is None else ()
        before = way.prefix if peer is None else peer._enter()  # a wire joins hosts of one namespace of users
        command = [*before, "unshare", *users, *SPACES, "--fork", "--kill-child", "sh", "-c", FIRST, "sh", file, name]
        pipe = subprocess.PIPE
        self._first = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        assert self._first.stdout is not None
        self._number = self._first.stdout.readline().strip()
        if not self._number.isdigit():
            raise OSError(f"{' '.join(command[:-6])}: {self._number}")

    def connect(self, other: Host) -> None:
        """Lay a wire to another host: `eth0` on both."""
        ends = ["eth0", "type", "veth", "peer", "name", "eth0", "netns", other._number]
        _do([*self._enter("--net"), "ip", "link", "add", *ends])
        for host, peer in ((self, other), (other, self)):
            ip, here, there = [*host._enter("--net"), "ip"], NAMES[host.name], NAMES[peer.name]
            _do([*ip, "address", "add", here, "dev", "lo"])  # not of the wire, which ends with the other host
            _do([*ip, "link", "set", "eth0", "up"])
            _do([*ip, "route", "add", there, "dev", "eth0", "src", here])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command, with absolute paths, on the host. Standard output and errors are one pipe."""
        words = [*self._enter(*SPACES), "env", *(f"{name}={value}" for name, value in environment.items()), *command]
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self) -> None:
        """End the host and all its processes, as a power cut does."""
        self._first.communicate()

    def _enter(self, *spaces: str) -> list[str]:
        """The words in front of a command that runs in namespaces of the host."""
        users = ("--user", "--preserve-credentials") if self._way.users else ()
        spaces = (*users, *spaces)
        return [*self._way.prefix, *(("nsenter", "--target", self._number, *spaces, "--") if spaces else ())]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two connected hosts. Skips the test where this system does not let a user make them."""
    if sys.platform != "linux":
        pytest.skip("hosts are made of Linux namespaces")
    refusals = list[str]()
    with tempfile.NamedTemporaryFile("w") as file:
        file.writelines(f"{address} {name}\n" for name, address in NAMES.items())
        file.flush()
        for way in WAYS:
            hosts = list[Host]()
            try:
                hosts.append(Host("host0", file.name, way))
                hosts.append(Host("host1", file.name, way, hosts[0]))
                hosts[0].connect(hosts[1])
                yield hosts[0], hosts[1]
                return
            except OSError as error:
                refusals.append(str(error))
            finally:
                for host in hosts:
                    host.end()
    pytest.skip("this system lets nobody make two hosts: " + "; ".join(refusals))


def _do(command: Sequence[str]) -> None:
    """Run a command.

    Raises:
        OSError: when it fails, with what it says.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
