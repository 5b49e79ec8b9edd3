"""A language model: shardlib's engine serves all requests that are there together, and answers each
token by token.

Triton calls `execute` from one thread; another one steps the engine.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from pathlib import Path

# pyright: reportMissingImports=false

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
sys.path[:0] = [str(HERE), *SETTINGS["python_path"]]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402
from arrays import NO_TEXTS, has_texts, received, sent  # noqa: E402

from shardlib import serve as serving  # noqa: E402
from shardlib.serve.served import Pieces  # noqa: E402

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """See the module."""

    def initialize(self, args):
        """Reads the folder beside this file, compiles, and starts to step."""
        self.has_texts = has_texts()
        if not self.has_texts:  # a text would end this process and all requests: `read` refuses it
            pb.deserialize_bytes_tensor = lambda data: np.asarray([None], object)
        served = serving.read_folder(HERE / "model")
        self.text = served.text
        self.engine = served.engine(serving.Capacity(**SETTINGS["capacity"]))
        self.engine.warm_up()
        self.asked = queue.Queue()
        self.open = {}  # request of the engine -> (sender, pieces of its text)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def execute(self, requests):
        """Takes requests; their answers come from the other thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.asked.put((read(request, self.has_texts), sender))
            except ValueError as error:
                fail(sender, str(error))

    def finalize(self):
        """Ends the thread."""
        self.asked.put(None)
        self.thread.join(30)

    def serve(self):
        """Steps the engine for as long as there are requests, and waits for more."""
        while True:
            try:
                new = self.asked.get(block=not self.open)
                if new is None:
                    return
                self.begin(*new)
                continue
            except queue.Empty:
                pass
            for request, (sender, _) in self.open.items():
                request.cancelled = request.cancelled or sender.is_cancelled()
            try:
                events = self.engine.step()
            except Exception as error:
                for sender, _ in self.open.values():
                    fail(sender, f"the engine has failed: {error}")
                self.open.clear()
                continue
            for event in events:
                self.tell(event)

    def begin(self, options, sender):
        """Adds one request."""
        try:
            request = self.engine.add(
                serving.GenerationRequest(
                    prompt=tuple(
                        self.text.encode(options["text"])
                        if options["tokens"] is None
                        else options["tokens"]
                    ),
                    most=options["most"],
                    sampling=serving.Sampling(
                        temperature=options["temperature"], seed=options["seed"]
                    ),
                    stop=self.text.ends,
                )
            )
        except (TypeError, ValueError) as error:
            fail(sender, str(error))
            return
        self.open[request] = sender, Pieces(self.text) if options["texts"] else None

    def tell(self, event):
        """Answers what an event says."""
        if event.request not in self.open:
            return
        sender, pieces = self.open[event.request]
        ended = event.request.ended is not None
        if event.token is not None:
            text = None
            if pieces is not None:
                text = pieces.add(event.token) + (pieces.end() if ended else "")
            sender.send(answer(event.token, text), flags=FINAL if ended else 0)
        elif ended:
            sender.send(flags=FINAL)
        if ended:
            del self.open[event.request]


def read(request, texts):
    """Returns the request of a body, of a backend that has texts or not."""

    def number(name, default):
        tensor = pb.get_input_tensor_by_name(request, name)
        return default if tensor is None else received(tensor).reshape(-1)[0].item()

    text = pb.get_input_tensor_by_name(request, "text")
    tokens = pb.get_input_tensor_by_name(request, "tokens")
    if (text is None) == (tokens is None):
        raise ValueError("a request has a text, or tokens")
    if text is not None and not texts:
        raise ValueError(f"{NO_TEXTS}\nTry: tokens, or a Triton after 2.52")
    prompt = "" if text is None else text.as_numpy().reshape(-1)[0].decode("utf-8", "replace")
    return {
        "text": prompt,
        "tokens": None if tokens is None else received(tokens).reshape(-1).tolist(),
        "texts": texts and "text" in request.requested_output_names(),
        "most": number("most", 16),
        "temperature": number("temperature", 0.0),
        "seed": number("seed", 0),
    }


def answer(token, text):
    """One token, and where it is asked for the text that is new with it."""
    outputs = [sent("token", np.asarray([token], np.int32))]
    if text is not None:
        outputs.append(pb.Tensor("text", np.asarray([text.encode()], object)))
    return pb.InferenceResponse(output_tensors=outputs)


def fail(sender, why):
    """Ends a request with an error."""
    sender.send(pb.InferenceResponse(error=pb.TritonError(why)), flags=FINAL)
