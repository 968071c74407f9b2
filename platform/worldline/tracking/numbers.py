"""Numbers as people read them."""

from __future__ import annotations


def number(value: float | None, digits: int | None = None, significant: int = 4) -> str:
    """So many significant digits, or so many behind the point; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.{significant}g}" if digits is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def workers(now: int, most: int) -> str:
    return f"{now} of {most} worker{'' if most == 1 else 's'}"
