"""The result of a search."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanotf.errors import NanoError
from nanotf.searching import studies

_ROWS = 10  # trials in the text of a result


class SearchResult:
    """The result of `nanotf.search`.

    Args:
        study: `optuna.Study`.
        number: int, the trial of `model`.
        model: its model, or None if no trial of this call is the best.
        train_again: callable, takes a study and a trial of Optuna, and returns the trained model.

    Attributes:
        study: `optuna.Study`, for Optuna's plots and importances. If the search had no `storage`,
            it lies in this process's memory.
        parallel: int, how many trials ran at a time; 0 if none was left.
    """

    def __init__(
        self,
        study: Any,
        number: int,
        model: Any,
        train_again: Callable[[Any, Any], Any],
        parallel: int,
    ) -> None:
        self.study, self.parallel = study, parallel
        self._number, self._model, self._train_again = number, model, train_again

    @property
    def best_trial(self) -> Any:
        """`optuna.trial.FrozenTrial`, the trial with the best value.

        Raises:
            NanoError: No trial has a value.
        """
        best = studies.best_of(self.study)
        if best is None:
            errors = [row["error"] for row in self.table if row["error"]]
            raise NanoError(
                "A search needs a trial with a value. Received: "
                f"{len(self.table)} trials that were pruned or failed"
                f"{f', the last with {errors[-1]}' if errors else ''}. Look at `study.trials`, and "
                "change `space` or `build`."
            )
        return best

    @property
    def best_params(self) -> dict[str, Any]:
        """dict of str to value, the parameters of `best_trial`."""
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        """float, the metric of `best_trial` after its last epoch."""
        return float(self.best_trial.value)

    @functools.cached_property
    def best_model(self) -> Any:
        """Keras model of `best_trial`, after its last epoch.

        A study stores no models. If the best trial is of an earlier call, or its worker died before
        it had sent the model, it is trained again in a worker, from the same parameters and seed.
        """
        best = self.best_trial
        if best.number == self._number:
            return self._model
        return self._train_again(self.study, best)

    @property
    def table(self) -> list[dict[str, Any]]:
        """list of dicts, one per trial: number, state, value, epochs, seconds, params, error.

        For pandas, Optuna's own table is the method trials_dataframe of `study`.
        """
        return [_row(trial) for trial in self.study.trials]

    def __str__(self) -> str:
        rows = self.table
        done = [row for row in rows if row["state"] == "complete"]
        sign = -1 if self.study.direction.name == "MAXIMIZE" else 1
        done.sort(key=lambda row: sign * row["value"])
        lines = [f"{len(rows)} trials, {len(done)} with a value; the best:", "  trial  value"]
        lines += [
            f"  {row['number']:>5}  {row['value']:<10.6g} "
            + ", ".join(f"{name}={_short(value)}" for name, value in row["params"].items())
            for row in done[:_ROWS]
        ]
        return "\n".join(lines)

    __repr__ = __str__


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _row(trial: Any) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value,
        "epochs": None if trial.last_step is None else trial.last_step + 1,  # epochs count from 0
        "seconds": None if trial.duration is None else trial.duration.total_seconds(),
        "params": dict(trial.params),
        "error": trial.user_attrs.get(studies.ERROR, ""),
    }
