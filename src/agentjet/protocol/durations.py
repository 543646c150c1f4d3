"""Lengths of time for people, in messages of client and server."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A length of time in at most two units, such as `38 s` or `2 h 11 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(hours, 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def remaining(elapsed: float, done: float, total: float) -> str:
    """The time that the rest will take at the pace so far, such as `about 38 s left`; '' before anything is done."""
    if done <= 0 or total <= done:
        return ""
    return f"about {duration(elapsed / done * (total - done))} left"
