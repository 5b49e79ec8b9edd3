"""Figures of a server: for Prometheus, and of the last minutes for the page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.hosting.stream import Heard, Stream
from shardlib.untrusted.json_types import JsonObject

#: Bounds of seconds, in histograms.
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
#: Seconds that the page looks back, and between two of its figures.
BACK, EVERY = 300, 1.0


class Watching:
    """Counts what the engines of a server do.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(models))
        labels = ["model"]

        def histogram(name: str, what: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"shardlib_{name}", what, labels, buckets=bounds, registry=self.registry
            )

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"shardlib_{name}", what, [*labels, *more], registry=self.registry)

        self.ttft = histogram("time_to_first_token_seconds", "From request to token.", SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "From token to token.", SECONDS)
        self.whole = histogram("request_seconds", "From request to the end.", SECONDS)
        self.prompt = histogram("prompt_tokens", "Of a request.", TOKENS)
        self.answer = histogram("answer_tokens", "Of a request.", TOKENS)
        self.generated = counter("generated_tokens", "Of answers.")
        self.cached = counter("cached_prompt_tokens", "That others had computed.")
        self.ended = counter("requests_ended", "By reason.", "reason")
        self.of = {name: OneWatch(self, name) for name in models}

    async def look(self, models: Mapping[str, Deployment]) -> None:
        """Writes down how it goes, every second."""
        while True:
            for name, deployed in models.items():
                self.of[name].look(deployed)
            await asyncio.sleep(EVERY)


class _Gauges(Collector):
    """How busy the engines are, when somebody asks."""

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """One metric for each figure of `Load`."""
        loads = {name: asdict(deployed.worker.load) for name, deployed in self._models.items()}
        for figure in next(iter(loads.values()), {}):
            metric = GaugeMetricFamily(f"shardlib_engine_{figure}", "See Load.", labels=["model"])
            for name, load in loads.items():
                metric.add_metric([name], load[figure])
            yield metric


class OneWatch:
    """Counts what one engine does; all of it in the event loop.

    Args:
        all_of: where figures are kept.
        name: of the model.
    """

    def __init__(self, all_of: Watching, name: str) -> None:
        self._ttft = all_of.ttft.labels(name)
        self._tpot = all_of.tpot.labels(name)
        self._whole = all_of.whole.labels(name)
        self._prompt = all_of.prompt.labels(name)
        self._answer = all_of.answer.labels(name)
        self._generated = all_of.generated.labels(name)
        self._cached = all_of.cached.labels(name)
        self._ended = {
            reason: all_of.ended.labels(name, reason)
            for reason in ("length", "stop", "late", "cancelled")
        }
        self._last: dict[tuple[Stream, int], tuple[float, int]] = {}
        self._tokens = self._prompted = self._shared = 0
        self._firsts: deque[tuple[float, float]] = deque(maxlen=2000)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=2000)
        self.history: deque[JsonObject] = deque(maxlen=int(BACK / EVERY))

    def heard(self, stream: Stream, heard: Heard) -> None:
        """A token, or an end."""
        key = stream, heard.index
        before, count = self._last.get(key, (stream.begun, 0))
        if heard.token is not None:
            self._generated.inc()
            self._tokens += 1
            spent = heard.at - before
            (self._tpot if count else self._ttft).observe(spent)
            (self._gaps if count else self._firsts).append((heard.at, spent))
            count += 1
            self._last[key] = heard.at, count
        if heard.ended is not None:
            self._last.pop(key, None)
            size = len(stream.asked[heard.index].prompt)
            self._ended.get(heard.ended, self._ended["cancelled"]).inc()
            self._whole.observe(heard.at - stream.begun)
            self._prompt.observe(size)
            self._answer.observe(count)
            self._cached.inc(heard.reused)
            self._prompted += size
            self._shared += heard.reused

    def look(self, deployed: Deployment) -> None:
        """Writes down how it goes now."""
        load, now = deployed.worker.load, time.perf_counter()
        self.history.append(
            {
                "running": load.running,
                "waiting": load.waiting,
                "used": load.used / load.pages,
                "tokens": self._tokens / EVERY,
                "ttft": _median(self._firsts, now),
                "tpot": _median(self._gaps, now),
            }
        )
        self._tokens = 0

    @property
    def shared(self) -> float:
        """Share of the tokens of prompts that others had computed, of all that were asked."""
        return self._shared / self._prompted if self._prompted else 0.0


def _median(samples: deque[tuple[float, float]], now: float) -> float | None:
    """Of what was seen in the last ten seconds; None for nothing."""
    recent = sorted(seconds for when, seconds in samples if now - when < 10)
    return recent[len(recent) // 2] if recent else None
