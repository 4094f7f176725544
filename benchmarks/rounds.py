"""Runs the contestants of one model, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import memory
from benchmarks.contestants import Contestant, ContestantError, Setting
from benchmarks.models import Model, chosen
from benchmarks.others import Others
from benchmarks.timeline import Block

WARM_UP_STEPS = 4
WARM_UP_SECONDS = 0.3  # length of the epoch that gives a rough time per step
MIN_STEPS = 6
MAX_DATA_BYTES = 512 << 20  # of one contestant's copy of an epoch
SAME_EPOCHS = (
    "plain",
    "plain_16",
    "one",
    "shm",
    "auto",
    "peer",
)  # whole epochs are compared, so all have the same length
Say = Callable[[str], None]


@dataclasses.dataclass
class Track:
    """One contestant's results over the rounds.

    Args:
        contestant: `Contestant`.
        rough_step: float or None, seconds of a step, found while warming up.
        steps, epochs: int, of a block.
        cold: `Block`, the first `fit` of its processes.
        blocks: list of `Block`, one per round.
        others: list of float, the share of all cores used by other programs, per round.
        peak_bytes: int or None, peak memory.
    """

    contestant: Contestant
    rough_step: float | None = None
    steps: int = 0
    epochs: int = 1
    cold: Block = dataclasses.field(default_factory=Block)
    blocks: list[Block] = dataclasses.field(default_factory=list)
    others: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None


def steps_of_epoch(step: float, seconds: float, spec: Model) -> int:
    """Returns the steps of an epoch of about `seconds`, at `step` seconds each."""
    most = max(MIN_STEPS, MAX_DATA_BYTES // (spec.row_bytes * spec.batch_size))
    return min(max(MIN_STEPS, round(seconds / step)), most)


def lay_out(tracks: Mapping[str, Track], epoch_seconds: float, spec: Model) -> None:
    """Sets the number of steps and epochs of each contestant's block.

    Args:
        tracks: mapping of contestants' names to `Track`, warmed up.
        epoch_seconds: float, approximate length of an epoch of plain Keras, or of the first
            contestant if there is no plain.
        spec: `Model`.
    """
    reference = tracks["plain"] if "plain" in tracks else next(iter(tracks.values()))
    step = reference.rough_step or epoch_seconds / MIN_STEPS
    same = steps_of_epoch(step, epoch_seconds, spec)
    for name, track in tracks.items():
        if name in SAME_EPOCHS:
            # The first epoch has no preceding epoch end, so two of three epochs are timed.
            track.steps, track.epochs = same, 3 if same * step <= 1.3 * epoch_seconds else 2
        elif name == "ideal":
            track.steps, track.epochs = 2 * same, 1
        else:
            own = steps_of_epoch(track.rough_step or step, epoch_seconds, spec)
            track.steps, track.epochs = min(same, own), 2


class ModelRun:
    """The measurement of one model.

    Args:
        model: str, a key of `MODELS`.
        setting: `contestants.Setting`.
        peer_python: str, the peer's interpreter, or "".
        say: function that prints a line of progress.
    """

    def __init__(self, model: str, setting: Setting, peer_python: str, say: Say) -> None:
        self.model = model
        self.spec = chosen(model, setting.optimizer, setting.batch_size)
        self.setting = setting
        self.peer_python = peer_python
        self.say = say
        self.tracks: dict[str, Track] = {}
        self.failed: dict[str, str] = {}

    def run(self, names: Sequence[str], rounds: int, epoch_seconds: float) -> dict[str, Any]:
        """Runs `rounds` rounds of the contestants `names`. Returns a JSON-serializable result."""
        try:
            for name in names:
                self.say(f"{self.model}: {name} starts and warms up")
                self._attempt(name, self._start)
            if self.tracks:
                lay_out(self.tracks, epoch_seconds, self.spec)
            self._all(self._prepare)
            for number in range(rounds):
                self._all(self._block)
                self.say(f"{self.model}: round {number + 1}/{rounds}: {self._rates()}")
            self._all(self._weigh)
        finally:
            for track in self.tracks.values():
                track.contestant.end()
        return {
            "title": self.spec.title,
            "batch_size": self.spec.batch_size,
            "contestants": {name: _as_json(track) for name, track in self.tracks.items()},
            "failed": self.failed,
        }

    def _all(self, action: Callable[[str], None]) -> None:
        for name in list(self.tracks):
            self._attempt(name, action)

    def _attempt(self, name: str, action: Callable[[str], None]) -> None:
        """Runs `action(name)` for each contestant, and drops those that fail."""
        try:
            action(name)
        except ContestantError as error:
            self.failed[name] = str(error)
            self.say(f"{self.model}: {name} failed: {error}")
            if name in self.tracks:
                self.tracks.pop(name).contestant.end()

    def _start(self, name: str) -> None:
        python = self.peer_python if name == "peer" else ""
        contestant = Contestant(name, self.model, self.setting, python)
        track = self.tracks[name] = Track(contestant)
        contestant.prepare(WARM_UP_STEPS)
        track.cold = contestant.run(WARM_UP_STEPS, 1)
        if track.cold.step is None:  # the peer's calls cannot be shortened, and yield no step times
            return
        steps = max(WARM_UP_STEPS, round(WARM_UP_SECONDS / track.cold.step))
        contestant.prepare(steps)
        track.rough_step = contestant.run(steps, 1).step

    def _prepare(self, name: str) -> None:
        self.tracks[name].contestant.prepare(self.tracks[name].steps)

    def _block(self, name: str) -> None:
        track = self.tracks[name]
        with Others(track.contestant.pids()) as others:
            block = track.contestant.run(track.steps, track.epochs)
        track.blocks.append(block)
        track.others.append(others.share)

    def _weigh(self, name: str) -> None:
        track = self.tracks[name]
        with memory.Sampler(track.contestant.pids()) as sampler:
            track.contestant.run(track.steps, 1)
        track.peak_bytes = sampler.peak

    def _rates(self) -> str:
        rates = []
        for name, track in self.tracks.items():
            seconds = track.blocks[-1].step or track.blocks[-1].epoch
            if track.blocks[-1].step is None and seconds:
                seconds /= track.steps
            rates.append(f"{name} {self.spec.batch_size / seconds:.0f}/s" if seconds else name)
        return ", ".join(rates)


def _as_json(track: Track) -> dict[str, Any]:
    return {
        "steps": track.steps,
        "epochs": track.epochs,
        "ready": track.contestant.ready,
        "cold": dataclasses.asdict(track.cold),
        "blocks": [dataclasses.asdict(block) for block in track.blocks],
        "others": track.others,
        "peak_bytes": track.peak_bytes,
    }
