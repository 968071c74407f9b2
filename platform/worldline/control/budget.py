"""When to give up. Pure.

Two budgets: losses of infrastructure are free as long as there is progress; errors of the user's code are
counted over the whole attempt, since the same code would raise for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worldline.worker.orders import EndKind, GenerationEnd

FATAL = {
    EndKind.NONFINITE: "",
    EndKind.DATA_ERROR: "the data could not be read: ",
    EndKind.DISAGREED: "",
    EndKind.RESTORE_FAILED: "the checkpoint could not be restored: ",
}
"""Ends that would come again whoever tries; value: what the reason begins with."""


@dataclass(frozen=True)
class Budget:
    """max_task_errors, max_no_progress: limits. last_step: how far the line was. The rest counts."""

    max_task_errors: int
    max_no_progress: int
    task_errors: int = 0
    error_generation: int = 0
    no_progress: int = 0
    last_step: int = 0
    out_of_memory: frozenset[tuple[int, int]] = frozenset()
    """(rank, step) of those who ran out of memory."""
    verdict: str = ""
    """Why the run ends, empty while it may go on."""

    def after_end(self, end: GenerationEnd, rank: int) -> Budget:
        """Account for how a generation ended for one worker."""
        if self.verdict:
            return self
        if end.kind in FATAL:
            return replace(self, verdict=FATAL[end.kind] + end.reason)
        if end.kind is not EndKind.TASK_ERROR or end.generation == self.error_generation:
            return self  # what all ranks raise alike counts once
        used = replace(self, task_errors=self.task_errors + 1, error_generation=end.generation)
        if used.task_errors < self.max_task_errors:
            return used
        times = "once" if used.task_errors == 1 else f"{used.task_errors} times"
        return replace(used, verdict=f"the task's code raised {times}, last on rank {rank}: {end.reason}")

    def after_hang(self, diagnosis: str) -> Budget:
        """A worker's code did not go on although its process is well: as good as an error of that code."""
        if self.verdict:
            return self
        used = replace(self, task_errors=self.task_errors + 1)
        if used.task_errors < self.max_task_errors:
            return used
        return replace(used, verdict=f"the task's code failed {used.task_errors} times, last: {diagnosis}")

    def after_out_of_memory(self, rank: int, step: int, text: str) -> Budget:
        """Where the same happens again to the same rank at the same step, it always will."""
        if self.verdict:
            return self
        if (rank, step) in self.out_of_memory:
            return replace(self, verdict=f"{text}; this happened twice at this step, and would again")
        return replace(self, out_of_memory=self.out_of_memory | {(rank, step)})

    def after_start_error(self, reason: str) -> Budget:
        """A worker's process could not build the task; nothing that a new process would change."""
        return self if self.verdict else replace(self, verdict=f"a worker could not be prepared: {reason}")

    def after_generation(self, step: int, trouble: str) -> Budget:
        """A generation is over and `step` steps are completed; trouble: why it did not end in order, empty
        if it did.
        """
        if self.verdict:
            return self
        if step > self.last_step or not trouble:
            return replace(self, last_step=max(step, self.last_step), no_progress=0)
        used = replace(self, no_progress=self.no_progress + 1)
        if used.no_progress < self.max_no_progress:
            return used
        fruitless = f"{used.no_progress} generations in a row completed no step beyond {step}"
        return replace(used, verdict=f"{fruitless}; last: {trouble}")


def start_delay(failures: int) -> float:
    """Seconds to wait before the next worker is requested after so many failed starts in a row."""
    return float(min(60, 2 ** min(failures, 6)))
