"""Loads an embedding server from several processes, and says what its clients saw.

    python -m tools.load_embed URL [--workloads NAME ...] [--seconds S] [--processes N] [--rate R] [--token T]

A closed loop sends a request when the one before is answered, from so many connections; with `--rate` requests arrive
at random (Poisson), whether or not the server keeps up, and wait for a connection, which counts. Times by stage are
what the server says of them (`server-timing`); the CPU share is that of the busiest client process, and above 0.8 the
clients are the limit. The server's CPU time comes from its own /metrics.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop
from numpy.typing import NDArray

WORDS = re.findall(
    r"\w+",
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man me even most made after also did many before must through back years where much your way well down
    should because each just people how too little state good very make world still own see men work long get here
    between both life being under
    """,
)

STAGES = ("tokenize", "queue", "forward")


@dataclass(frozen=True)
class Workload:
    """Requests of one kind."""

    name: str
    num_clients: int
    num_texts: int
    min_words: int
    max_words: int
    encoding_format: str = "base64"

    def bodies(self, seed: int, count: int = 64) -> list[bytes]:
        """JSON of requests, each of other texts."""
        rng = random.Random(f"{self.name} {seed}")
        return [
            json.dumps(
                {
                    "texts": [
                        " ".join(rng.choices(WORDS, k=rng.randint(self.min_words, self.max_words)))
                        for _ in range(self.num_texts)
                    ],
                    "encoding_format": self.encoding_format,
                }
            ).encode()
            for _ in range(count)
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("one", 1, 1, 12, 12),
        Workload("16 clients", 16, 1, 12, 12),
        Workload("64 clients", 64, 1, 12, 12),
        Workload("documents", 8, 32, 470, 470),
        Workload("mixed", 8, 32, 6, 400),
    )
}


@dataclass
class Seen:
    """What the clients of one process saw."""

    latencies_s: list[float] = field(default_factory=list)
    stages_ms: list[tuple[float, ...]] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    broken: int = 0
    cpu_share: float = 0.0

    def add(self, latency_s: float, head: bytes) -> None:
        status = int(head[9:12])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.latencies_s.append(latency_s)
            if timing := re.search(rb"server-timing: tokenize;dur=(\S+), queue;dur=(\S+), forward;dur=(\S+)\r", head):
                self.stages_ms.append(tuple(map(float, timing.groups())))


class Connection(asyncio.Protocol):
    """One request at a time over one kept connection."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._body_start = 0
        self._end = 0
        self._waiter: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    async def request(self, message: bytes) -> bytes:
        """The head of the answer, once all of it has arrived."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._waiter

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._end:
            end_of_head = self._received.find(b"\r\n\r\n")
            if end_of_head < 0:
                return
            self._body_start = end_of_head + 4
            length = re.search(rb"content-length: (\d+)", self._received[:end_of_head])
            assert length is not None
            self._end = self._body_start + int(length[1])
        if len(self._received) >= self._end and self._waiter is not None:
            head = bytes(self._received[: self._body_start])
            del self._received[: self._end]
            self._end = 0
            waiter, self._waiter = self._waiter, None
            waiter.set_result(head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class Plan:
    """What one process does."""

    url: str
    workload: Workload
    num_clients: int
    start_s: float
    """On the system's clock, for all processes alike."""
    seconds: float
    rate: float | None
    """Requests a second, of this process; None: a closed loop."""
    token: str | None
    seed: int


def messages(plan: Plan) -> list[bytes]:
    address = urlsplit(plan.url)
    token = f"authorization: Bearer {plan.token}\r\n" if plan.token else ""
    head = f"POST /create_embedding HTTP/1.1\r\nhost: {address.netloc}\r\n{token}content-length: %d\r\n\r\n".encode()
    return [head % len(body) + body for body in plan.workload.bodies(plan.seed)]


def run_clients(plan: Plan) -> Seen:
    """A process's part."""
    return uvloop.run(_clients(plan))


async def _clients(plan: Plan) -> Seen:
    seen, requests = Seen(), messages(plan)
    address = urlsplit(plan.url)
    host, port = address.hostname or "", address.port or 80
    loop = asyncio.get_running_loop()

    async def connect() -> Connection:
        _, connection = await loop.create_connection(Connection, host, port)
        return connection

    async def send(connection: Connection, number: int, since_s: float) -> None:
        head = await connection.request(requests[number % len(requests)])
        seen.add(time.perf_counter() - since_s, head)

    async def closed(connection: Connection, first: int) -> None:
        number = first
        while time.perf_counter() < end_s:
            await send(connection, number, time.perf_counter())
            number += 1

    async def arrive(number: int) -> None:
        since_s = time.perf_counter()
        connection = idle.popleft() if idle else await connect()
        try:
            await send(connection, number, since_s)
            idle.append(connection)
        except OSError:
            seen.broken += 1

    idle = deque([await connect() for _ in range(plan.num_clients)])
    connections = list(idle)
    await asyncio.sleep(max(0.0, plan.start_s - time.time()))
    cpu_s, start_s = time.process_time(), time.perf_counter()
    end_s = start_s + plan.seconds
    if plan.rate is None:
        results = await asyncio.gather(
            *(closed(connection, 7 * index) for index, connection in enumerate(connections)), return_exceptions=True
        )
        seen.broken += sum(result is not None for result in results)
    else:
        rng, tasks, next_s, number = random.Random(plan.seed), set[asyncio.Task[None]](), start_s, 0
        while (next_s := next_s + rng.expovariate(plan.rate)) < end_s:
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            task = asyncio.create_task(arrive(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.gather(*tasks)
    seen.cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - start_s)
    for connection in (*connections, *idle):
        connection.close()
    return seen


@dataclass(frozen=True)
class Report:
    """What all clients saw, and what the server says it took."""

    workload: str
    rate: float | None
    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    statuses: dict[int, int]
    broken: int
    client_cpu_share: float
    server_cpu_us: float
    """For each request that was answered with vectors."""

    def lines(self) -> list[str]:
        stages = ", ".join(f"{name} {of['p50']:.2f}/{of['p99']:.2f}" for name, of in self.stages_ms.items())
        failed = {status: count for status, count in self.statuses.items() if status != 200}
        arrivals = "" if self.rate is None else f" at {self.rate:g} requests/s"
        trouble = f"; answers {failed}, {self.broken} broken" if failed or self.broken else ""
        return [
            f"{self.workload}{arrivals}: {self.requests_per_s:,.0f} requests/s, {self.texts_per_s:,.0f} texts/s, "
            f"{self.tokens_per_s:,.0f} tokens/s; p50 {self.latency_ms['p50']:.2f} ms, p99 {self.latency_ms['p99']:.2f} "
            f"ms, slowest {self.latency_ms['slowest']:.2f} ms{trouble}",
            f"    by stage p50/p99 ms: {stages}; server {self.server_cpu_us:.0f} us of CPU a request; "
            f"busiest client process {self.client_cpu_share:.0%} of a core",
        ]


def percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {"p50": math.nan, "p99": math.nan, "slowest": math.nan}
    p50, p99, slowest = np.percentile(values, [50, 99, 100])
    return {"p50": float(p50), "p99": float(p99), "slowest": float(slowest)}


def read_metrics(url: str) -> dict[str, float]:
    """The samples of /metrics that have no labels."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.split() for line in lines if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in pairs}


def run_load(
    url: str,
    workload: Workload,
    *,
    seconds: float,
    processes: int,
    rate: float | None = None,
    token: str | None = None,
    warm_up_s: float = 1.0,
    beside: Callable[[], None] | None = None,
) -> Report:
    """Clients in other processes, all at once; `beside` is called meanwhile."""
    processes = min(processes, workload.num_clients) if rate is None else processes
    shares = [len(range(index, workload.num_clients, processes)) for index in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(abs, range(processes))  # they have started

        def measure(length_s: float) -> list[Seen]:
            start_s = time.time() + 0.5
            plans = [
                Plan(url, workload, share, start_s, length_s, rate / processes if rate else None, token, index)
                for index, share in enumerate(shares)
            ]
            pending = pool.map_async(run_clients, plans, chunksize=1)
            if beside is not None:
                beside()
            return pending.get()

        measure(warm_up_s)
        before = read_metrics(url)
        seen = measure(seconds)
        after = read_metrics(url)
    latencies_s = np.array([value for each in seen for value in each.latencies_s])
    stages_ms = np.array([value for each in seen for value in each.stages_ms]).reshape(-1, len(STAGES))
    statuses: dict[int, int] = {}
    for each in seen:
        for status, count in each.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    change = {name: after[name] - before.get(name, 0) for name in after}
    return Report(
        workload.name,
        rate,
        len(latencies_s) / seconds,
        workload.num_texts * len(latencies_s) / seconds,
        change["embed_tokens_total"] / seconds,
        percentiles(1e3 * latencies_s),
        {name: percentiles(stages_ms[:, index]) for index, name in enumerate(STAGES)},
        statuses,
        sum(each.broken for each in seen),
        max(each.cpu_share for each in seen),
        1e6 * change["process_cpu_seconds_total"] / max(1, len(latencies_s)),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rate", type=float, help="requests a second that arrive at random")
    parser.add_argument("--token", default=os.environ.get("EMBED_TOKEN"))
    parser.add_argument("--json", type=Path, help="append a record for each workload")
    arguments = parser.parse_args(argv)
    url = arguments.url.rstrip("/")
    for name in arguments.workloads:
        report = run_load(
            url,
            WORKLOADS[name],
            seconds=arguments.seconds,
            processes=arguments.processes,
            rate=arguments.rate,
            token=arguments.token,
        )
        print(*report.lines(), sep="\n", flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
