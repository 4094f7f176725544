"""Requests become answers, and one that fails fails no other."""

import gzip
import json
import types

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.serving.computing.answering import Answering
from nanotf.serving.interface import Decoded, Interface, Refusal, Request, Response


class Lists(Interface):
    """Bodies are lists of numbers, one a row."""

    name = "lists"

    def route(self, method, path, headers, body, server):
        raise NotImplementedError

    def refuse(self, refusal):
        return Response(refusal.status, refusal.text.encode())

    def answer(self, request, model):
        return Response(200, b"mine") if request.verb == "own" else None

    def decode(self, request, model):
        try:
            x = np.asarray(json.loads(request.body), np.float32)
        except ValueError as error:
            raise Refusal(400, f"no JSON: {error}") from None
        if x.ndim != 1:
            raise InvalidArgumentError("x must be a list. Received: something else.")
        return Decoded("s", {"x": x}, len(x))

    def encode(self, decoded, outputs, model):
        if outputs["y"].min() < 0:
            raise Refusal(500, "negative")
        return Response(200, json.dumps(outputs["y"].tolist()).encode())


class Fails(Exception):
    pass


def doubled(inputs, signature):
    x = inputs["x"]
    if (x == 13).any():
        raise Fails("13 brings bad luck")
    return {"y": x * 2}


def answers(bodies, run=doubled, apart=True, verbs=None, headers=None, most=8):
    calls = []

    def counted(inputs, signature):
        calls.append(len(inputs["x"]))
        return run(inputs, signature)

    model = types.SimpleNamespace(run=counted, has_rows_apart=lambda signature: apart)
    answering = Answering({"lists": Lists()}, most, 1000, lambda error: (418, str(error)))
    requests = [
        Request("lists", (verbs or {}).get(n, "predict"), body, (headers or {}).get(n, {}))
        for n, body in enumerate(bodies)
    ]
    found = answering.answer(model, requests)
    return [(a.status, a.body) for a, _ in found], [rows for _, rows in found], calls


def test_several_requests_are_computed_at_once():
    found, rows, calls = answers([b"[1, 2]", b"[3]", b"[4, 5, 6]"])
    assert found == [(200, b"[2.0, 4.0]"), (200, b"[6.0]"), (200, b"[8.0, 10.0, 12.0]")]
    assert (rows, calls) == ([2, 1, 3], [6])


def test_one_that_cannot_be_read_fails_no_other():
    found, _, calls = answers([b"[1]", b"nonsense", b"[[1]]", b"[2]"])
    assert [status for status, _ in found] == [200, 400, 400, 200]
    assert b"must be a list" in found[2][1]
    assert calls == [2]


def test_one_that_the_model_refuses_fails_no_other():
    found, _, calls = answers([b"[1]", b"[13]", b"[2]"])
    assert found == [(200, b"[2.0]"), (418, b"13 brings bad luck"), (200, b"[4.0]")]
    assert calls == [3, 1, 1, 1]


def test_a_request_that_fails_alone_is_not_tried_again():
    assert answers([b"[13]"])[2] == [1]


def test_outputs_without_rows_are_computed_for_each_request():
    found, _, calls = answers([b"[1, 2]", b"[3]"], lambda i, s: {"y": i["x"].sum(keepdims=True)})
    assert found == [(200, b"[3.0]"), (200, b"[3.0]")]
    assert calls == [3, 2, 1]


def test_a_large_request_without_rows_in_its_outputs_is_computed_whole():
    found, _, calls = answers([b"[1, 2, 3]"], lambda i, s: {"y": i["x"].sum(keepdims=True)}, most=2)
    assert found == [(200, b"[6.0]")]
    assert calls[-1] == 3


def test_rows_that_depend_on_each_other_are_never_mixed_nor_split():
    found, _, calls = answers(
        [b"[1, 2, 3]", b"[5]"], lambda i, s: {"y": i["x"] - i["x"].min()}, apart=False, most=2
    )
    assert found == [(200, b"[0.0, 1.0, 2.0]"), (200, b"[0.0]")]
    assert calls == [3, 1]


def test_an_answer_that_cannot_be_made():
    found, _, _ = answers([b"[-1]", b"[1]"])
    assert found == [(500, b"negative"), (200, b"[2.0]")]


def test_an_interface_may_answer_by_itself():
    found, rows, calls = answers([b"[1]", b""], verbs={1: "own"})
    assert found == [(200, b"[2.0]"), (200, b"mine")]
    assert (rows, calls) == ([1, 1], [1])


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(b"[1]", mtime=0), "gzip", 200),
        (b"[1]", "identity", 200),
        (b"[1]", "gzip", 400),
        (gzip.compress(b"[1]", mtime=0)[:-3], "gzip", 400),
        (b"[1]", "br", 415),
        (gzip.compress(b"[" + b"1," * 10**6 + b"1]", mtime=0), "GZIP", 413),
    ],
)
def test_compressed_bodies(body, encoding, status):
    found, _, _ = answers([body, b"[2]"], headers={0: {"content-encoding": encoding}})
    assert found[0][0] == status
    assert found[1] == (200, b"[4.0]")
