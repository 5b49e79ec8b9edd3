"""Texts to rows of tokens of one length, padded with zeros, and how many there are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# pyright: reportMissingImports=false

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
sys.path[:0] = [str(HERE), *SETTINGS["python_path"]]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402
from arrays import NO_TEXTS, has_texts, sent  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402


class TritonPythonModel:
    """See the module."""

    def initialize(self, args):
        """Reads the tokenizer."""
        if not has_texts():
            raise RuntimeError(
                f"{NO_TEXTS}\nTry: a Triton after 2.52, or `pip install --target FOLDER 'numpy<2'`"
                f" and FOLDER first in python_path of {HERE / 'settings.json'}"
            )
        self.tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))

    def execute(self, requests):
        """The tokens of each request."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """The tokens of one request, or why there are none."""
        texts = pb.get_input_tensor_by_name(request, "text").as_numpy()[:, 0]
        encoded = [self.tokenizer.encode(text.decode("utf-8", "replace")).ids for text in texts]
        longest = max(map(len, encoded))
        if longest > SETTINGS["seq"]:
            error = f"a text has {longest} tokens; the model takes {SETTINGS['seq']}"
            return pb.InferenceResponse(error=pb.TritonError(error))
        tokens = np.zeros((len(encoded), SETTINGS["seq"]), np.int32)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids)] = ids
        length = np.asarray([[len(ids)] for ids in encoded], np.int32)
        return pb.InferenceResponse(output_tensors=[sent("tokens", tokens), sent("length", length)])
