"""Who may compute: numbers must not change with the machine that makes them."""

from __future__ import annotations

from collections.abc import Mapping

from worldline.job.fingerprint import differences
from worldline.worker.orders import Hello


class Reference:
    """The numeric fingerprint all workers of the run share: that of the checkpoint or of the first worker.

    strict: whether a worker that differs is refused; `fingerprint` is empty before the first worker came.
    """

    def __init__(self, stored: Mapping[str, str] | None, strict: bool) -> None:
        self.fingerprint: dict[str, str] = dict(stored or {})
        self._strict = strict

    def refuse(self, hello: Hello) -> str:
        """Why this worker may not take part, empty if it may."""
        if not self.fingerprint:
            self.fingerprint.update(hello.numeric_fingerprint)
        found = differences(hello.numeric_fingerprint, self.fingerprint)
        if not found or not self._strict:
            return ""
        return (
            f"node {hello.ip} would compute other bits than the run ({'; '.join(found)}); "
            "use nodes of one kind, or mode: same_batches"
        )
