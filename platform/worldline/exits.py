"""The exit codes of the `worldline` command, for whoever calls it from a script or a scheduler.

Those above 1 are the codes of sysexits.h (EX_USAGE, EX_TEMPFAIL, EX_CONFIG) and the shell's for Ctrl-C.
"""

from __future__ import annotations

FINISHED = 0
FAILED = 1
WRONG_USAGE = 64
TRY_AGAIN = 75
"""Nothing is lost: the same command goes on where this one ended, or begins where it could not yet."""
BAD_JOB = 78
INTERRUPTED = 130
