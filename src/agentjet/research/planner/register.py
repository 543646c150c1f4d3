"""`Register`: requests are judged once, and what was said of them stands in the book."""

from __future__ import annotations

from collections.abc import Callable

from agentjet.research.journal import Book
from agentjet.research.models import Amendment, Origin
from agentjet.research.planner.actions import PROPOSAL, REQUEST, Action, AddArm, Refused, as_text, loads, parse
from agentjet.research.planner.course import EVERYTHING, Course, check_name, grant

PLANNING = -1
"""The point of what is asked before a study is fixed."""


class Register:
    """The requests of a plan, or of a running study, and the course they have made of it."""

    def __init__(self, course: Course, book: Book, left: Callable[[], float]) -> None:
        self.course = course
        self.point = PLANNING
        self._book = book
        self._left = left
        self._taken: dict[Origin, int] = {"human": 0, "llm": 0}

    def take(self, said: object, origin: Origin) -> Amendment:
        """The next request of this origin: as the book has it, or granted or refused now."""
        amendment = self.recorded(origin) or self._judge(said, origin)
        self._taken[origin] += 1
        if not amendment.refused:
            self.course = grant(self.course, parsed(origin, amendment.asked), origin, EVERYTHING)
        return amendment

    def recorded(self, origin: Origin) -> Amendment | None:
        """What the book has as the next request of this origin, if that was taken by now."""
        planning = self.point == PLANNING
        mine = [a for a in self._book.amendments if a.origin == origin and (a.point == PLANNING) == planning]
        following = mine[self._taken[origin] :][:1]
        return following[0] if following and following[0].point <= self.point else None

    def pass_over(self, origin: Origin) -> None:
        """What the book has of this origin was taken elsewhere."""
        while self.recorded(origin):
            self._taken[origin] += 1

    def taken(self, origin: Origin) -> int:
        """How many requests of this origin were taken."""
        return self._taken[origin]

    def granted(self, action: Action, origin: Origin) -> Course:
        """The course with this, too. Raises `Refused`."""
        if origin == "llm" and isinstance(action, AddArm):
            check_name(action.arm)  # here alone: what was granted once stands
        return grant(self.course, action, origin, self._left())

    def refuse(self, said: object, origin: Origin, refusal: Refused) -> Amendment:
        """Record that something was asked, and why it was not granted."""
        amendment = Amendment(self.point, origin, {"text": as_text(said)}, as_text(str(refusal)))
        self._book.append("refusal", amendment.to_json())
        return self._book.amendments[-1]

    def _judge(self, said: object, origin: Origin) -> Amendment:
        try:
            action = parsed(origin, loads(said) if isinstance(said, str) else said)
            self.granted(action, origin)
        except Refused as refusal:
            return self.refuse(said, origin, refusal)
        amendment = Amendment(self.point, origin, action.model_dump(mode="json"))
        self._book.append("amendment", amendment.to_json())
        return self._book.amendments[-1]


def parsed(origin: Origin, fields: object) -> Action:
    return parse(REQUEST, fields) if origin == "human" else parse(PROPOSAL, fields)
