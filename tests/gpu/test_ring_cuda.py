"""Memory of a device that cannot be mapped goes through a ring."""

import threading

import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child  # noqa: E402
from flyweight.errors import PeerLost  # noqa: E402
from flyweight.live.messages import Confirmed  # noqa: E402
from flyweight.transports.channel import Channel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
SHAPES = {
    "large": (300, 1 << 20),
    "odd": (1001, 37),
    "one": (1,),
    "none": (0, 3),
    "strided": (64, 96),
}


def model(version, dtype=None):
    dtype = dtype or torch.bfloat16
    torch.manual_seed(version)
    made = {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in SHAPES.items()}
    made["strided"] = torch.randn(96, 64, device="cuda").to(dtype).T
    return made


def trainer(address, verify, pipe):
    made = model(1)
    with fw.Publisher(made, address, verify=verify) as publisher:
        pipe.send("up")
        while (version := pipe.recv()) is not None:
            for name, fresh in model(version).items():
                made[name].copy_(fresh)
            pipe.send(str(publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)))


def taken(child, replica, version):
    done = []
    thread = threading.Thread(target=lambda: done.append(replica.update(timeout_seconds=LIMIT)))
    thread.start()
    child.send(version)
    assert "filled" in child.told()
    thread.join(LIMIT)
    return done[0]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filled_weights_are_those_of_the_trainer(address, verify, dtype):
    with Child(trainer, address, verify, context=SPAWN) as child:
        assert child.told() == "up"
        mine = {name: torch.zeros_like(each) for name, each in model(1, dtype).items()}
        with fw.Replica(mine, address, transport="filled", cast=dtype != torch.bfloat16) as replica:
            for version in (2, 3):
                report = taken(child, replica, version)
                assert (report.version, report.transport) == (version, "filled")
                assert all(
                    torch.equal(mine[n], each.to(dtype)) for n, each in model(version).items()
                )
        child.send(None)


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_trainer_that_dies_in_the_pause_costs_the_weights_only_if_they_were_touched(
    address, is_writing, monkeypatch
):
    with Child(trainer, address, True, context=SPAWN) as child:
        assert child.told() == "up"
        mine = {name: torch.zeros_like(each) for name, each in model(1).items()}
        with fw.Replica(mine, address, transport="filled") as replica:
            answer = Channel.answer

            def die(*words):
                frame = answer(*words)
                if isinstance(frame.message, Confirmed):
                    child.kill()
                    child.join()
                return frame

            if is_writing:
                monkeypatch.setattr(Channel, "answer", die)
            child.send(2)
            with pytest.raises(PeerLost):
                replica.update(
                    timeout_seconds=LIMIT, before=lambda _: None if is_writing else child.kill()
                )
            assert replica.version is None
            assert replica.state == ("FAILED" if is_writing else "EMPTY")
