"""Tables that the benchmark prints. Pure functions of a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import goals, ratios
from benchmarks.ratios import Maybe

TITLES = {
    "plain": "plain",
    "plain_16": "plain, 16 at once",
    "ideal": "ideal",
    "one": "nanotf, one process",
    "shm": "nanotf shm",
    "auto": "nanotf auto",
    "grpc": "nanotf grpc",
    "stock": "stock gRPC",
    "ranks": "nanotf ranks",
    "plain_bf16": "plain bf16",
    "shm_bf16": "nanotf bf16",
    "peer": "BigDL-Nano",
}

BENCH_HOSTS = 2  # of the comparison of two levels with one
GAIN = 1.05  # below is noise
QUIET_SHARE = 0.03  # of all cores; other programs may use this much without disturbing


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a text table, the first column left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *padded]).rstrip()

    return "\n".join([line(lines[0]), "  ".join("-" * w for w in widths), *map(line, lines[1:])])


def number(value: Maybe, digits: int = 2) -> str:
    """Formats a number for a cell; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def render(result: Mapping[str, Any]) -> str:
    """Returns the whole report."""
    parts = [_heading(result)]
    models = result.get("models", {})
    if models:
        names = _contestants(models)
        parts += [
            "Samples per second (median of rounds)\n" + _rates(models, names),
            "Ratios (median of ratios within a round, least and most)\n" + _ratios(models),
            "Step alone, ms per global batch\n"
            + _times(models, [n for n in names if n != "peer"], "step", 1e3),
            "Processor time of a step, ms per process that computes it\n"
            + _times(models, [n for n in names if n != "peer"], "processor", 1e3),
            "Epoch boundary, ms\n"
            + _times(models, _with(names, "plain plain_16 one shm auto grpc"), "boundary", 1e3),
            "First batch on a warm start: call to end of the first step, s\n"
            + _times(models, _with(names, "plain ideal shm grpc"), "first_batch", 1.0),
            "First batch on a cold start: import, build, call to end of the first step, s\n"
            + _cold(models, [n for n in names if n != "peer"]),
            "Break-even: seconds of plain Keras after which nanotf is ahead, its start included\n"
            + _break_even(models, _with(names, "one shm grpc")),
            "Peak memory of all processes, MB\n" + _peaks(models, names),
        ]
        if _with(names, "plain_bf16 shm_bf16"):
            parts.append(bfloat16(result))
    parts += _separate(result)
    parts.append("Goals\n" + _goals(result))
    problems = result.get("problems") or []
    if problems:
        parts.append("Did not work\n" + "\n".join(problems))
    return "\n\n".join(parts)


def _separate(result: Mapping[str, Any]) -> list[str]:
    """Returns the tables of the measurements beside the models."""
    parts = []
    if result.get("start_up"):
        parts.append("Start-up, s: call to end of the first step\n" + _start_up(result["start_up"]))
    if result.get("collectives"):
        parts.append("All-reduce through shared memory\n" + _collectives(result["collectives"]))
    if result.get("hosts"):
        ranks = result["options"]["num_processes"]
        parts.append(
            f"All-reduce of {BENCH_HOSTS} hosts with {ranks} ranks each, on this machine: shared "
            "memory and TCP (two levels) against TCP alone\n" + levels(result["hosts"])
        )
    if result.get("records"):
        parts.append("Pipe mode, one core\n" + records(result["records"]))
    if result.get("items"):
        parts.append("Small models, all of a call\n" + items(result["items"]))
    if result.get("readers"):
        parts.append(
            "A PyDataset that Python decodes, a call of fit\n" + reading(result["readers"])
        )
    if result.get("partitions"):
        parts.append("A model in parts, 6 dense layers\n" + partitions(result["partitions"]))
    if result.get("serving"):
        parts.append("Servers, one row a request\n" + serving(result["serving"]))
    if result.get("memory"):
        found = result["memory"]
        parts.append(
            f"Training on an array of {found['array_bytes'] / 1e9:.2f} GB: "
            f"{found['extra_bytes'] / 1e9:.2f} GB beyond the user's own copy, "
            f"{found['seconds']:.1f} s"
        )
    return parts


def _heading(result: Mapping[str, Any]) -> str:
    machine, options = result.get("machine", {}), result.get("options", {})
    optimizer = options.get("optimizer") or "each model's own optimizer"
    return (
        f"nanotf {machine.get('nanotf', '?')}, TensorFlow {machine.get('tensorflow', '?')}, "
        f"Keras {machine.get('keras') or '?'}; {machine.get('cpu', '?')}, "
        f"{machine.get('cores', '?')} cores; num_processes={options.get('num_processes', '?')}, "
        f"{optimizer}, rounds={options.get('rounds', '?')}\n{_quiet(result)}"
    )


def _quiet(result: Mapping[str, Any]) -> str:
    """Reports the load of other programs, and warns if it makes the figures unreliable."""
    shares = [
        share
        for model in result.get("models", {}).values()
        for contestant in model["contestants"].values()
        for share in contestant.get("others", ())
    ]
    if not shares:
        return f"Load average at the start: {result.get('machine', {}).get('load', '?')}"
    median, most = ratios.median(shares) or 0.0, max(shares)
    text = f"Other programs used {median:.0%} of all cores during the blocks, at most {most:.0%}"
    if median > QUIET_SHARE or most > 4 * QUIET_SHARE:
        text += ". THE MACHINE WAS NOT QUIET: do not trust these figures"
    return text


def _contestants(models: Mapping[str, Any]) -> list[str]:
    found = {name for model in models.values() for name in model["contestants"]}
    return [name for name in TITLES if name in found]


def _with(names: Sequence[str], wanted: str) -> list[str]:
    return [name for name in names if name in wanted.split()]


def rate(model: Mapping[str, Any], name: str, kind: str) -> Maybe:
    """Returns the median samples per second of a contestant, by steps alone or by whole epochs."""
    seconds = ratios.median(goals.seconds_per_step(model["contestants"].get(name), kind))
    return model["batch_size"] / seconds if seconds else None


def _rates(models: Mapping[str, Any], names: Sequence[str]) -> str:
    columns = [(name, "steps") for name in names if name != "peer"]
    columns += [(name, "epochs") for name in _with(names, "plain shm auto peer")]
    header = ["model", *(f"{TITLES[name]} {kind}" for name, kind in columns)]
    rows = [
        [model["title"], *(number(rate(model, name, kind), 0) for name, kind in columns)]
        for model in models.values()
    ]
    return table(header, rows)


def _ratios(models: Mapping[str, Any]) -> str:
    keys = [k for k in goals.RATIOS if any(goals.ratio_by_round(m, k) for m in models.values())]

    def cell(model: Mapping[str, Any], key: str) -> str:
        found = goals.spread(goals.ratio_by_round(model, key))
        return "-" if found is None else "{:.2f} ({:.2f}-{:.2f})".format(*found)

    rows = [[model["title"], *(cell(model, key) for key in keys)] for model in models.values()]
    means = [
        ratios.geometric_mean(goals.ratio(model, key) for model in models.values()) for key in keys
    ]
    rows.append(["geometric mean", *(number(mean) for mean in means)])
    return table(["model", *(goals.RATIOS[key].title for key in keys)], rows)


def bfloat16(result: Mapping[str, Any]) -> str:
    """Reports the gain of mixed_bfloat16, and the processor's bfloat16 instructions."""
    lines = ["mixed_bfloat16 against float32, steps alone"]
    for key, who in (("plain_bf16", "Plain Keras"), ("shm_bf16", "nanotf")):
        found = {m["title"]: goals.ratio(m, key) for m in result["models"].values()}
        known = {title: value for title, value in found.items() if value is not None}
        mean = ratios.geometric_mean(known.values())
        if mean is None:
            lines.append(f"{who}: not measured.")
            continue
        word = "a gain" if mean >= GAIN else "no gain"
        of_models = sorted(known, key=lambda title: known[title])
        ends = dict.fromkeys((of_models[0], of_models[-1]))  # one, of one model
        spread = ", ".join(f"{title} {known[title]:.2f}" for title in ends)
        lines.append(f"{who}: {word}, {mean:.2f} in the geometric mean; {spread}.")
    has = result.get("machine", {}).get("bfloat16")
    if has is not None:
        what = f"computes it by {has}" if has else "has no instructions for it"
        lines.append(f"This processor {what}.")
    return "\n".join(lines)


def _times(models: Mapping[str, Any], names: Sequence[str], what: str, factor: float) -> str:
    def cell(model: Mapping[str, Any], name: str) -> str:
        value = goals.of_blocks(model, name, what)
        return number(None if value is None else value * factor)

    rows = [[m["title"], *(cell(m, name) for name in names)] for m in models.values()]
    return table(["model", *(TITLES[name] for name in names)], rows)


def _cold(models: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        [m["title"], *(number(_cold_start(m, name), 1) for name in names)] for m in models.values()
    ]
    return table(["model", *(TITLES[name] for name in names)], rows)


def _cold_start(model: Mapping[str, Any], name: str) -> Maybe:
    found = model["contestants"].get(name)
    if found is None or found["cold"]["first_batch"] is None:
        return None
    ready = found["ready"]
    return float(ready["import_s"] + ready["build_s"] + found["cold"]["first_batch"])


def _break_even(models: Mapping[str, Any], names: Sequence[str]) -> str:
    def cell(model: Mapping[str, Any], name: str) -> str:
        ours, plain = _cold_start(model, name), _cold_start(model, "plain")
        pairs = zip(
            goals.seconds_per_step(model["contestants"].get("plain"), "epochs"),
            goals.seconds_per_step(model["contestants"].get(name), "epochs"),
            strict=False,
        )
        # The part of plain Keras's time that a round's epochs save.
        saved = ratios.median(1 - fast / slow for slow, fast in pairs if slow and fast)
        if None in (ours, plain, saved):
            return "-"
        assert ours is not None and plain is not None and saved is not None
        return number(max(0.0, ours - plain) / saved, 0) if saved > 0 else "never"

    rows = [[m["title"], *(cell(m, name) for name in names)] for m in models.values()]
    return table(["model", *(TITLES[name] for name in names)], rows)


def _peaks(models: Mapping[str, Any], names: Sequence[str]) -> str:
    def cell(model: Mapping[str, Any], name: str) -> str:
        peak = (model["contestants"].get(name) or {}).get("peak_bytes")
        return number(None if peak is None else peak / 1e6, 0)

    rows = [[m["title"], *(cell(m, name) for name in names)] for m in models.values()]
    return table(["model", *(TITLES[name] for name in names)], rows)


def _start_up(start_up: Mapping[str, Mapping[str, float]]) -> str:
    columns = ("import", "cold", "warm", "new_model")
    header = ["", "import TensorFlow", "cold", "warm", "warm, new model"]
    rows = [[TITLES[n], *(number(s[column]) for column in columns)] for n, s in start_up.items()]
    return table(header, rows)


def _collectives(rows: Sequence[Mapping[str, float]]) -> str:
    return table(
        ["bytes", "all-reduce us", "GB/s", "memcpy us", "ratio"],
        [
            [
                f"{row['bytes']:,.0f}",
                number(row["seconds"] * 1e6, 1),
                number(row["bytes"] / row["seconds"] / 1e9),
                number(row["memcpy_seconds"] * 1e6, 1),
                number(row["seconds"] / row["memcpy_seconds"] if row["memcpy_seconds"] else None),
            ]
            for row in rows
        ],
    )


def levels(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of all-reduces between hosts: two levels against one."""

    def ratio(row: Mapping[str, Any]) -> str:
        found = goals.spread(row["ratios"])
        return "-" if found is None else "{:.2f} ({:.2f}-{:.2f})".format(*found)

    header = ["bytes", "two levels, ms", "one level, ms", "one / two"]
    return table(
        header,
        [
            [f"{r['bytes']:,}", number(r["two"] * 1e3), number(r["one"] * 1e3), ratio(r)]
            for r in rows
        ],
    )


def reading(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of ways to read a dataset that Python decodes."""
    header = ["read by", "batches", "first call, s", "later, s", "Keras's processes / this"]
    return table(
        header,
        [
            [
                r["reader"],
                str(r["batches"]),
                number(r["cold"]),
                number(r["seconds"]),
                "{:.2f} ({:.2f}-{:.2f})".format(*(goals.spread(r["ratios"]) or (0.0, 0.0, 0.0))),
            ]
            for r in rows
        ],
    )


def partitions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of a model in one process and in partitions; memory of each rank."""
    header = ["partitions", "microbatches", "pipeline", "step, ms", "fastest, ms"]
    header += [f"{name}, MiB" for name in ("weights", "slots and others", "peak")]
    return table(
        header,
        [
            [
                *(str(r["partitions"]), str(r["microbatches"]), r["pipeline"] or "-"),
                *(number(1e3 * r[name], 0) for name in ("seconds", "fastest")),
                *(
                    " + ".join(number(each / 2**20, 0) for each in r[name])
                    for name in ("weights", "others", "peaks")
                ),
            ]
            for r in rows
        ],
    )


def partitions_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of memory of plain scripts; the first row is Keras alone."""
    kinds = ("private", "largest", "parent", "shared")
    header = ["partitions", "microbatches", *(f"{kind}, MiB" for kind in kinds)]
    header += ["private / Keras", "largest / Keras"]
    return table(
        header,
        [
            [
                *(str(r["partitions"] or "Keras alone"), str(r["microbatches"])),
                *(number(r[kind] / 2**20, 0) for kind in kinds),
                *(number(r[kind] / rows[0]["private"], 2) for kind in ("private", "largest")),
            ]
            for r in rows
        ],
    )


def records(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of readers of Pipe mode."""
    header = ["format", "reader", "record, bytes", "MB/s", "records/s", "MB per CPU s"]
    return table(
        header,
        [
            [
                r["format"],
                r["reader"],
                f"{r['bytes']:,}",
                *(number(r["megabytes"], 1), number(r["records"], 0)),
                number(r["per_processor"], 1),
            ]
            for r in rows
        ],
    )


def items(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of ways to train many small models."""
    loop = next(r["warm"] for r in rows if r["name"] == "loop")
    header = ["", "cold, s", "warm, s", "loop / warm", "others"]
    return table(
        header,
        [
            [
                r["name"],
                *(number(r["cold"]), number(r["warm"]), f"{loop / r['warm']:.2f}"),
                f"{r['others']:.0%}",
            ]
            for r in rows
        ],
    )


def short_items(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of items that take nothing, and longer ones."""
    header = ["an item, s", "", "items", "cold, s", "warm, s", "items/s", "CPU us/item", "others"]
    return table(
        header,
        [
            [
                f"{r['seconds']:g}",
                r["name"],
                *(str(r["items"]), number(r["cold"]), number(r["warm"])),
                *(f"{r['items'] / r['warm']:.3g}", f"{r['processor'] * 1e6:.3g}"),
                f"{r['others']:.0%}",
            ]
            for r in rows
        ],
    )


def install(result: Mapping[str, Any], shown: int = 8) -> str:
    """Returns the time of an installation, and a table of the largest distributions."""
    sizes = sorted(result["sizes"].items(), key=lambda each: each[1], reverse=True)
    rows = [
        *sizes[:shown],
        ("nanotf", result["sizes"]["nanotf"]),
        (f"all {len(sizes)}", sum(result["sizes"].values())),
    ]
    made = f"{result['environment']:.0f} s for the environment, {result['seconds']:.0f} s for pip\n"
    return made + table(["distribution", "MB"], [[name, number(n / 1e6, 1)] for name, n in rows])


def precisions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of models trained in several precisions, the first of each model's = 1."""
    header = ["model, precision", "CPU of an epoch, s", "gain", "accuracy, mean", "least", "most"]
    first = {row["model"]: row["seconds"] for row in reversed(rows)}
    cells = []
    for row in rows:
        accuracies = row["accuracies"]
        mean = sum(accuracies) / len(accuracies)
        shown = [f"{each:.2%}" for each in (mean, min(accuracies), max(accuracies))]
        seconds = row["seconds"]
        gain = number(first[row["model"]] / seconds)
        cells.append([f"{row['model']}, {row['way']}", number(seconds), gain, *shown])
    return table(header, cells)


def serving(found: Mapping[str, Any]) -> str:
    """Returns the tables of servers: at full load, and the times that clients saw of nanotf."""
    rows = found["rows"]
    header = ["model, server", "requests/s", "CPU us/request", "front's", "others"]
    header += [f"{name} / this" for name in goals.RIVALS]
    cells = [
        [
            f"{r['model']}, {r['server']}",
            number(ratios.median(r["rates"]), 0),
            *(_microseconds(ratios.median(r[name])) for name in ("processors", "fronts")),
            f"{ratios.median(r['others']) or 0.0:.0%}",
            *(number(goals.times_cheaper(rows, r, rival), 1) for rival in goals.RIVALS),
        ]
        for r in rows
    ]
    parts = [table(header, cells)]
    timed = [r for r in rows if "overload" in r]
    if timed:
        parts += [_at_ease(timed), _overloaded(timed)]
    return "\n\n".join([*parts, *found["problems"]])


def _at_ease(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["ms", "one client", "of it the batch", "70 %: p50", "p99", "a batch", "p99 / batch"]
    header.append("clients late, p99")
    cells = []
    for r in rows:
        one, most = r["one"], r["70 %"]
        alone, busy = (block["seen"]["answers"]["200"] for block in (one, most))
        times = (alone["mean"], one["batch"], busy["p50"], busy["p99"], most["batch"])
        cells.append(
            [
                f"{r['model']}, {r['server']}",
                *(number(1e3 * seconds, 2) for seconds in times),
                number(busy["p99"] / most["batch"], 1),
                number(1e3 * most["seen"]["late"], 2),
            ]
        )
    return table(header, cells)


def _overloaded(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["twice too much", "asked/s", "answered/s", "of capacity", "p99, ms", "limit, ms"]
    header += ["refused in, p99 ms", "clients late, p99 ms"]
    cells = []
    for r in rows:
        block = r["overload"]
        seen = block["seen"]
        good, refused = (seen["answers"].get(status) for status in ("200", "429"))
        cells.append(
            [
                f"{r['model']}, {r['server']}",
                number(seen["asked"] / seen["seconds"], 0),
                number(block["rate"], 0),
                f"{block['rate'] / block['capacity']:.0%}",
                number(1e3 * good["p99"], 1),
                number(1e3 * block["limit"], 0),
                number(1e3 * refused["p99"] if refused else None, 1),
                number(1e3 * seen["late"], 2),
            ]
        )
    return table(header, cells)


def _microseconds(seconds: Maybe) -> str:
    return number(None if seconds is None else 1e6 * seconds, 0)


def _goals(result: Mapping[str, Any]) -> str:
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = []
    for goal in goals.goals(result):
        sign = ">=" if goal.at_least else "<="
        measured = "-" if goal.measured is None else f"{goal.measured:.3g} {goal.unit}"
        where = f" ({goal.where})" if goal.where else ""
        wanted = f"{sign} {goal.target:g} {goal.unit}"
        rows.append([goal.text + where, wanted, measured, words[goal.met]])
    return table(["goal", "wanted", "measured", ""], rows)
