"""A real vLLM of two data parallel engines: one server, which shows the status of the first one."""

import pytest
from dying_trainer import check_dying_trainer, check_failed_load

from child_processes import LIMIT
from flyweight.engines.vllm import VllmEngine, publish_to

NUM_REQUESTS = 6
"""vLLM gives them to its engines in turn."""


@pytest.fixture(scope="module")
def two_engines(started):
    with started["two_engines"] as made:
        yield made


def answered(server):
    return [server.tokens() for _ in range(NUM_REQUESTS)]


def test_all_engines_of_a_server_take_a_version_together(two_engines, trainer, address, answers):
    engine = VllmEngine(two_engines.address, address)
    whole = sum(each.nbytes for each in trainer.model.values())
    for name in "BA":
        report = engine.update(trainer.becomes(name))
        assert answered(two_engines) == [answers[name]] * NUM_REQUESTS
        assert two_engines.version() == str(trainer.version)
        assert report.nbytes == 2 * whole, "each engine reads the model"
    assert trainer.publisher.replicas == [engine.name]
    trainer.publisher.withdraw()
    (result,) = publish_to([engine], trainer.publisher, 99, timeout_seconds=LIMIT)
    assert (result.error, result.report.version) == (None, 99)


def test_a_trainer_that_dies_between_two_engines_costs_neither_of_them_anything(
    two_engines, trainer, models, address, tmp_path, answers
):
    # It dies when the second engine wants the version that the first one has.
    check_dying_trainer(two_engines, trainer, models, address, tmp_path, "filling", 1)
    assert answered(two_engines) == [answers["A"]] * NUM_REQUESTS


def test_a_load_that_fails_leaves_all_engines_failed_until_a_whole_update(
    two_engines, trainer, address, tmp_path, answers
):
    check_failed_load(two_engines, trainer, address, tmp_path)
    assert answered(two_engines) == [answers["A"]] * NUM_REQUESTS
