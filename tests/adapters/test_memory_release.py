"""What a model gives back is what an update brings back, and nothing else."""

import numpy as np
import pytest
import torch

from flyweight.adapters.memory_release import ModelMemory
from flyweight.errors import SpecError

MIB = 1 << 20


class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(MIB))
        self.register_buffer("saved", torch.ones(MIB))
        self.register_buffer("cosine", torch.ones(MIB), persistent=False)


def test_a_buffer_that_no_update_brings_back_stays():
    model = Rotary()
    assert ModelMemory(model).release() > 7 * MIB
    assert not model.weight[1024:-1024].any()
    assert not model.saved[1024:-1024].any()
    assert model.cosine.all()


def test_what_lies_between_the_elements_of_a_tensor_stays():
    whole = torch.ones(4, MIB)
    model = {"rows": whole[::2], "half": whole[1]}
    given = ModelMemory(model).release()
    assert 3 * MIB < given <= 4 * MIB
    assert whole[0].all()
    assert whole[2].all()
    assert whole[3].all()
    assert not whole[1, 1024:-1024].any()


def test_a_second_release_gives_nothing_and_a_restore_makes_it_possible_again():
    model = {"w": np.ones(MIB)}
    memory = ModelMemory(model)
    assert memory.release() > 7 * MIB
    assert memory.release() == 0
    memory.restore()
    memory.restore()
    model["w"][:] = 2
    assert memory.release() > 7 * MIB


def test_memory_that_another_process_may_see_is_refused_and_nothing_goes():
    model = {"mine": torch.ones(MIB), "shared": torch.ones(MIB).share_memory_()}
    with pytest.raises(SpecError, match="'shared'"):
        ModelMemory(model).release()
    assert model["mine"].all()
    assert model["shared"].all()
