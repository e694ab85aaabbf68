"""Workers: processes of torch's DataLoader that load batches for a rank, as long as the rank wants."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class StartWorker:
    """A `worker_init_fn` of torch, in front of the user's `then`.

    torchrun and schedulers send SIGTERM to a rank and to all its workers, but a rank that saves and leaves at the end
    of a step goes on until then. So a worker heeds only its rank. A server forks the workers of a context such as
    "forkserver": their parent is not the rank that ends them.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then, self.rank = then, os.getpid()

    def __call__(self, number: int) -> None:
        _heed_alone({self.rank, os.getppid()})  # a rank may be a child of the process that made the loader
        if self.then is not None:
            self.then(number)


def _heed_alone(processes: set[int]) -> None:
    """Let SIGTERM end this process only where the signal comes from one of these processes."""
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before the thread starts, which inherits it

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid not in processes:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="fzero waits for SIGTERM", daemon=True).start()
