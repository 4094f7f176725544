"""Makes classes of protobuf messages from tables, at run time.

The published classes of TensorFlow Serving's messages come with a package that imports TensorFlow.
Classes that protoc generates fit no range of protobuf's versions as wide as TensorFlow's: 4 with
2.15, 7 with 2.21. A table fits all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# FieldDescriptorProto.Type
DOUBLE, FLOAT, INT64, UINT64, INT32, BOOL, STRING, BYTES, UINT32 = 1, 2, 3, 4, 5, 8, 9, 12, 13
_MESSAGE = 11
_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label

# By message: each field's name, number, and type, which is the name of a message in places. Marks:
# "*" for repeated fields, "|" for those of the message's oneof, "%" for maps from text to the type.
Tables = Mapping[str, Sequence[tuple[str, int, "int | str", str]]]


def message_classes(package: str, tables: Tables) -> dict[str, Any]:
    """Makes classes, by the names of the messages.

    Args:
        package: of the messages. The classes are in a pool of their own: names clash with nobody's.
        tables: of the messages.

    Raises:
        ImportError: protobuf is not installed.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in tables.items():
        message = file.message_type.add(name=name)
        if any(mark == "|" for *_, mark in fields):
            message.oneof_decl.add(name="choice")
        for field in fields:
            _add_field(message, field, f".{package}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())

    def made(name: str) -> Any:
        descriptor = pool.FindMessageTypeByName(f"{package}.{name}")
        if hasattr(message_factory, "GetMessageClass"):  # protobuf 4.22
            return message_factory.GetMessageClass(descriptor)
        return message_factory.MessageFactory(pool).GetPrototype(descriptor)

    return {name: made(name) for name in tables}


def _add_field(message: Any, field: tuple[str, int, int | str, str], package: str) -> None:
    name, number, kind, mark = field
    if mark == "%":
        kind = _add_entry(message, name, kind, package)
    found = message.field.add(name=name, number=number)
    found.label = _MANY if mark in ("*", "%") else _ONE
    found.type = _MESSAGE if isinstance(kind, str) else kind
    if isinstance(kind, str):
        found.type_name = f"{package}.{kind}"
    if mark == "|":
        found.oneof_index = 0


def _add_entry(message: Any, field: str, kind: int | str, package: str) -> str:
    """Adds the message that a map repeats, and returns its name, as protobuf demands it."""
    name = "".join(word.capitalize() for word in field.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    _add_field(entry, ("key", 1, STRING, ""), package)
    _add_field(entry, ("value", 2, kind, ""), package)
    return f"{message.name}.{name}"
