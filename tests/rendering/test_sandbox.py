"""The fast paths of the sandbox return what Jinja's sandbox returns, and allow nothing more."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from agentjet.rendering.chat_template import make_sandbox

JINJAS = ImmutableSandboxedEnvironment()
OURS = make_sandbox()
MESSAGE = {
    "role": "user",
    "items": "a key that is a method, too",
    "_hidden": 1,
    "loop": None,
    "": "",
    "pop": 2,
    0: "zero",
}
NAMES = [
    *dir(dict),
    *dir(LoopContext),
    "role",
    "_hidden",
    "loop",
    "",
    "missing",
    "append",
    "format",
    "_iterator",
    "_iterable",
]


def loop() -> LoopContext:
    """A loop in the second of three rounds."""
    found = LoopContext([1, 2, 3], JINJAS.undefined)
    next(found), next(found)
    return found


def seen(environment: ImmutableSandboxedEnvironment, how: str, about: Any, name: Any) -> tuple[str, str]:
    """Returns the result of a lookup for a template: a value, a method, an undefined and its reason, or an error."""
    try:
        found = getattr(environment, how)(about, name)
        return type(found).__name__, str(found).split(" at 0x")[0]
    except (SecurityError, TypeError, AttributeError) as error:
        return type(error).__name__, str(error).split(" at 0x")[0]


@pytest.mark.parametrize("how", ["getitem", "getattr"])
@pytest.mark.parametrize(
    "make", [lambda: dict(MESSAGE), loop, lambda: UserDict(MESSAGE), lambda: [MESSAGE], lambda: "text", dict]
)
def test_lookups_are_jinjas(how: str, make: Any) -> None:
    for name in [*NAMES, *([0, None, 1.5] if how == "getitem" else [])]:
        assert seen(OURS, how, make(), name) == seen(JINJAS, how, make(), name), name


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.__class__.__mro__ }}",
        "{{ m['__class__']['__mro__'] }}",
        "{{ m.pop('role') }}",
        "{{ m.update({}) }}",
        "{% for x in [m] %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for x in [m] %}{{ loop._iterator }}{{ loop._iterator.x }}{% endfor %}",
        "{{ '{0.__class__}'.format(m) }}{{ m.role.__class__.x }}",
    ],
)
def test_what_is_shut_stays_shut(source: str) -> None:
    m = {"role": "user"}
    with pytest.raises(SecurityError):
        OURS.from_string(source).render(m=m)
    assert m == {"role": "user"}


def test_a_missing_key_names_itself() -> None:
    with pytest.raises(Exception, match="'dict object' has no attribute 'nothing'"):
        OURS.from_string("{{ m.nothing.at_all }}").render(m={})
