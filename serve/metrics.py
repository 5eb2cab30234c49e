"""GET /metrics, in Prometheus' text format."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from serve.routing import Handler

# From a small forward on a fast card to a long drain.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKENS = tuple(2**power for power in range(4, 15))
_TEXTS = tuple(2**power for power in range(11))

STAGES = ("tokenize", "queue", "forward", "total")
"""Of a request: its texts become tokens, wait, are computed; and all of it, from head to answer."""


class Metrics:
    """What has been counted. Threads may count at once."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("embed_requests", "Requests answered.", ("route", "status"), registry=registry)
        seconds = Histogram(
            "embed_request_seconds", "Time of a request, by stage.", ("stage",), registry=registry, buckets=_SECONDS
        )
        self._stages = {stage: seconds.labels(stage) for stage in STAGES}
        self._texts = Counter("embed_texts", "Texts that vectors were asked for.", registry=registry)
        self._tokens = Counter("embed_tokens", "Tokens of these texts, after truncation.", registry=registry)
        self._truncated = Counter("embed_truncated_texts", "Texts that lost their end.", registry=registry)
        self._failed = Counter("embed_failed_texts", "Texts that have no vector.", registry=registry)
        self._forwards = Histogram("embed_forward_seconds", "Time of a forward.", registry=registry, buckets=_SECONDS)
        self._batch_tokens = Histogram("embed_batch_tokens", "Tokens of a forward.", registry=registry, buckets=_TOKENS)
        self._batch_texts = Histogram("embed_batch_texts", "Texts of a forward.", registry=registry, buckets=_TEXTS)

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request has been answered."""
        self._requests.labels(route, str(status)).inc()
        self._stages["total"].observe(seconds)

    def texts(self, num_texts: int, num_tokens: int, num_truncated: int, tokenize_s: float) -> None:
        """The texts of a request have become tokens."""
        self._texts.inc(num_texts)
        self._tokens.inc(num_tokens)
        self._truncated.inc(num_truncated)
        self._stages["tokenize"].observe(tokenize_s)

    def failed(self, num_texts: int) -> None:
        """Texts have no vector."""
        self._failed.inc(num_texts)

    def answer(self, queue_s: float, forward_s: float) -> None:
        """A request has its vectors."""
        self._stages["queue"].observe(queue_s)
        self._stages["forward"].observe(forward_s)

    def forward(self, num_tokens: int, num_texts: int, seconds: float) -> None:
        """A forward has ended."""
        self._forwards.observe(seconds)
        self._batch_tokens.observe(num_tokens)
        self._batch_texts.observe(num_texts)

    def watch(self, gauges: Callable[[], Iterator[Metric]]) -> None:
        """Asks `gauges` for the values of others whenever somebody reads."""

        class Watched(Collector):
            def collect(self) -> Iterator[Metric]:
                return gauges()

        self._registry.register(Watched())

    def handler(self) -> Handler:
        """Of GET /metrics."""

        async def answer(_: Request) -> Response:
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

        return answer


def gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)
