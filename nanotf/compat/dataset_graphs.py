"""TensorFlow's private names for sending a `tf.data` pipeline to other processes.

| name | versions seen | why |
| --- | --- | --- |
| `Dataset._variant_tensor` | 2.14-2.21 | input of `tf.raw_ops.DatasetToGraphV2` and similar ops |
| `data.ops.dataset_ops._VariantDataset` | 2.14-2.21 | wraps the result of `tf.raw_ops.DatasetFromGraph` and similar ops |
| `data.ops.dataset_ops.UnaryUnchangedStructureDataset`, `DatasetSpec` | 2.14-2.21 | base class of a dataset that is another's variant; its type as an argument of a `tf.function` |
| `Dataset._inputs`, `_functions` | 2.14-2.21 | the variables that a dataset's functions read |
| the resource type `SeedGenerator` in such a graph | 2.14-2.21 | state of a shuffle's random orders |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from nanotf.compat.graphs import RUN_PYTHON, nodes_of

VariantDataset: Any = dataset_ops._VariantDataset
VariantOfAnother: Any = dataset_ops.UnaryUnchangedStructureDataset
DatasetSpec: Any = dataset_ops.DatasetSpec

_HANDLE, _RESULT = "VarHandleOp", "_Retval"  # types of operations
_IGNORE_STATE, _FAIL_ON_STATE = 1, 2  # tf.data.experimental.ExternalStatePolicy


def to_graph(dataset: Any) -> bytes:
    """Serializes a dataset as a graph, including constants.

    Raises:
        tf.errors.OpError: The dataset has state outside the graph: Python functions, tables,
            variables, random numbers.
    """
    return _graph(dataset, _FAIL_ON_STATE)


def definition_of(dataset: Any) -> Any:
    """Returns the `tf.compat.v1.GraphDef` of a dataset, whatever state its operations have.

    Raises:
        tf.errors.OpError: TensorFlow cannot write it.
    """
    return tf.compat.v1.GraphDef.FromString(_graph(dataset, _IGNORE_STATE))


def _graph(dataset: Any, policy: int, strip_devices: bool = True) -> bytes:
    graph: bytes = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=policy,
        strip_device_assignment=strip_devices,
    ).numpy()
    return graph


def copy_of(dataset: Any) -> Any:
    """Returns a never-iterated dataset of the same graph, so that its shuffles start over.

    Works only in this process, which has the Python functions, tables and variables that the graph
    names. `py_function` needs its device.

    Returns:
        A `tf.data.Dataset`, or None if TensorFlow cannot write the graph.
    """
    try:
        state = _graph(dataset, _IGNORE_STATE, strip_devices=False)
        graph = tf.compat.v1.GraphDef.FromString(state)
        for node in nodes_of(graph):
            if "value" not in node.attr:  # reading it would add one
                continue
            for handle in node.attr["value"].tensor.resource_handle_val:
                if "SeedGenerator" in handle.maybe_type_name:
                    # The old name would find the original generator, with its state. If no such
                    # name exists, a shuffle makes a new generator from the seeds in the graph.
                    handle.name += "/copy"
        copy = from_graph(graph.SerializeToString(), dataset.element_spec)
    except tf.errors.OpError:
        return None
    copy._nanotf_original = dataset  # keeps its Python functions alive
    return copy


def copy_without_effects(dataset: Any) -> Any:
    """Returns `copy_of`, or None if to read it would run Python or change a variable."""
    for node in nodes_of(definition_of(dataset)):
        of_variable = "value" in node.attr and any(
            "SeedGenerator" not in handle.maybe_type_name
            for handle in node.attr["value"].tensor.resource_handle_val
        )
        if of_variable or node.op in RUN_PYTHON:
            return None
    return copy_of(dataset)


def from_graph(graph: bytes, element_spec: Any) -> Any:
    """Returns the `tf.data.Dataset` of a graph that `to_graph` made."""
    return dataset_ops._VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


@dataclasses.dataclass(frozen=True)
class DatasetDescription:
    """A dataset for another process."""

    graph: bytes  # equal for a dataset each time
    element_spec: Any  # nested structure of `tf.TypeSpec`
    variables: tuple[Any, ...]  # those that its functions read, in the graph's order

    def make(self) -> Any:
        """Returns the `tf.data.Dataset`."""
        if not self.variables:
            return from_graph(self.graph, self.element_spec)
        graph = tf.compat.v1.GraphDef.FromString(self.graph)
        names = [node.name for node in graph.node if node.op == _HANDLE]
        result = next(node.input[0] for node in graph.node if node.op == _RESULT)
        kept = [node for node in graph.node if node.op != _RESULT]
        graph.ClearField("node")
        graph.node.extend(kept)

        def imported(*resources: Any) -> Any:
            given = {f"{name}:0": resource for name, resource in zip(names, resources, strict=True)}
            outputs = [result if ":" in result else f"{result}:0"]
            return tf.graph_util.import_graph_def(graph, given, outputs, name="")

        specs = [tf.TensorSpec([], tf.resource)] * len(names)
        function = tf.compat.v1.wrap_function(imported, specs)
        (variant,) = function(*(variable.handle for variable in self.variables))
        return dataset_ops._VariantDataset(variant, self.element_spec)


def describe(dataset: Any) -> DatasetDescription | None:
    """Describes a dataset for another process; None if it runs Python or has a state of its own."""
    try:
        graph = definition_of(dataset)
    except tf.errors.OpError:
        return None
    if any(node.op in RUN_PYTHON for node in nodes_of(graph)):
        return None
    variables = tuple(_variables_of(dataset))
    handles = [node for node in graph.node if node.op == _HANDLE]
    # TensorFlow writes the variables' values, too, and names that differ each time.
    values = {n.name: n.input[1] for n in graph.node if n.op == "AssignVariableOp"}
    nodes = {node.name: node for node in graph.node}
    written = {n.input[0]: nodes[n.input[1]] for n in graph.node if n.name in values}
    if len(handles) != len(variables) or not all(
        node.name in written and _has_value(variable, written[node.name])
        for node, variable in zip(handles, variables, strict=True)
    ):
        return None
    dropped = {*values, *values.values()}
    kept = [node for node in graph.node if node.name not in dropped]
    names = {node.name: f"node{place}" for place, node in enumerate(kept)}
    for node in kept:
        node.name = names[node.name]
        if node.op == _HANDLE:
            node.attr["shared_name"].s = b""
        inputs = [each for each in node.input if each.lstrip("^") not in dropped]
        node.ClearField("input")
        node.input.extend(_renamed(each, names) for each in inputs)
    graph_of_kept = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    graph_of_kept.node.extend(kept)
    serialized = graph_of_kept.SerializeToString(deterministic=True)  # else maps have any order
    return DatasetDescription(serialized, dataset.element_spec, variables)


def _has_value(variable: Any, constant: Any) -> bool:
    """Returns True if a constant of a graph is a variable's value."""
    value = tf.make_ndarray(constant.attr["value"].tensor)
    own = variable.numpy()
    # Bytes, since a NaN differs from itself.
    return (own.dtype, own.shape, own.tobytes()) == (value.dtype, value.shape, value.tobytes())


def _renamed(name: str, names: Mapping[str, str]) -> str:
    mark = "^" if name.startswith("^") else ""
    node, *place = name.removeprefix("^").split(":")
    return ":".join([mark + names[node], *place])


def _variables_of(dataset: Any) -> Iterator[Any]:
    """Yields the variables that a dataset's functions read, in the order of its graph."""
    for source in dataset._inputs():
        yield from _variables_of(source)
    for function in dataset._functions():
        graph = function.function.graph
        by_handle = {id(variable.handle): variable for variable in graph.variables}
        for captured in function.function.captured_inputs:
            if id(captured) in by_handle:
                yield by_handle[id(captured)]


def batch_size(dataset: Any) -> int:
    """Returns the rows of a full batch; -1 if the dataset's graph does not tell."""
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor).numpy())
