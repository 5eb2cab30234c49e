"""Kernels to cubins: from the cache, else compiled, several at a time."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from gkd.cache import CubinCache, cache_key
from gkd.compiler import Cubin, compile_kernel, compile_options, nvrtc_build
from gkd.deep_thread import start_deep_thread
from gkd.errors import CompileError
from gkd.kernel import KernelSpec
from gkd.sources import KernelSource, kernels_directory, read_kernel

MAX_THREADS = 4


def build(spec: KernelSpec, arch: str, cache: CubinCache, directory: Path | None = None) -> Cubin:
    """The cubin of one kernel for one architecture, as `sm_90a`: see build_all."""
    [cubin] = build_all([(spec, arch)], cache, directory)
    return cubin


def build_all(
    requests: Sequence[tuple[KernelSpec, str]], cache: CubinCache, directory: Path | None = None
) -> list[Cubin]:
    """One cubin a request (kernel, architecture), in their order; equal requests are built once.

    `directory` holds the kernels, by default this installation's. Compiles on up to MAX_THREADS threads of its own, so
    it may be called from any thread. Raises the first request's error, once nothing is being compiled any more:
    CompileError, also for a kernel that a complete cache lacks; DeviceError without NVRTC.
    """
    directory = directory or kernels_directory()
    sources = {name: read_kernel(name, directory) for name in dict.fromkeys(spec.name for spec, _ in requests)}
    results: dict[tuple[KernelSpec, str], Future[Cubin]] = {}
    jobs: list[_Job] = []
    for spec, arch in dict.fromkeys(requests):
        source, options = sources[spec.name], compile_options(spec, arch)
        result = results[spec, arch] = Future()
        key = cache_key(source, options, nvrtc_build())
        cached = cache.load(key)
        if cached:
            result.set_result(cached)
        elif cache.complete:
            raise CompileError(
                f"kernel `{spec.name}` for {arch} is not in the cache, and GKD_ASSERT_CACHED=1 forbids compiling it; "
                f"options: {' '.join(options)}; run once without it to fill the cache"
            )
        else:
            jobs.append(_Job(key, source, options, arch, result))
    _run(jobs, cache)
    return [results[request].result() for request in requests]


@dataclass(frozen=True, slots=True)
class _Job:
    """One kernel to compile."""

    key: str
    source: KernelSource
    options: tuple[str, ...]
    arch: str
    result: Future[Cubin]


def _run(jobs: Sequence[_Job], cache: CubinCache) -> None:
    """Gives every job its result or its error."""
    # next() of a list's iterator is atomic: each job is taken once.
    remaining = iter([*jobs])

    def drain() -> None:
        for job in remaining:
            try:
                cubin = compile_kernel(job.source, job.options, job.arch)
                cache.store(job.key, job.source, cubin)
                job.result.set_result(cubin)
            except BaseException as error:  # raised where the result is asked for
                job.result.set_exception(error)

    threads = [start_deep_thread(drain, f"gkd-compile-{i}") for i in range(min(len(jobs), MAX_THREADS))]
    for thread in threads:
        thread.join()
