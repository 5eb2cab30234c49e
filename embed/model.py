"""The engine: `Embed`, a handle on a loaded model that any number of owners and threads share."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from embed.batch import Batch, batches, check_ids
from embed.checkpoint import Checkpoint, weights_path
from embed.cross_encoder import ScoreActivation, scores_of
from embed.dense import classifier_tensors, load_dense, plan_classifier, plan_dense, plan_head
from embed.encoder import Encoder, Head, Operators, token_operators
from embed.errors import ClosedError, ModelError, NonFiniteError, RequestError
from embed.hub import resolve
from embed.lexical import OUTPUTS, Embeddings, Output, lexical_weights
from embed.pipeline import DenseModule, Pipeline, Pooling, Similarity, read_pipeline
from embed.precision import PRECISIONS, precisions, split_scales, takes_split
from embed.tokenizer import Tokenizer
from embed.weights import load_weights, plan_weights
from gkd import driver
from gkd.backend import Backend
from gkd.call import Call
from gkd.cpu import CpuBackend
from gkd.dtype import DType
from gkd.env import read_env
from gkd.errors import CompileError, DeviceError, DriverError, OutOfMemory
from gkd.ops.pool import POOL_MODES, PoolMode

logger = logging.getLogger(__name__)

EM_POOL_CLS: PoolMode = "cls"
EM_POOL_MEAN: PoolMode = "mean"
# Most tokens and texts of one forward.
EM_ROWS_BUDGET = 16384
EM_BATCH_MAX = 1024

# Told (bytes done, bytes in all) while weights load.
Progress = Callable[[int, int], None]
# Vectors (num_texts, dim), and why texts have none, by index.
Outcome = tuple[NDArray[np.float32], dict[int, NonFiniteError]]
# A backend of a precision, on the device that an engine runs on.
BackendOf = Callable[[DType], Backend]


class Embed:
    """A handle on an engine. Handles of one engine share weights and settings; the last to close gives all back.

    Every method may be called from any thread. Forwards of one engine run one after another; tokenizing, and
    whatever only reads, does not wait for them.
    """

    def __init__(self, engine: "_Engine") -> None:
        self._engine: _Engine | None = engine
        engine.add_owner()

    @classmethod
    def open(
        cls,
        model: str | Path,
        gpu: int = -1,
        dtype: str = "f32",
        *,
        pool: PoolMode | None = None,
        normalize: bool | None = None,
        maxseq: int | None = None,
        refresh: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Loads a model directory, the model package of that name, or `org/name[@revision]` from a model hub.

        A reference is downloaded at its first use, with a progress bar on a terminal; after that no network is touched
        unless `refresh` asks for a newer version.
        `gpu` is a CUDA ordinal, or -1 for the best device there is. `pool`, `normalize` and `maxseq` overrule the
        model's files, `maxseq` within the position table. Raises ModelError (WeightsError, TokenizerError) naming
        the file and what is wrong in it, DeviceError for a device or precision that cannot be had.
        """
        _check_pool_mode(pool)
        precision = _precision(dtype)
        backend_of = _choose_backend(gpu, precision)
        resolved = resolve(model, refresh)  # after what can be refused without a download
        pipeline = read_pipeline(resolved.directory, pool, normalize)
        backend = backend_of(precision)
        try:
            backend.begin()  # while the tokenizer is read
            engine = _Engine(
                resolved.name,
                backend,
                backend_of,
                pipeline,
                Tokenizer(
                    pipeline.directory,
                    lowercase=pipeline.lowercase,
                    pairs=pipeline.score_activation is not None,
                ),
            )
            if maxseq is not None:
                engine.set_maxseq(maxseq)
            engine.reload(progress)
        except BaseException:
            backend.stop()
            raise
        return cls(engine)

    def share(self) -> "Embed":
        """Another handle on the same engine, to be closed by its owner."""
        return Embed(self._open_engine)

    def close(self) -> None:
        """Gives this handle up; the last one waits for a running forward and frees everything. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.remove_owner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _open_engine(self) -> "_Engine":
        if self._engine is None:
            raise ClosedError("this handle has been closed")
        return self._engine

    @property
    def name(self) -> str:
        """The model's name: the last part of its directory, or the package or `org/name` it was opened by."""
        return self._open_engine.name

    @property
    def family(self) -> str:
        """`model_type` of the model's family."""
        return self._open_engine.pipeline.config.family.model_type

    @property
    def num_layers(self) -> int:
        """Layers of the encoder."""
        return self._open_engine.pipeline.config.num_layers

    @property
    def score_activation(self) -> ScoreActivation | None:
        """Of a cross-encoder, which has `rerank`: what makes a score of a logit; None: a model that has `encode`."""
        return self._open_engine.pipeline.score_activation

    @property
    def dim(self) -> int:
        """Elements of a vector; 1, the score, of a cross-encoder."""
        return self._open_engine.dim

    @property
    def maxseq(self) -> int:
        """Most tokens of one text, of a cross-encoder of a pair of texts, special tokens included."""
        return self._open_engine.maxseq

    @property
    def pooling(self) -> Pooling:
        """Pooling modes, and whether vectors are normalised where a call does not say."""
        return self._open_engine.pooling

    @property
    def pooling_assumed(self) -> bool:
        """The pooling is a convention of the family: neither the model's files nor the caller set it."""
        return self._open_engine.pipeline.assumed

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts that the model's authors put before a text, by name."""
        return self._open_engine.pipeline.prompts.texts

    @property
    def default_prompt_name(self) -> str | None:
        """Name of the prompt that a text gets where the caller says nothing."""
        return self._open_engine.pipeline.prompts.default

    @property
    def similarity(self) -> Similarity:
        """How the model's authors compare vectors; `embed.similarity` computes it."""
        return self._open_engine.pipeline.similarity

    @property
    def ok(self) -> bool:
        """False once the handle is closed, and after a device fault until a reload has succeeded."""
        return self._engine is not None and not self._engine.backend.faulted

    @property
    def loaded(self) -> bool:
        """The weights are on the device now."""
        return self._open_engine.loaded

    @property
    def backend(self) -> str:
        """`cuda` or `cpu`."""
        return self._open_engine.backend.name

    @property
    def device_name(self) -> str:
        """The device as its driver or operating system names it."""
        return self._open_engine.backend.device_name

    @property
    def dtype(self) -> str:
        """The precision that was asked for: `f32`, `tf32`, `f16` or `bf16`."""
        return self._open_engine.dtype.value

    @property
    def uses_split(self) -> bool:
        """Matrices are multiplied in f32 on tensor cores, as split numbers."""
        return self._open_engine.backend.dtype is DType.SPLIT

    @property
    def exceeds_split(self) -> bool:
        """Device and widths would do for split numbers, but a bound of the model is out of their range."""
        return self._open_engine.exceeds_split

    @property
    def recomputed(self) -> int:
        """Texts since `open` whose vector was not finite in another precision, and was computed again in f32."""
        return self._open_engine.recomputed

    @property
    def kernel_count(self) -> int:
        """Kernels on the device now, those for recomputing in f32 among them once that was needed; 0 on the CPU."""
        return self._open_engine.kernel_count

    @property
    def graph_count(self) -> int:
        """Forwards recorded on the device now; 0 on the CPU."""
        return self._open_engine.graph_count

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights on the device, with those in f32 once they were needed; 0 while unloaded."""
        return self._open_engine.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that was planned at load, also of the weights in f32; 0 while unloaded."""
        return self._open_engine.workspace_bytes

    def set_pooling(self, mode: PoolMode, normalize: bool) -> None:
        """Pooling of all calls that begin from now on; a forward that is running is not touched.

        Raises ModelError for a mode that is not known, or that what comes behind the pooling does not take, and of a
        cross-encoder, whose head is over the first token.
        """
        _check_pool_mode(mode)
        engine = self._open_engine
        if engine.pipeline.score_activation is not None:
            raise ModelError(f"{engine.name} is a cross-encoder: it has no pooling to set")
        engine.pipeline.dim((mode,))
        engine.pooling = Pooling((mode,), normalize)

    def set_maxseq(self, maxseq: int) -> int:
        """Most tokens of one text from now on, clamped to the position table; returns what it became."""
        return self._open_engine.set_maxseq(maxseq)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; over `maxseq` the head is kept and the last special token appended again."""
        ids, _ = self.tokenize_batch([text])
        return [int(token) for token in ids]

    def tokenize_batch(
        self, texts: Sequence[str], prompt: str | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Packed token ids (num_tokens,) and where each text lies in them (num_texts + 1,), `prompt` before each.

        `prompt` None is the model's default one. Works while unloaded. Raises RequestError naming the item that is no
        text.
        """
        ids, offsets, _ = self.tokenize_counted(texts, prompt)
        return ids, offsets

    def tokenize_counted(
        self, texts: Sequence[str], prompt: str | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], list[int]]:
        """What `tokenize_batch` gives, and how many tokens each text had before it was cut to `maxseq`."""
        engine = self._open_engine
        prompt = engine.default_prompt if prompt is None else prompt
        return engine.tokenizer.encode_counted(texts, engine.maxseq, prompt)

    @overload
    def encode(
        self,
        texts: str,
        normalize: bool | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        outputs: None = None,
    ) -> NDArray[np.float32]: ...
    @overload
    def encode(
        self,
        texts: Sequence[str],
        normalize: bool | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        outputs: None = None,
    ) -> NDArray[np.float32]: ...
    @overload
    def encode(
        self,
        texts: str | Sequence[str],
        normalize: bool | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        outputs: Collection[Output],
    ) -> Embeddings: ...
    def encode(
        self,
        texts: str | Sequence[str],
        normalize: bool | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        outputs: Collection[Output] | None = None,
    ) -> NDArray[np.float32] | Embeddings:
        """Vectors (num_texts, dim) of a list of texts, or the vector (dim,) of one string.

        `normalize` None is the engine's setting. `prompt` stands before each text; `prompt_name` is that of one of the
        model's; with neither it is the model's default one, and "" is none. With `outputs`, some of dense, sparse and
        colbert, all of them come from one forward, as lists even of one string. In any precision but f32, a text whose
        vector is not finite is computed again in f32, which other texts' vectors do not show. Raises RequestError, also
        for an output that the model has no head for, NonFiniteError, ClosedError.
        """
        engine = self._open_engine
        if prompt is None:
            prompt = engine.prompt_of(prompt_name)
        batch = [texts] if isinstance(texts, str) else texts
        ids, offsets = self.tokenize_batch(batch, prompt)
        count = engine.count_prompt_tokens(prompt)
        if outputs is not None:
            return engine.encode_outputs(ids, offsets, normalize, count, frozenset(outputs))
        vectors = self.encode_ids(ids, offsets, normalize=normalize, num_prompt_tokens=count)
        return vectors.reshape(self.dim) if isinstance(texts, str) else vectors

    def encode_ids(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        out: NDArray[np.float32] | None = None,
        normalize: bool | None = None,
        num_prompt_tokens: int | None = None,
    ) -> NDArray[np.float32]:
        """Vectors of packed token ids, taken as they are.

        The first `num_prompt_tokens` of each text take no part in the pooling; None: as many as `tokenize_batch` gives
        for the model's default prompt, if its authors leave that out.

        Shapes:  ids (num_tokens,), offsets (num_texts + 1,) from 0 to num_tokens; out (num_texts, dim), made if None.
        Errors:  RequestError for ids out of range, an empty or overlong text, an `out` that does not fit;
                 NonFiniteError; ClosedError.
        """
        return self._open_engine.encode_ids(ids, offsets, out, normalize, num_prompt_tokens)

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one forward: more are computed in several."""
        return self._open_engine.max_tokens

    @property
    def max_batch_texts(self) -> int:
        """Most texts of one forward."""
        return EM_BATCH_MAX

    def prepare_ids(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], num_prompt_tokens: int | None = None
    ) -> "PreparedIds":
        """What can be done for `start_encode` before its turn comes. Shapes and errors as of `encode_ids`.

        Works while unloaded, and waits for nothing: the next texts are prepared while the device works on others.
        """
        return self._open_engine.prepare_ids(ids, offsets, num_prompt_tokens)

    def start_encode(self, prepared: "PreparedIds", normalize: bool | None = None) -> "Call[Outcome]":
        """Begins what `encode_ids` does; `result` of what this returns waits for the device, and is to be asked once.

        It gives the vectors (num_texts, dim), and of each text without a finite one a NonFiniteError by its index: its
        row means nothing. It raises ClosedError, and what goes wrong with the device.
        """
        return self._open_engine.start_encode(prepared, normalize)

    def rerank(self, query: str, texts: Sequence[str], *, raw_scores: bool = False) -> NDArray[np.float32]:
        """Scores (num_texts,) of texts for a query, in their order, by a cross-encoder; a higher one is a better text.

        They are what sentence-transformers' CrossEncoder predicts, by the model's own activation; with `raw_scores`
        they are logits. A pair of more than `maxseq` tokens loses the ends of its texts, the longer one's first. The
        model's default prompt, if it has one, stands before the query. A score that is not finite in f16 or bf16 is
        computed again in f32, as `encode` does. Raises RequestError, also of a model that gives vectors,
        NonFiniteError, ClosedError.
        """
        return self._open_engine.rerank(query, texts, raw_scores)

    def unload(self) -> None:
        """Gives weights, workspace and device back; settings and tokenizer stay. Idempotent."""
        self._open_engine.unload()

    def reload(self) -> None:
        """Loads the weights again from the same directory. Idempotent; raises as `open`, and stays unloaded then."""
        self._open_engine.reload()


@dataclass(frozen=True, slots=True)
class PreparedIds:
    """Packed token ids, checked and cut into forwards."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    token_type_ids: NDArray[np.int32] | None
    """None: all of them 0."""
    num_prompt_tokens: int
    batches: Sequence[Batch]
    max_tokens: int
    """Of one of these batches, at most."""

    @property
    def num_texts(self) -> int:
        return len(self.offsets) - 1


def _raise_first(failures: Mapping[int, NonFiniteError]) -> None:
    for text, error in failures.items():
        raise NonFiniteError(f"texts[{text}]: {error}") from error.__cause__


def _check_pool_mode(mode: str | None) -> None:
    if mode is not None and mode not in POOL_MODES:
        raise ModelError(f"pooling mode {mode!r} is not supported; known: {', '.join(POOL_MODES)}")


def _precision(dtype: str) -> DType:
    for precision in PRECISIONS:
        if precision.value == dtype:
            return precision
    raise DeviceError(f"dtype {dtype}: expected one of {', '.join(precision.value for precision in PRECISIONS)}")


def _choose_backend(gpu: int, precision: DType) -> BackendOf:
    """For the CUDA device that was named, for the best one, or for the CPU where there is none and none was named."""
    reason = driver.unavailable()
    if reason is None:
        # Not at the top: a start on the CPU, which needs nothing of it, is a tenth of a second sooner.
        from gkd.cuda import CudaBackend
        from gkd.device import choose_device

        device = choose_device(gpu)
        possible = precisions(device.capability)
        if precision not in possible:
            raise DeviceError(
                f"dtype {precision.value} cannot be used: {device.name} has compute capability "
                f"{device.capability // 10}.{device.capability % 10}, expected 8.0 or later; use another GPU, or "
                f"{', '.join(dtype.value for dtype in possible)}"
            )
        return partial(CudaBackend, device)
    named = gpu if gpu != -1 else read_env().gpu_device
    if named is not None:
        raise DeviceError(f"gpu {named} cannot be used: {reason}")
    if precision is not DType.F32:
        raise DeviceError(f"dtype {precision.value} cannot be used: the CPU backend computes in f32, and {reason}")
    return lambda _: CpuBackend()


class _Engine:
    """What the handles of a model share."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        backend_of: BackendOf,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        rows_budget: int = EM_ROWS_BUDGET,
    ) -> None:
        """A forward takes at most `rows_budget` tokens, or what the device or the longest text makes of it."""
        self.name = name
        self.dtype = backend.dtype
        self.backend = backend
        self.pipeline = pipeline
        self.tokenizer = tokenizer
        self.pooling = pipeline.pooling
        self.maxseq = pipeline.maxseq
        self._backend_of = backend_of
        self._num_owners = 0
        self._owners_lock = threading.Lock()
        # Changed by what the backend's `call` runs, one after another: a forward, an unload, a load.
        self._encoder: Encoder | None = None
        self._exact: _Engine | None = None
        self.recomputed = 0
        if self.dtype is DType.F32 and self._takes_split:
            self.backend.dtype = DType.SPLIT
        # A text is never split, so a forward must hold the longest.
        self._most_tokens = max(min(rows_budget, self.backend.rows_budget), pipeline.config.max_tokens)
        self.max_tokens = self._most_tokens
        """Of a forward; less than planned where the device has no memory for it."""

    @property
    def loaded(self) -> bool:
        return self._encoder is not None and not self.backend.faulted

    @property
    def exceeds_split(self) -> bool:
        return self.dtype is DType.F32 and self.backend.dtype is DType.F32 and self._takes_split

    @property
    def _takes_split(self) -> bool:
        return takes_split(self.pipeline.config, self.backend.arch)

    @property
    def kernel_count(self) -> int:
        exact = self._exact
        return self.backend.kernel_count + (exact.kernel_count if exact is not None else 0)

    @property
    def graph_count(self) -> int:
        exact = self._exact
        return self.backend.graph_count + (exact.graph_count if exact is not None else 0)

    @property
    def weights_bytes(self) -> int:
        encoder, exact = self._encoder, self._exact
        own = encoder.weights_bytes if encoder is not None else 0
        return own + (exact.weights_bytes if exact is not None else 0)

    @property
    def workspace_bytes(self) -> int:
        encoder, exact = self._encoder, self._exact
        own = encoder.workspace_bytes if encoder is not None else 0
        return own + (exact.workspace_bytes if exact is not None else 0)

    def add_owner(self) -> None:
        with self._owners_lock:
            self._num_owners += 1

    def remove_owner(self) -> None:
        with self._owners_lock:
            self._num_owners -= 1
            last = self._num_owners == 0
        if last:
            self.unload()
            self.backend.stop()

    @property
    def dim(self) -> int:
        dim = self.pipeline.dim(self.pooling.modes)
        return dim if self.pipeline.truncate_dim is None else min(self.pipeline.truncate_dim, dim)

    @property
    def default_prompt(self) -> str:
        return self.prompt_of(None)

    def prompt_of(self, name: str | None) -> str:
        prompts = self.pipeline.prompts
        name = prompts.default if name is None else name
        if name is None:
            return ""
        if name not in prompts.texts:
            raise RequestError(f"prompt_name {name!r}: known prompts: {', '.join(prompts.texts) or 'none'}")
        return prompts.texts[name]

    def count_prompt_tokens(self, prompt: str) -> int:
        """Of a prompt that is to take no part in the pooling: its tokens and the special one before them."""
        if self.pipeline.prompts.pooled or not prompt:
            return 0
        ids, _ = self.tokenizer.encode_batch([prompt], self.maxseq)
        return len(ids) - 1

    def set_maxseq(self, maxseq: int) -> int:
        if maxseq < self.tokenizer.min_tokens:
            raise ModelError(f"maxseq {maxseq}: expected at least {self.tokenizer.min_tokens}, the special tokens")
        self.maxseq = min(maxseq, self.pipeline.config.max_tokens)
        return self.maxseq

    def encode_ids(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        out: NDArray[np.float32] | None,
        normalize: bool | None,
        num_prompt_tokens: int | None,
    ) -> NDArray[np.float32]:
        prepared = self.prepare_ids(ids, offsets, num_prompt_tokens)
        shape = (prepared.num_texts, self.dim)
        if out is not None and (out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous):
            raise RequestError(
                f"out: expected a contiguous float32 array of shape {shape}, got {out.dtype} {out.shape}"
            )
        vectors, failures = self.start_encode(prepared, normalize, out).result()
        _raise_first(failures)
        return vectors

    def rerank(self, query: str, texts: Sequence[str], raw_scores: bool) -> NDArray[np.float32]:
        activation = self.pipeline.score_activation
        if activation is None:
            raise RequestError(f"{self.name} gives vectors and is no cross-encoder: encode(texts) computes them")
        if isinstance(texts, str):
            raise RequestError("texts: expected a list of strings, got one string")
        ids, token_type_ids, offsets = self.tokenizer.encode_pairs(query, texts, self.maxseq, self.default_prompt)
        prepared = self._prepare(ids, offsets, token_type_ids=token_type_ids)
        logits, failures = self.start_encode(prepared, None).result()
        _raise_first(failures)
        scores = logits[:, 0]
        return scores if raw_scores else scores_of(scores, activation)

    def _check_gives_vectors(self) -> None:
        if self.pipeline.score_activation is not None:
            raise RequestError(
                f"{self.name} is a cross-encoder and gives no vectors: rerank(query, texts) scores texts for a query"
            )

    def prepare_ids(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], num_prompt_tokens: int | None
    ) -> PreparedIds:
        self._check_gives_vectors()
        if num_prompt_tokens is None:
            num_prompt_tokens = self.count_prompt_tokens(self.default_prompt)
        return self._prepare(ids, offsets, num_prompt_tokens)

    def _prepare(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        num_prompt_tokens: int = 0,
        token_type_ids: NDArray[np.int32] | None = None,
    ) -> PreparedIds:
        config, max_tokens = self.pipeline.config, self.max_tokens
        check_ids(ids, offsets, config, token_type_ids)
        packed = batches(ids, offsets, config, max_tokens, EM_BATCH_MAX, num_prompt_tokens, token_type_ids)
        return PreparedIds(ids, offsets, token_type_ids, num_prompt_tokens, tuple(packed), max_tokens)

    def start_encode(
        self, prepared: PreparedIds, normalize: bool | None, out: NDArray[np.float32] | None = None
    ) -> Call[Outcome]:
        pooling = self.pooling
        if normalize is not None:
            pooling = Pooling(pooling.modes, normalize)
        whole_dim = self.pipeline.dim(pooling.modes)
        whole = out if whole_dim == self.dim else None
        vectors = np.empty((prepared.num_texts, whole_dim), np.float32) if whole is None else whole

        def forward() -> Outcome:
            try:
                self._forward(vectors, prepared, pooling)
                failures = self._recompute(vectors, prepared, pooling)
            except DriverError as error:
                self._drop_exact(error)
                raise
            if whole_dim == self.dim:
                return vectors, failures
            cut = self._cut(vectors, normalize)
            if out is not None:
                out[:] = cut
            return cut if out is None else out, failures

        return self.backend.start(forward)

    def _cut(self, vectors: NDArray[np.float32], normalize: bool | None) -> NDArray[np.float32]:
        """The elements that the model's authors keep; normalized again only where that was asked for, and not because
        the model does it before."""
        vectors = vectors[:, : self.dim]
        if normalize:
            return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)))
        return vectors

    def encode_outputs(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        normalize: bool | None,
        num_prompt_tokens: int,
        outputs: frozenset[Output],
    ) -> Embeddings:
        self._check_gives_vectors()
        for name in sorted(outputs - {"dense"}):
            if name not in OUTPUTS:
                raise RequestError(f"outputs: {name!r} is not one of {', '.join(OUTPUTS)}")
            if name not in self.pipeline.heads:
                raise RequestError(f"outputs: the model has no {name} head: no {name}_linear.pt in its directory")
        check_ids(ids, offsets, self.pipeline.config)
        pooling = self.pooling
        if normalize is not None:
            pooling = Pooling(pooling.modes, normalize)
        config, num_texts = self.pipeline.config, len(offsets) - 1
        dense = np.empty((num_texts, self.pipeline.dim(pooling.modes)), np.float32)
        sparse: list[dict[int, float]] | None = [] if "sparse" in outputs else None
        colbert: list[NDArray[np.float32]] | None = [] if "colbert" in outputs else None

        def forward() -> None:
            encoder = self._encoder
            if encoder is None or self.backend.faulted:
                raise ClosedError("the weights are unloaded: reload() brings them back")
            for batch in batches(ids, offsets, config, self.max_tokens, EM_BATCH_MAX, num_prompt_tokens):
                num_tokens = len(batch.input_ids)
                weights = np.empty(num_tokens, np.float32) if sparse is not None else None
                of_tokens = np.empty((num_tokens, encoder.colbert_dim), np.float32) if colbert is not None else None
                encoder.forward_tokens(batch, pooling, dense[batch.first : batch.last], weights, of_tokens)
                for text, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist()), batch.first):
                    parts = [part[start:end] for part in (weights, of_tokens) if part is not None]
                    if not all(np.isfinite(part).all() for part in (dense[text], *parts)):
                        raise NonFiniteError(f"texts[{text}]: the model gives a number that is not finite")
                    if sparse is not None and weights is not None:
                        token_ids, left_out = batch.input_ids[start:end], self.tokenizer.special_ids
                        sparse.append(lexical_weights(token_ids, weights[start:end], left_out))
                    if colbert is not None and of_tokens is not None:
                        colbert.append(of_tokens[start + 1 : end].copy())

        self.backend.call(forward)
        return Embeddings(self._cut(dense, normalize) if "dense" in outputs else None, sparse, colbert)

    def _forward(self, out: NDArray[np.float32], prepared: PreparedIds, pooling: Pooling) -> None:
        encoder = self._encoder
        if encoder is None or self.backend.faulted:
            raise ClosedError("the weights are unloaded: reload() brings them back")
        if prepared.max_tokens > self.max_tokens:  # a reload has found less memory since
            prepared = self._prepare(
                prepared.ids, prepared.offsets, prepared.num_prompt_tokens, prepared.token_type_ids
            )
        for batch in prepared.batches:
            encoder.forward(out[batch.first : batch.last], batch, pooling)

    def _recompute(
        self, out: NDArray[np.float32], prepared: PreparedIds, pooling: Pooling
    ) -> dict[int, NonFiniteError]:
        """Computes every vector that is not finite again in f32, each text alone; why not, where that fails."""
        failures: dict[int, NonFiniteError] = {}
        finite = np.isfinite(out)
        if finite.all():
            return failures
        what = "vector" if self.pipeline.score_activation is None else "score"
        problem, precision = f"the model gives a {what} that is not finite", self.dtype.value
        for text in np.flatnonzero(~finite.all(axis=1)).tolist():
            if self.dtype is DType.F32:
                failures[text] = NonFiniteError(problem)
                continue
            try:
                exact = self._exact or self._load_exact()
            except (ModelError, CompileError, OutOfMemory) as error:
                failures[text] = NonFiniteError(f"{problem} in {precision}, and cannot be loaded in f32: {error}")
                failures[text].__cause__ = error
                continue
            row, [start, end] = out[text : text + 1], prepared.offsets[text : text + 2]
            types = None if prepared.token_type_ids is None else prepared.token_type_ids[start:end]
            ids, offsets = prepared.ids[start:end], np.array([0, end - start])
            alone = exact._prepare(ids, offsets, prepared.num_prompt_tokens, types)
            exact.backend.call(partial(exact._forward, row, alone, pooling))
            if not np.isfinite(row).all():
                failures[text] = NonFiniteError(f"{problem}, neither in {precision} nor in f32")
                continue
            self.recomputed += 1
            if self.recomputed == 1:
                remedy = "--dtype bf16 or f32" if self.dtype is DType.F16 else "--dtype f32"
                logger.warning(
                    f"{self.name}: the range of {precision} is too small for this model: a text whose {what} is not "
                    f"finite is computed again in f32, by itself, with a second copy of the weights; {remedy} avoids it"
                )
        return failures

    def _load_exact(self) -> "_Engine":
        """The same model in f32 on the same device, kept until `unload`; its workspace is for the longest text."""
        backend = self._backend_of(DType.F32)
        exact = _Engine(self.name, backend, self._backend_of, self.pipeline, self.tokenizer, rows_budget=0)
        exact.pooling = self.pooling  # forwards are recorded for it
        try:
            exact.reload()
        except BaseException:
            exact.backend.stop()
            raise
        self._exact = exact
        return exact

    def _drop_exact(self, error: DriverError | None = None) -> None:
        """Gives the model in f32 back, after `error` if there was one."""
        exact, self._exact = self._exact, None
        if exact is None:
            return
        if error is not None:
            # A fault loses the context, which is both engines': raised there too, it closes what was in it quietly.
            def fail() -> None:
                raise error

            with suppress(DriverError):
                exact.backend.call(fail)
        exact.unload()
        exact.backend.stop()

    def unload(self) -> None:
        self.backend.call(self._unload)

    def reload(self, progress: Progress | None = None) -> None:
        self.backend.call(lambda: self._load(progress))

    def _unload(self) -> None:
        self._encoder = None
        self._drop_exact()
        self.backend.release()

    def _load(self, progress: Progress | None) -> None:
        if self.loaded:
            return
        self.max_tokens = self._most_tokens
        while True:
            try:
                return self._load_for(self.max_tokens, progress)
            except OutOfMemory as error:
                smaller = max(self.max_tokens // 2, self.pipeline.config.max_tokens)
                if smaller == self.max_tokens:
                    raise
                logger.warning(f"{self.name}: {error}: trying with forwards of {smaller} tokens")
                self.max_tokens = smaller

    def _load_for(self, max_tokens: int, progress: Progress | None) -> None:
        config = self.pipeline.config
        checkpoint = Checkpoint(weights_path(self.pipeline.directory), keep=self.backend.keeps_mapping)
        modules = [step for step in self.pipeline.steps if isinstance(step, DenseModule)]
        if self.pipeline.score_activation is None:
            layers = [plan_dense(m.directory, m.in_features, m.out_features, m.bias) for m in modules]
            plan = plan_weights(config, checkpoint)
        else:
            layers = [plan_classifier(checkpoint, m.name, m.in_features, m.out_features) for m in modules]
            plan = plan_weights(config, checkpoint, {name for m in modules for name in classifier_tensors(m.name)})
        dense = {f"dense.{index}": layer for index, layer in enumerate(layers)}
        heads = {name: plan_head(file, config.hidden_size) for name, file in self.pipeline.heads.items()}
        modes = self.pooling.modes
        total = sum(source.num_bytes for weight in plan for source in weight.sources)
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        try:
            self.backend.acquire()
            head = Head(config.hidden_size, modes, self.pipeline.steps)
            token_heads = [op for planned in heads.values() for op in token_operators(*planned.weight[1].shape)]
            self.backend.prepare([*Operators(config, self.backend.dtype).all(), *head.all(), *token_heads])
            small = load_dense(self.backend, dense | heads)
            weights = load_weights(self.backend, checkpoint, plan, advance) | small
            scales = None
            if self.backend.dtype is DType.SPLIT:
                scales = split_scales(self.backend, config, weights)
                if scales is None:
                    # Rare enough to load it twice; it stays so for every reload.
                    self.backend.release()
                    self.backend.dtype = DType.F32
                    return self._load_for(max_tokens, progress)
            encoder = Encoder(
                self.backend,
                config,
                weights,
                max_tokens,
                EM_BATCH_MAX,
                max(len(modes), len(self.pipeline.pooling.modes)),
                self.pipeline.steps,
                frozenset(heads),
                scales,
            )
            encoder.record(modes)
            self._encoder = encoder
        except BaseException:
            self.backend.release()
            raise
