from __future__ import annotations

import inspect

import pytest

from ecc import errors
from ecc.errors import EccError

ALL_ERRORS = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, EccError)]


def test_there_are_few() -> None:
    assert len(ALL_ERRORS) <= 10  # a caller tells them apart by type, a person by message


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_one_except_catches_them_all(error: type[EccError]) -> None:
    with pytest.raises(EccError, match="say what to do"):
        raise error("say what to do")


@pytest.mark.parametrize("error", [error for error in ALL_ERRORS if error is not EccError])
def test_each_says_when_it_is_raised(error: type[EccError]) -> None:
    assert error.__bases__ == (EccError,)
    assert (error.__doc__ or "").startswith("Raised when ")


def test_a_missing_meter_may_come_with_the_command_that_repairs_it() -> None:
    assert errors.NoMeter("only root may read it").remedy == ""
    assert errors.NoMeter("only root may read it", remedy="sudo chmod a+r counter").remedy == "sudo chmod a+r counter"


def test_a_message_shows_what_a_terminal_would_obey() -> None:
    assert str(EccError("a\x1b[2Jb\x07 ü\nc \ud800 \u202e")) == "a\\x1b[2Jb\\x07 ü\nc \\ud800 \\u202e"


def test_a_value_without_end_leaves_the_begin_and_the_way_out() -> None:
    message = str(EccError(f"widths is {'x' * 100_000}; give a list."))
    assert len(message) == errors.LONGEST
    assert message.startswith("widths is xxx")
    assert message.endswith("xxx; give a list.")
