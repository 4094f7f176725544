"""Answers the requests for one model. Its subclasses do so with a user's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.sagemaker.serving import media_types, model_bodies
from nanotf.serving.interface import Decoded, Request, Response, ServedModel

SCRIPT_ERROR = "Handlers are not implemented correctly in user script."  # the containers' text


@dataclasses.dataclass(frozen=True)
class BodyRules:
    """Settings for the bodies of requests and answers."""

    accept: str  # the type of an answer for a client that takes any
    most: int  # bytes of a body, and of the arrays in a compressed one


class ModelCode:
    """A model without code: nanotf's rules for bodies are all that there is.

    Args:
        model: the only one whose requests it answers.
    """

    computes = False  # True for code that does what the model is to do, see `Interface.begin`

    def __init__(self, model: ServedModel, rules: BodyRules) -> None:
        self.model, self.rules = model, rules

    def answer(self, request: Request) -> Response | None:
        """See `Interface.answer`."""
        return None

    def decode(self, request: Request) -> Decoded:
        """See `Interface.decode`."""
        accept = media_types.answer_type(request.headers.get("accept"), self.rules.accept)
        return model_bodies.decode(request, self.model, accept, self.rules.most)

    def encode(self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]]) -> Response:
        """See `Interface.encode`."""
        return model_bodies.encode(decoded, outputs)
