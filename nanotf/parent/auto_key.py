"""What of a recipe stays the same when a model is built again, in this process or another.

Keras numbers the names that it makes up: the second model's layers are `dense_2` and `dense_3`
where the first one's are `dense` and `dense_1`. A recipe holds them, and refers to layers by them.

1. The pickle is read as a sequence of tokens. A string that is taken from the memo counts as if it
   stood there, since whether two equal strings are one object is chance; other objects of the memo
   are numbered anew.
2. A name is made up if it is the name of a class in the recipe, with or without a number. What a
   user has called "stage_4" stays, unless there is a class Stage.
3. The names that are made up are numbered anew, as if nothing had been built before: by first
   appearance, and everywhere in the recipe. Different names stay different.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pickletools
import re
from collections.abc import Iterable, Iterator
from typing import Any

# What Keras calls inputs and models of Keras 2, whose classes are InputLayer and Functional.
_OTHER_STEMS = ("input", "model")
# `forward_` is of layers inside a Bidirectional, `private_` of classes whose names begin with an
# underscore, `_input` of the inputs that Keras 2 makes for a Sequential.
_MADE_UP = re.compile(r"((?:forward_|backward_|private_)?)(.+?)(?:_[0-9]+)?((?:_input)?)")
_RANDOM = re.compile("[0-9a-f]{32}")  # cloudpickle gives each class that travels by value one


def digest_of(recipe: bytes, others: Iterable[str] = ()) -> str:
    """A hash that is the same for all recipes of a model that is built again and again.

    Args:
        recipe: bytes, one pickle or several of one pickler, as `shipping.captured.dump` returns.
        others: iterable of str, further texts that are hashed; names stand in them in quotes.
    """
    tokens = list(_tokens(recipe))
    new = _new_names(tokens)
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(_encoded(new.get(token, token) if isinstance(token, str) else token))
    for text in others:
        digest.update(_encoded(re.sub("'([^']*)'", lambda m: repr(new.get(m[1], m[1])), text)))
    return digest.hexdigest()


def _encoded(token: Any) -> bytes:
    """Bytes that no other token has, nor the begin of one followed by others."""
    body = token if isinstance(token, bytes) else repr(token).encode(errors="surrogatepass")
    return b"%s %d %s" % (type(token).__name__.encode(), len(body), body)


def _tokens(recipe: bytes) -> Iterator[Any]:
    """Strings as they are, bytes as they are, and all other opcodes with their arguments."""
    memo: list[str | int] = []
    objects = itertools.count()
    last: Any = None
    for opcode, argument in _operations(recipe):
        if opcode.name in ("PROTO", "FRAME"):
            continue
        if opcode.name == "MEMOIZE":
            memo.append(last if isinstance(last, str) else next(objects))
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            found = memo[int(str(argument))]
            last = found if isinstance(found, str) else (opcode.name[-6:], found)
        elif isinstance(argument, str) and "UNICODE" in opcode.name:
            last = _RANDOM.sub("", argument)
        elif isinstance(argument, (bytes, bytearray)):
            last = bytes(argument)
        else:
            last = (opcode.name, argument)
        yield last


def _operations(recipe: bytes) -> Iterator[tuple[Any, Any]]:
    """The opcodes and arguments of pickles that follow each other and share what they refer to."""
    stream = io.BytesIO(recipe)
    while stream.tell() < len(recipe):
        yield from ((opcode, argument) for opcode, argument, _ in pickletools.genops(stream))


def _new_names(tokens: list[Any]) -> dict[str, str]:
    """The names that are made up, with those that they would have if they were the first."""
    strings = {token for token in tokens if isinstance(token, str)}
    stems = {_bare(s) for s in strings if s != s.lower()}.union(_OTHER_STEMS)
    # The items of a dict follow each other, key and value.
    pairs = itertools.pairwise(tokens)
    names = dict.fromkeys(n for key, n in pairs if key == "name" and isinstance(n, str))
    made_up = {}
    for name in names:
        match = _MADE_UP.fullmatch(name)
        # Operations of TensorFlow in a graph of Keras 2 have names such as tf.math.multiply_3.
        if match and (
            stems & {_bare(match[2]), _bare(match[1] + match[2])} or match[2].startswith("tf.")
        ):
            made_up[name] = match
    taken = names.keys() - made_up.keys()
    new: dict[str, str] = {}
    for name, match in made_up.items():
        before, stem, after = match.groups()
        free = (f"{before}{stem}{number}{after}" for number in _numbers())
        new[name] = next(candidate for candidate in free if candidate not in taken)
        taken.add(new[name])
    return new


def _numbers() -> Iterator[str]:
    yield ""
    yield from (f"_{number}" for number in itertools.count(1))


def _bare(name: str) -> str:
    """AdamW, adam_w and adamw alike."""
    return name.replace("_", "").lower()
