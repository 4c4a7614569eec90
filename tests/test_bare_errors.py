"""Our errors leave a nursery as themselves."""

from __future__ import annotations

import pytest
import trio

from trioengine.bare_errors import bare_errors
from trioengine.errors import ConfigError, EngineDeadError, InvalidRequestError


async def fail(error: Exception) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def raise_together(*errors: Exception) -> None:
    with bare_errors():
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(fail, error)


async def test_one_comes_out_alone_with_the_group_as_its_cause() -> None:
    with pytest.raises(EngineDeadError, match="killed") as caught:
        await raise_together(EngineDeadError("killed"))
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)


async def test_it_keeps_its_attributes() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await raise_together(InvalidRequestError("no", param="n", http_status=404))
    assert (caught.value.param, caught.value.http_status) == ("n", 404)


async def test_of_several_one_comes_out() -> None:
    with pytest.raises((EngineDeadError, ConfigError)):
        await raise_together(EngineDeadError("a"), ConfigError("b"))


async def test_a_foreign_error_stays_in_its_group() -> None:
    with pytest.RaisesGroup(OSError):
        await raise_together(OSError("x"))


def test_beside_a_foreign_error_both_are_kept() -> None:
    both = pytest.RaisesGroup(OSError, EngineDeadError, flatten_subgroups=True)
    with both, bare_errors():
        raise ExceptionGroup("g", [OSError("x"), EngineDeadError("killed")])
