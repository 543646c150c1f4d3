"""The number of replicas by the completions in progress. A second is one observation. Pinned here:

1. it rises after 10 s of more completions than the replicas sample, at once to the number that they need;
2. it falls after 300 s of fewer, to the most that was needed in that time;
3. short rises and pauses change nothing, and neither does the smallest change back and forth;
4. it stays within the bounds;
5. bounds are a number or a range; everything else is refused with an example.

Also: replicas refuse to report routes of experts; and the error that a log gives as the cause of a replica's end. It
is the first one, without the wrapper.
"""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest

from agentjet.compute.samplers import FALL_SECONDS, RISE_SECONDS, Autoscaler, cause_of, check_routes
from agentjet.config import ComputeConfig, ModelConfig
from agentjet.errors import ConfigError
from agentjet.processes import guardian
from agentjet.types import SamplerBounds


def numbers(*load: tuple[int, int], bounds: str = "2..8", start: int = 2) -> list[int]:
    """Returns the number of replicas after each part of a load: pairs of seconds and completions, 64 a replica."""
    scaler, number, found = Autoscaler(SamplerBounds.parse(bounds), 64), start, []
    for seconds, completions in load:
        for _ in range(seconds):
            number = scaler.observe(number, completions)
        found.append(number)
    return found


def test_it_rises_and_falls_with_the_load() -> None:
    assert numbers((RISE_SECONDS - 1, 300), (1, 300)) == [2, 5]
    assert numbers((RISE_SECONDS, 300), (FALL_SECONDS - 1, 65), (1, 65)) == [5, 5, 2]
    assert numbers((RISE_SECONDS, 400), (200, 0), (99, 170), (1, 170)) == [7, 7, 7, 3]


def test_short_changes_do_nothing() -> None:
    assert numbers((100, 0), (RISE_SECONDS - 1, 1000), (1, 100), (RISE_SECONDS - 1, 1000)) == [2, 2, 2, 2]
    assert numbers((RISE_SECONDS, 500), (FALL_SECONDS - 1, 0), (1, 500), (FALL_SECONDS - 1, 0)) == [8, 8, 8, 8]
    swinging = chain.from_iterable(repeat([(1, 128), (1, 129)], 1000))
    assert set(numbers(*swinging)) == {2}
    swinging = chain.from_iterable(repeat([(RISE_SECONDS, 129), (RISE_SECONDS, 128)], 100))
    assert numbers(*swinging)[-1] == 3, "it rises once"


def test_it_stays_within_the_bounds() -> None:
    assert numbers((600, 0), (600, 10**6), (600, 0)) == [2, 8, 2]
    assert numbers((600, 0), (600, 10**6), bounds="3", start=3) == [3, 3]


@pytest.mark.parametrize(("given", "least", "most"), [(1, 1, 1), ("6", 6, 6), ("2..8", 2, 8), (" 2 .. 2 ", 2, 2)])
def test_bounds(given: object, least: int, most: int) -> None:
    config = ComputeConfig.model_validate({"samplers": given})
    assert config.samplers == SamplerBounds(least, most)
    assert ComputeConfig.model_validate(config.model_dump()) == config
    assert ComputeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("given", [0, -1, 5000, 2.0, "", "many", "0..3", "8..2", "2..", "..8", "2-8", "2..5000"])
def test_wrong_bounds(given: object) -> None:
    with pytest.raises(ValueError, match=r"is not a number from 1 to 4096, such as 6, nor a range, such as 2\.\.8"):
        ComputeConfig.model_validate({"samplers": given})


WORKER = "(Worker pid=8881) ERROR 11-24 04:56:03 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=8870) ERROR 11-24 04:56:03 [core.py:1512] "
WRAPPER = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
UNSUPPORTED = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [f"{WORKER}Traceback (most recent call last):", f"{WORKER}    raise RuntimeError(", WORKER + UNSUPPORTED,
             f"{CORE}RuntimeError: Worker failed with error 'Unsupported'", f"ERROR 11-24 04:56:03 [a.py:9] {WRAPPER}",
             "Traceback (most recent call last):", WRAPPER],
            UNSUPPORTED,
        ),
        (
            [f"{CORE}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
             f"{CORE}  Value error, Model architectures ['Foo'] are not supported. [type=value_error, input_value=1]",
             f"{CORE}    For further information visit https://errors.pydantic.dev"],
            "Value error, Model architectures ['Foo'] are not supported.",
        ),
        (["Traceback:", "torch.OutOfMemoryError: CUDA out of memory  "], "torch.OutOfMemoryError: CUDA out of memory"),
        (["2026 INFO version 0: fetched", f"{CORE}EngineCore encountered a fatal error.", WRAPPER], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_cause(tmp_path: Path, lines: list[str], cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    earlier = "ValueError: of an earlier process\n"
    log.write_text(earlier + "\n".join(lines))
    assert cause_of(log, len(earlier)) == cause
    monkeypatch.setattr(guardian, "LOG_END_BYTES", 3)
    assert cause_of(log, 0) == ""
    assert cause_of(tmp_path / "gone", 0) == ""


def test_replicas_refuse_to_report_routes() -> None:
    for setting in ("auto", "off"):
        check_routes(ModelConfig(expert_routes=setting))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.expert_routes = 'on': .*second model runner.*set it to 'auto'"):
        check_routes(ModelConfig(expert_routes="on"))
