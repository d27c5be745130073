from __future__ import annotations

import pytest
import torch

from ecc.errors import BadFile, BadTask, EccError, OutOfMemory, is_out_of_memory, wrap_user_errors


def test_control_characters_in_messages_are_escaped() -> None:
    assert str(EccError("a\x1b[2Jb\x07 ü\nc \ud800 \u202e")) == "a\\x1b[2Jb\\x07 ü\nc \\ud800 \\u202e"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 5 bytes"), True),
        (MemoryError(), True),
        (OutOfMemory("as above"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory of mine"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    with pytest.raises(OutOfMemory if expected else BadTask), wrap_user_errors("the network"):
        raise error


def test_errors_of_the_users_code_become_one_line_that_names_it() -> None:
    with pytest.raises(BadTask) as caught, wrap_user_errors("evaluate of task 'a'"):
        raise KeyError("split\nand more")
    assert str(caught.value) == "evaluate of task 'a' raised KeyError: 'split\\nand more'."
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(BadFile, match=r"^mine$"), wrap_user_errors("x"):
        raise BadFile("mine")
    with pytest.raises(KeyboardInterrupt), wrap_user_errors("x"):
        raise KeyboardInterrupt
