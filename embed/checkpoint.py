"""Stored tensors by name, from one file or several, safetensors or PyTorch's."""

import os
from pathlib import Path

from embed.errors import WeightsError
from embed.safetensors_file import read_tensors as read_safetensors
from embed.stored import MappedFile, StoredTensor, parse_json_object, quoted
from gkd.ops.contract import Array

_FILE_NAME = "model.safetensors"

_INDEX = ".index.json"
# The first that a directory has is read, and none of the others.
_FILE_NAMES = (_FILE_NAME, _FILE_NAME + _INDEX, "pytorch_model.bin", "pytorch_model.bin" + _INDEX)

_OTHER_FORMS = {
    "adapter_model.safetensors": "an adapter: merge it into its base model",
    "tf_model.h5": "TensorFlow's: save the model as safetensors",
    "flax_model.msgpack": "Flax's: save the model as safetensors",
    "onnx": "an exported graph: save the model as safetensors",
}

_MAX_INDEX_BYTES = 100_000_000


def weights_path(directory: Path) -> Path:
    """The file of a directory that its Checkpoint is opened from; WeightsError where there is none."""
    for name in _FILE_NAMES:
        # Also where it is a link to nothing: another file would not be what was meant.
        if os.path.lexists(directory / name):
            return directory / name
    for name, advice in _OTHER_FORMS.items():
        if os.path.lexists(directory / name):
            raise WeightsError(f"{_FILE_NAME}: not found; {name} is {advice}")
    raise WeightsError(f"{_FILE_NAME}: not found")


class Checkpoint:
    """Tensors by name, each lying whole in a mapped file: its place is known and checked, its values not yet read."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Opens a safetensors file, one that torch.save wrote, or an index that names several of them beside it.

        `keep` says that the values will be computed from where they lie: all are read now, so that no request waits for
        the disk. WeightsError names the file, and what in it is not as it should be.
        """
        self.name = path.name
        self._files: dict[str, MappedFile] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """By the names that they have in the files."""
        if path.name.endswith(_INDEX):
            self._open_shards(path, keep)
        else:
            self.tensors = self._open_file(path, keep)

    def view(self, tensor: StoredTensor) -> Array:
        """The values in their stored type (bf16 as uint16), contiguous and not to be written.

        A copy only where the file has them in another order.
        """
        return self._files[tensor.file].view(tensor)

    def _open_file(self, path: Path, keep: bool) -> dict[str, StoredTensor]:
        file = self._files[path.name] = MappedFile(path, keep=keep)
        if path.suffix == ".safetensors":
            return read_safetensors(file)
        # Not at the top: few models need it, and all would wait for zipfile.
        from embed.torch_file import read_tensors

        return read_tensors(file)

    def _open_shards(self, path: Path, keep: bool) -> None:
        # `metadata.total_size` is not compared: some writers count a storage once that two tensors share, some twice,
        # and a conversion to another type leaves it as it was.
        shard_of = _read_weight_map(path)
        for shard in dict.fromkeys(shard_of.values()):
            if not os.path.exists(path.parent / shard):
                raise WeightsError(f"{shard}: not found, but {self.name} names it")
        for shard in dict.fromkeys(shard_of.values()):
            for name, tensor in self._open_file(path.parent / shard, keep).items():
                if name in self.tensors:
                    raise WeightsError(f"{self.tensors[name].file} and {shard}: tensor {quoted(name)} is in both")
                if shard_of.get(name) != shard:
                    place = quoted(shard_of[name]) if name in shard_of else "in no file"
                    raise WeightsError(f"{shard}: has tensor {quoted(name)}, which {self.name} places {place}")
                self.tensors[name] = tensor
        for name, shard in shard_of.items():
            if name not in self.tensors:
                raise WeightsError(f"{shard}: tensor {quoted(name)} is missing, which {self.name} places there")


def _read_weight_map(path: Path) -> dict[str, str]:
    """Names of files by the names of the tensors in them."""
    file = MappedFile(path, keep=False)
    if file.size > _MAX_INDEX_BYTES:
        raise WeightsError(f"{file.name}: {file.size} bytes, expected at most {_MAX_INDEX_BYTES}")
    weight_map = parse_json_object(file.bytes[:], f"{file.name}: the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{file.name}: no `weight_map` from tensors to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise WeightsError(f"{file.name}: {quoted(name)} is in {type(shard).__name__}, expected the name of a file")
        if "/" in shard or "\\" in shard or shard in ("", ".", "..") or not shard.isprintable():
            raise WeightsError(
                f"{file.name}: {quoted(name)} is in {quoted(shard)}, expected the name of a file beside the index: "
                "no other directory is read"
            )
    return weight_map
