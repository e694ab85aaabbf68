"""Files: tensors whose elements lie in files, and the threads that read and write them.

`allocate` makes room for a tensor in a file of this process, below a path. `read` starts to copy tensors from files
into memory, and `write` from memory into files. `Started.wait` returns the copies. The files have no names: they go
with the process, also where it is killed.
"""

from fzero.files.on_disk import (
    OnDisk,
    Started,
    address_of,
    allocate,
    check_writes,
    duplicate,
    is_alias,
    load,
    read,
    write,
)

__all__ = [
    "OnDisk",
    "Started",
    "address_of",
    "allocate",
    "check_writes",
    "duplicate",
    "is_alias",
    "load",
    "read",
    "write",
]
