"""Samplers of a search: by default, each trial's parameters follow from the seed and its number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna

RETRY_OF = "nanotf_retry_of"  # attribute of a trial: the number of the trial that died first


def number_of(study: Any, trial: Any) -> int:
    """Returns the number that a trial would have if no worker had died before it.

    A trial that is tried again has that of the first; those that follow do not count it.
    """
    first = int(trial.user_attrs.get(RETRY_OF, trial.number))
    before = study.get_trials(deepcopy=False)[:first]
    return first - sum(RETRY_OF in each.user_attrs for each in before)


def seed_of(base: int, number: int) -> int:
    """Returns the seed of a trial; `numpy.random.SeedSequence` mixes the two numbers.

    Args:
        base: the search's seed.
        number: the trial's, in the study.
    """
    return int(np.random.SeedSequence((base, number)).generate_state(1)[0])


def default_sampler(seed: int) -> Any:
    """Makes Optuna's default sampler."""
    with warnings.catch_warnings():
        # Optuna 4 calls `constant_liar` experimental. It keeps parallel trials apart.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


class SeededSampler(optuna.samplers.BaseSampler):  # type: ignore[misc] # Any to mypy
    """A new sampler for each trial, seeded with the trial's number.

    Each worker process has a sampler. Samplers with one stream of random numbers each would draw
    the same parameters in all workers, or others in each call. What a sampler knows of earlier
    trials it reads from the study.

    Args:
        make: takes `seed` by name and returns a sampler.
        seed: the search's seed.
    """

    def __init__(self, make: Callable[..., Any], seed: int) -> None:
        self._make, self._seed = make, seed
        self._sampler = make(seed=seed)

    def before_trial(self, study: Any, trial: Any) -> None:
        self._sampler = self._make(seed=seed_of(self._seed, number_of(study, trial)))
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Any, trial: Any, param_name: str, param_distribution: Any
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        self._sampler.after_trial(study, trial, state, values)
