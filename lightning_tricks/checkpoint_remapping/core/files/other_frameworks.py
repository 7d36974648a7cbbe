"""Files of weights of other frameworks: named as what they are, with a way to weights that can be read."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError

TAKE_SAFETENSORS = "Take the .safetensors or .pt of the same model."
TENSORFLOW_REMEDY = f"Read it with tf.train.load_checkpoint and make a dict of tensors of it, or: {TAKE_SAFETENSORS}"
_ONNX = (
    "an ONNX model",
    "Make a dict of tensors of it: {i.name: torch.tensor(onnx.numpy_helper.to_array(i)) for i in graph.initializer}.",
)
_FLAX = (
    "a msgpack file, as Flax writes them",
    "Read it with flax.serialization.msgpack_restore and make a dict of tensors of it, or give the PyTorch weights.",
)
_SAVED_MODEL = "a SavedModel of TensorFlow", f"Load it with tf.saved_model.load. {TAKE_SAFETENSORS}"
_CHECKPOINT = "a checkpoint of TensorFlow", TENSORFLOW_REMEDY

# Beginnings that are too short to be looked for before files of torch and safetensors are recognized
_BEGINNINGS = (
    (re.compile(rb"\x08\x01\x12"), _SAVED_MODEL),  # schema version 1, then a graph
    # a protobuf message whose first field is the version, and whose next is one of those of an ONNX model
    (re.compile(rb"\x08[\x02-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]"), _ONNX),
    # a map with few items, or with up to 65,535, whose first key is text
    (re.compile(rb"(?:[\x81-\x8f]|\xde..)(?:[\xa1-\xbf]|\xd9.)[\w./]", re.DOTALL), _FLAX),
)
_TABLE_END = bytes.fromhex("57fb808b247547db")  # of the table that lists the tensors of a TensorFlow checkpoint
_SUFFIXES = (
    (r"\.onnx", _ONNX),
    (r"\.msgpack", _FLAX),
    (r"\.pb", ("a graph of TensorFlow", TENSORFLOW_REMEDY)),
    (r"\.tflite", ("a TensorFlow Lite model", TAKE_SAFETENSORS)),
    (r"\.data-\d{5}-of-\d{5}|\.ckpt.*\.(index|meta)", _CHECKPOINT),
    (r"\.(h5|hdf5|keras)", ("a file of Keras", "Convert it to .safetensors where Keras is installed.")),
    (r"\.(gguf|ggml)", ("a file of quantized weights for llama.cpp", TAKE_SAFETENSORS)),
)


def refuse_other_frameworks(path: Path, head: bytes, end: bytes) -> None:
    """Refuse files of other frameworks, by their first and last bytes.

    Raises:
        NotACheckpointError: If it is one; the message continues "it is".
    """
    for pattern, (name, remedy) in _BEGINNINGS:
        if pattern.match(head):
            raise NotACheckpointError(f"{name}. {remedy}")
    if end == _TABLE_END:
        raise NotACheckpointError(f"{_CHECKPOINT[0]}. {_CHECKPOINT[1]}")


def describe_by_name(name: str) -> str:
    """Return what a file is by the end of its name, with the remedy; empty if the name says nothing."""
    for suffix, (what, remedy) in _SUFFIXES:
        if re.search(f"(?:{suffix})$", name.lower()):
            return f"{what}, by its name. {remedy}"
    return ""
