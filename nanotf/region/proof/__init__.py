"""Proves from its graph that a layer's rows are apart, so that workers may divide its call.

`verdicts` asks `traces` for the graph of a call and its gradient; `graph_reader` gives each tensor
in it a state by the `rules` of operations, which `rule_steps` applies; `states` defines the states.
`row_numbers` and `row_constants` follow the number of rows.
"""
