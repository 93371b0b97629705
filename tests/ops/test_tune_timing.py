"""The clocks of tuning: what is counted, when they give up, and that events enclose the work."""

from __future__ import annotations

import pytest
import torch

from mori_triton.ops.tune import timing

pytestmark = pytest.mark.cpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on a stream, with events that are none: each piece of work takes 3 ms."""
    entries: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1

        def record(self) -> None:
            self.at = entries.count("work")
            entries.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert entries[-1] == "synchronize", "nobody has waited for the events"
            return 3.0 * (end.at - self.at)

    class Stream:
        def synchronize(self) -> None:
            entries.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return entries


def test_events_are_around_each_run_after_two_that_do_not_count(log):
    times = timing.time_us(lambda: log.append("work"), GPU, 5)
    assert times == [3000.0] * 5
    assert log[:2] == ["work", "work"]
    assert log[2:9] == ["event", "work", "event"] * 2 + ["synchronize"]
    assert log.count("work") == 7


def test_a_hopeless_shape_is_given_up_after_two(log):
    assert timing.time_us(lambda: log.append("work"), GPU, 7, give_up_us=2999.0) == [3000.0] * 2
    assert timing.time_us(lambda: log.append("work"), GPU, 7, give_up_us=3000.0) == [3000.0] * 7
    assert timing.time_us(lambda: log.append("work"), GPU, 1) == [3000.0]


def test_the_hosts_clock_on_the_cpu(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    assert timing.time_us(lambda: None, CPU, 4) == [1e6] * 4
    assert timing.time_us(lambda: None, CPU, 4, give_up_us=1.0) == [1e6] * 2


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(timing, "time_us", lambda work, device, repeats: [4.0, 2.0, 6.0])
    assert timing.copy_rate_gbs(CPU, 4000, 3) == pytest.approx(2.0)
