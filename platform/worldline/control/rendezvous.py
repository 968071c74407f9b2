"""Where the members of each generation meet: a TCP store in the controller's process."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from worldline.worker.orders import Meeting


class Rendezvous:
    """Protocol: `port` is where workers find the store. `forget_before` whenever a generation trains: what
    older ones left there, some keys a member and lane, is taken away by another thread, so that the store
    does not grow with the number of changes.
    """

    def __init__(self) -> None:
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.port: int = self._store.port
        self._one_at_a_time = threading.Lock()

    def forget_before(self, generation: int) -> None:
        name = f"forget-before-{generation}"
        threading.Thread(target=self._forget, args=(generation,), name=name, daemon=True).start()

    def _forget(self, generation: int) -> None:
        with self._one_at_a_time, contextlib.suppress(RuntimeError):  # the run ends, and the store with it
            connection = self._store.clone()
            for key in connection.list_keys():
                met_for = Meeting.generation_of(key)
                if met_for is not None and met_for < generation:
                    connection.delete_key(key)
