# SPDX-License-Identifier: Apache-2.0
"""Reading how busy the GPUs are.

- one reading serves all scrapes of 15 s; the next begins after that
- a reading that fails or hangs: the last values while they speak for now, then none; counted; one reading at a time
- a reading that dies of something unforeseen is no end of readings
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from discovery import address, model
from discovery.errors import ProbeError
from driver.observe import samples

ADDRESS = address.parse("0000:1b:00.0")


def reading(used: int) -> tuple[model.GpuSample, ...]:
    return (model.GpuSample(address=ADDRESS, memory_used_bytes=used),)


@dataclass
class Source:
    """Answers with what `answer` gives; counts the calls."""

    answer: Callable[[], tuple[model.GpuSample, ...]]
    calls: int = 0

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:
        assert timeout_s == samples.READ_TIMEOUT_S
        self.calls += 1
        return self.answer()


@dataclass
class Agent:
    """A sampler with a clock of its own."""

    source: Source
    patience_s: float = 10.0
    now: float = 1000.0
    failures: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampler = samples.Sampler(
            self.source,
            failed=lambda: self.failures.append(None),
            clock=lambda: self.now,
            patience_s=self.patience_s,
        )

    def samples(self) -> tuple[model.GpuSample, ...]:
        return self.sampler.samples()


def fails() -> tuple[model.GpuSample, ...]:
    raise ProbeError("the driver hangs")


def dies() -> tuple[model.GpuSample, ...]:
    raise RuntimeError("a defect")


def test_one_reading_serves_all_scrapes_of_its_interval() -> None:
    source = Source(lambda: reading(source.calls))
    agent = Agent(source)
    assert [agent.samples() for _ in range(3)] == [reading(1)] * 3
    agent.now += samples.INTERVAL_S - 0.1
    assert agent.samples() == reading(1)
    agent.now += 0.1
    assert agent.samples() == reading(2)
    assert source.calls == 2


@pytest.mark.parametrize("trouble", [fails, dies])
def test_after_a_failure_the_last_values_stay_while_they_speak_for_now(
    trouble: Callable[[], tuple[model.GpuSample, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(lambda: reading(7))
    agent = Agent(source)
    assert agent.samples() == reading(7)
    source.answer = trouble
    agent.now += samples.INTERVAL_S
    with caplog.at_level(logging.WARNING):
        assert agent.samples() == reading(7)
        agent.now += samples.VALID_S
        assert agent.samples() == ()
    assert len(agent.failures) == 2
    assert "GPU utilization cannot be read" in caplog.text
    source.answer = lambda: reading(8)
    agent.now += samples.INTERVAL_S
    assert agent.samples() == reading(8)


def test_a_failure_is_not_tried_again_within_the_interval() -> None:
    agent = Agent(Source(fails))
    assert [agent.samples() for _ in range(3)] == [(), (), ()]
    assert agent.source.calls == 1


def test_a_hung_reading_costs_a_bounded_wait_and_is_alone() -> None:
    answered, hung = threading.Event(), threading.Event()

    def hangs() -> tuple[model.GpuSample, ...]:
        hung.set()
        answered.wait(30)
        return reading(1)

    agent = Agent(Source(hangs), patience_s=0.01)
    assert agent.samples() == ()
    assert hung.wait(40)
    agent.now += 10 * samples.INTERVAL_S
    assert agent.samples() == ()
    assert agent.source.calls == 1
    answered.set()
    while agent.samples() != reading(1):
        pass
    assert agent.source.calls == 1
