"""Copies of the tiny checkpoints in testdata that a test may damage."""

import json
import pathlib

import safetensors.numpy

from strata_jax import checkpoints

TESTDATA = pathlib.Path(__file__).parent / "testdata"


class Checkpoint:
    """A checkpoint's configuration and tensors, written when it is loaded."""

    def __init__(self, folder: pathlib.Path, name: str):
        self.folder = folder
        source = TESTDATA / name
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = safetensors.numpy.load_file(source / "model.safetensors")

    def load(self, **kwargs):
        (self.folder / "config.json").write_text(json.dumps(self.config))
        path = self.folder / "model.safetensors"
        safetensors.numpy.save_file(self.tensors, path)
        return checkpoints.load_safetensors(self.folder, **kwargs)
