"""The desk's own answers, without workers."""

import asyncio
import pathlib
import types

import pytest

from nanotf.serving.front.desk import Desk
from nanotf.serving.interface import Refusal


class Wanted:
    """Models whose names are known only after a look, as those on a disk."""

    def __init__(self):
        self.names, self.added, self.looks = [], [], asyncio.Event()

    async def add(self, model, folder):
        self.added.append(model)
        await self.looks.wait()
        self.names = [*self.added]

    async def remove(self, model):
        self.added.remove(model)


def test_a_model_that_is_being_loaded_is_not_loaded_again():
    async def script():
        wanted = Wanted()

        async def outcome(model, is_still_known):
            return ""

        fleet = types.SimpleNamespace(outcome=outcome)
        desk = Desk([], fleet, None, None, wanted, 1, 1, 1.0, None)
        first = asyncio.create_task(desk.load("m", pathlib.Path("/m")))
        await asyncio.sleep(0)
        for _ in range(2):  # while it loads, and once it is served
            with pytest.raises(Refusal, match="already loaded") as error:
                await desk.load("m", pathlib.Path("/m"))
            assert error.value.status == 409
            wanted.looks.set()
            await first
        assert wanted.added == ["m"]

    asyncio.run(script())
