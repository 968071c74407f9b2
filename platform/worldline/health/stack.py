"""Where a thread is, read from another one."""

from __future__ import annotations

import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

NUM_FRAMES = 30


def frames_of(thread_id: int) -> list[FrameSummary]:
    """The thread's innermost frames, outermost of them first; none if there is no such thread."""
    frame = sys._current_frames().get(thread_id)
    return [] if frame is None else list(traceback.extract_stack(frame, NUM_FRAMES))


def where(frames: Sequence[FrameSummary], not_the_jobs: Sequence[str]) -> str:
    """`file:line in function` of the innermost frame of the job's own code, or of any if there is none.

    not_the_jobs: folders whose files are not the job's, as `library_folders` gives them.
    """
    if not frames:
        return ""
    own = [f for f in frames if not f.filename.startswith(("<", *not_the_jobs))]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def text(frames: Sequence[FrameSummary]) -> str:
    """As in a traceback, the innermost frame last."""
    return "".join(traceback.format_list(list(frames)))


def library_folders() -> tuple[str, ...]:
    """Python's own folders, those of installed packages, and this one's."""
    installed = sysconfig.get_paths()
    folders = {installed[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {site.getusersitepackages(), str(Path(__file__).parents[1])}
    return tuple(sorted(folder.rstrip("/") + "/" for folder in folders))
