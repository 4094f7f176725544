"""Servers that users write by hand, for `benchmarks.serving`.

`python -m benchmarks.web_servers predict|function MODEL.keras READY` serves one model on a free
port, and writes the port to the file READY as `nanotf serve --ready-file` does.

- `predict`: FastAPI, and `model.predict` in a function that FastAPI runs in a thread, as its
  documentation has it for code that blocks.
- `function`: Starlette with orjson, and a `tf.function` that is traced once for any number of rows,
  called in a thread. Nothing faster is at hand without batches.

Both run in one process of uvicorn with httptools and uvloop, on all cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

BACKLOG = 2048


def by_predict(model: Any) -> Any:
    """Returns an application of FastAPI that calls `model.predict`."""
    import fastapi
    import numpy as np

    application = fastapi.FastAPI()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        rows = np.asarray(body["instances"], dtype="float32")
        return {"predictions": model.predict(rows, verbose=0).tolist()}

    application.post("/predict")(answer)
    return application


def by_function(model: Any) -> Any:
    """Returns an application of Starlette that calls a `tf.function`."""
    import numpy as np
    import orjson
    import tensorflow as tf
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    shape = [None, *model.input_shape[1:]]
    function = tf.function(
        lambda rows: model(rows, training=False),
        input_signature=[tf.TensorSpec(shape, tf.float32)],
    ).get_concrete_function()

    def computed(rows: Any) -> Any:
        return function(tf.constant(rows)).numpy()

    async def answer(request: Any) -> Any:
        rows = np.asarray(orjson.loads(await request.body())["instances"], dtype="float32")
        found = await asyncio.to_thread(computed, rows)
        text = orjson.dumps({"predictions": found}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(text, media_type="application/json")

    return Starlette(routes=[Route("/predict", answer, methods=["POST"])])


APPLICATIONS: dict[str, Callable[[Any], Any]] = {"predict": by_predict, "function": by_function}


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM."""
    import tensorflow as tf
    import uvicorn

    name, path, ready = arguments
    application = APPLICATIONS[name](tf.keras.models.load_model(path, compile=False))
    config = uvicorn.Config(
        application, http="httptools", loop="uvloop", access_log=False, log_level="warning"
    )
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        part = pathlib.Path(f"{ready}.part")
        part.write_text(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}))
        part.rename(ready)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
