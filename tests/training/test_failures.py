from __future__ import annotations

import pytest
import torch

from ecc.errors import BadFile, BadTask
from ecc.training.user_errors import OutOfMemory, describe, is_out_of_memory, wrap_user_errors


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 5 bytes"),
        MemoryError(),
        OutOfMemory("as told before"),
    ],
)
def test_the_ways_to_say_that_memory_is_missing(error: Exception) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemory), wrap_user_errors("the network"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory of mine")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_exception_of_the_user_is_one_line_with_its_type() -> None:
    with pytest.raises(BadTask) as caught, wrap_user_errors("evaluate of task 'a'"):
        raise KeyError("split\nand more")
    assert str(caught.value) == "evaluate of task 'a' raised KeyError: 'split\\nand more'."
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(BadTask) as caught, wrap_user_errors("build"):
        raise RuntimeError(
            "Error(s) in loading state_dict for N:\n\tMissing key(s) in state_dict: a.weight." + "b" * 999
        )
    assert str(caught.value).startswith(
        "build raised RuntimeError: Error(s) in loading state_dict for N: Missing key(s)"
    )
    assert len(str(caught.value)) < 350


def test_our_own_errors_and_interrupts_pass() -> None:
    with pytest.raises(BadFile, match=r"^mine$"), wrap_user_errors("x"):
        raise BadFile("mine")
    with pytest.raises(KeyboardInterrupt), wrap_user_errors("x"):
        raise KeyboardInterrupt


def test_the_error_of_a_loading_process_is_told_as_it_was_there() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal\n  File x\nValueError: bad image 7.\n"
    assert describe(ValueError(text)) == "ValueError: bad image 7"
    assert describe(ValueError()) == "ValueError: no message"
