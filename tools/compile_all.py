"""Compiles every kernel that the engines launch to cubins, for every shipped architecture, without a GPU.

Fails on a kernel that does not compile, spills, uses more stack than its header comment declares (`// stack   N bytes`,
none without that line), or draws a warning; on an operator that is not compiled, and on a kernel that no operator uses.

    compile_all.py                   all of them
    compile_all.py --kernel NAME     one kernel: registers, stack, spills and shared memory of each cubin
    compile_all.py --digest          hashes of the cubins: a change of comments and names alone leaves them as they are
"""

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import gkd.ops
from embed.config import ModelConfig
from embed.encoder import Head, Operators
from embed.models import FAMILIES
from gkd.arch import arch_name
from gkd.build import build_all
from gkd.cache import CubinCache
from gkd.compiler import Cubin, nvrtc_build
from gkd.dtype import DType
from gkd.errors import GkdError
from gkd.kernel import KernelSpec
from gkd.ops import Attention, Cast, Dense, Operator, RowBounds, Split
from gkd.ops.pool import POOL_MODES
from gkd.sources import kernels_directory, read_kernel

Request = tuple[KernelSpec, str]

DTYPES = (DType.F32, DType.F16, DType.BF16)
# Everything for the two that most users have; for each of the others one dtype, which finds what it lacks.
MATRIX = {
    75: (DType.F16,),
    80: (*DTYPES, DType.TF32),
    86: (DType.F32,),
    89: (DType.BF16,),
    90: (*DTYPES, DType.TF32, DType.SPLIT),
    100: (DType.BF16,),
    120: (DType.F16,),
}
_STACK = re.compile(r"^// stack +(\d+) bytes", re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What kernels are specialised for of a model."""

    hidden_size: int
    num_heads: int
    intermediate_size: int

    @property
    def config(self) -> ModelConfig:
        """A model of these sizes. No kernel depends on the others."""
        return ModelConfig(
            family=FAMILIES["bert"],
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=1,
            max_position_embeddings=1,
            type_vocab_size=1,
            pad_token_id=0,
            layer_norm_eps=1e-5,
        )


# The models whose sizes the kernels are compiled for: bge-m3, and minilm, whose sizes e5-small shares.
GEOMETRIES = (Geometry(1024, 16, 4096), Geometry(384, 12, 1536))


# For models of other widths of a head: one with kernels of its own, one without; and with the bias of MPNet.
ATTENTIONS: tuple[Operator, ...] = (
    Attention(num_heads=8, head_dim=128),
    Attention(num_heads=8, head_dim=80),
    Attention(num_heads=12, head_dim=64, max_distance=128),
)
# What stands behind an encoder, always in float32.
HEADS: tuple[Operator, ...] = (
    *(op for geometry in GEOMETRIES for op in Head(geometry.hidden_size, ("mean",), ()).all()),
    *Head(1024, POOL_MODES, ()).all(),
    Dense(768, 512, "tanh"),
)


def operators(dtype: DType) -> list[Operator]:
    """What engines run in a precision: the forward of each model, and the casts of its weights."""
    # What tf32 may lack shows at one geometry: everything else differs from 16 bits in the size of an element alone.
    geometries = GEOMETRIES[:1] if dtype is DType.TF32 else GEOMETRIES
    forwards = [op for geometry in geometries for op in Operators(geometry.config, dtype).all()]
    weights: list[Operator] = [Cast(source, target) for source, target in permutations(DTYPES, 2)]
    if dtype is DType.TF32:
        weights = [Cast(source, dtype) for source in DTYPES]
    if dtype is DType.SPLIT:
        widths = {width for geometry in GEOMETRIES for width in (geometry.hidden_size, geometry.intermediate_size)}
        weights = [*(Split(source) for source in DTYPES), *(RowBounds(width) for width in sorted(widths))]
    return [*forwards, *ATTENTIONS, *HEADS, *weights]


def shipped() -> list[Request]:
    """Every kernel and architecture, once."""
    requests = (
        (spec, arch_name(arch))
        for arch, dtypes in MATRIX.items()
        for dtype in dtypes
        for op in operators(dtype)
        for spec in op.plan(dtype, arch).specs
    )
    return list(dict.fromkeys(requests))


def omissions(requests: Sequence[Request], directory: Path) -> Iterator[str]:
    """What an edit has left out: operators without a kernel here, kernels without an operator."""
    compiled_ops = {type(op).__name__ for dtypes in MATRIX.values() for dtype in dtypes for op in operators(dtype)}
    for name in gkd.ops.__all__:
        if name != Operator.__name__ and name not in compiled_ops:
            yield f"operator {name} is not compiled: no engine lists it in its operators, see `operators`"
    compiled = {spec.name for spec, _ in requests}
    for path in sorted(directory.glob("*.cu")):
        if path.stem not in compiled:
            yield f"kernel {path.name} is not compiled: no operator's plan names it"


def faults(cubin: Cubin, source_text: str) -> Iterator[str]:
    """What is wrong with a cubin that compiled."""
    info, resources = cubin.info, cubin.info.resources
    declared = _STACK.search(source_text)
    stack_limit = int(declared[1]) if declared else 0
    if resources is None:
        yield "the compiler's log does not tell its registers: gkd/compiler.py cannot read this NVRTC's log"
        return
    if resources.spill_bytes:
        yield f"spills {resources.spill_bytes} bytes"
    elif resources.stack_bytes > stack_limit:
        yield f"uses {resources.stack_bytes} bytes of stack, its header comment declares {stack_limit}"
    if _ENTRY.findall(info.log) != [info.name]:
        yield f"has entries {_ENTRY.findall(info.log)}, expected `{info.name}` alone"
    for line in info.log.splitlines():
        if "warning" in line.lower():
            yield f"draws a warning: {line}"


def describe(request: Request) -> str:
    """One line that tells a cubin from every other."""
    spec, arch = request
    return f"{spec.name} {arch} {' '.join(f'{name}={value}' for name, value in spec.defines)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints and checks; the exit status."""
    parser = argparse.ArgumentParser(description="Compiles every kernel to cubins, without a GPU.")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel, with what each of its cubins takes")
    parser.add_argument("--digest", action="store_true", help="print a hash of each cubin")
    args = parser.parse_args(argv)
    directory = kernels_directory()
    started = time.perf_counter()
    try:
        requests = shipped()
        problems = list(omissions(requests, directory))
        if args.kernel:
            requests = [request for request in requests if request[0].name == args.kernel]
            problems = [] if requests else [f"no operator's plan names a kernel `{args.kernel}`"]
        cubins = build_all(requests, CubinCache(None), directory)
        compiler = nvrtc_build()
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    texts = {name: read_kernel(name, directory).text for name in {spec.name for spec, _ in requests}}
    for request, cubin in zip(requests, cubins, strict=True):
        problems += [f"{describe(request)}: {fault}" for fault in faults(cubin, texts[cubin.info.name])]
        if args.digest:
            print(hashlib.sha256(cubin.code).hexdigest()[:16], describe(request))
        elif args.kernel and cubin.info.resources:
            resources = cubin.info.resources
            print(
                f"{resources.registers:3} registers, {resources.stack_bytes} bytes stack, "
                f"{resources.spill_bytes} bytes spills, {resources.static_smem_bytes} bytes static smem, "
                f"{cubin.info.seconds:.2f} s  {describe(request)}"
            )
    for problem in problems:
        print(problem, file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"{len(cubins)} cubins, {len(problems)} problems, {seconds:.1f} s with NVRTC {compiler}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
