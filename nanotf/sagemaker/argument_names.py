"""Names of arguments of SageMaker's SDK: old ones, those without effect here, misspelled ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanotf.console import logger, warn_once
from nanotf.errors import InvalidArgumentTypeError, UnavailableError, meant


@dataclass(frozen=True)
class ArgumentNames:
    """The names that a callable takes beside those of its signature."""

    caller: str  # "TensorFlow()", for messages
    of: str  # what takes them in the SDK: "SageMaker's estimator"
    # They configure containers, images or the cloud, and have no effect on this machine.
    without_effect: tuple[str, ...]
    old: Mapping[str, str] = field(default_factory=dict)  # of version 1, to the present ones
    # What nanotf does not have, and what to do instead.
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def modernize(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments under their present names. Says in one line which ones were renamed.

        Raises:
            InvalidArgumentTypeError: An argument is given under both names.
            UnavailableError: An argument needs what nanotf does not have.
        """
        renamed = {old: self.old[old] for old in arguments if old in self.old}
        twice = {old: new for old, new in renamed.items() if new in arguments}
        if twice:
            both = ", ".join(f"{old} and {new}" for old, new in twice.items())
            raise InvalidArgumentTypeError(
                f"{self.caller} takes an argument under one name. Received: {both}, which name "
                f"the same. Leave out {', '.join(twice)}."
            )
        if renamed:
            told = ", ".join(f"{old} is now {new}" for old, new in renamed.items())
            logger.warning("Arguments of %s were renamed: %s.", self.caller, told)
        for name, remedy in self.unsupported.items():
            if arguments.get(name):
                raise UnavailableError(
                    f"{self.caller} of nanotf does not support `{name}`. Received: "
                    f"{name}={arguments[name]!r}. {remedy}"
                )
        return {renamed.get(name, name): value for name, value in arguments.items()}

    def check_unknown(self, unused: Mapping[str, Any], known: Iterable[str]) -> None:
        """Rejects names that the callable does not take. Says once which have no effect.

        Args:
            unused: arguments that nothing has used.
            known: the names of its signature, which may have been meant.

        Raises:
            InvalidArgumentTypeError: A name is unknown.
        """
        # `modernize` has let those of `unsupported` pass that ask for nothing, such as False.
        unknown = sorted(set(unused) - {*self.without_effect, *self.unsupported})
        if not unknown:
            # None and False ask for nothing, so nothing is missing.
            self._tell_of(sorted(name for name in unused if unused[name] not in (None, False)))
            return
        rights = (meant(name, [*known, *self.without_effect, *self.old]) for name in unknown)
        hint = "".join(f" Did you mean `{right}`?" for right in rights if right)
        raise InvalidArgumentTypeError(
            f"{self.caller} takes the arguments of {self.of}. Received: {unknown}.{hint}"
        )

    def _tell_of(self, names: Iterable[str]) -> None:
        told = ", ".join(names)
        if told:
            # The names are in the format: others are worth another line.
            warn_once(f"Without effect on this machine: the arguments {told} of {self.caller}.")


def check_instance_type(instance_type: str | None, remedy: str) -> None:
    """Rejects machines other than this one.

    Args:
        instance_type: the argument; None for this machine.
        remedy: what to do on another machine.

    Raises:
        UnavailableError: It is not "local".
    """
    if instance_type not in (None, "local"):
        raise UnavailableError(
            "nanotf runs on this machine, so `instance_type` must be 'local'. "
            f"Received: instance_type={instance_type!r}. {remedy}"
        )
