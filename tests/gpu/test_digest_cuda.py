"""The digest on a GPU is the same number as on the CPU, wherever and however the bytes lie."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from child_processes import LIMIT  # noqa: E402
from flyweight.cuda import digest_kernel as cuda_digest  # noqa: E402
from flyweight.cuda.digest_kernel import DeviceDigests  # noqa: E402
from flyweight.digest import digest  # noqa: E402
from flyweight.errors import SpecError, TransferTimeout  # noqa: E402
from flyweight.memory import Buffer  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    shape = tuple(tensor.shape)
    return Buffer(tensor.data_ptr(), shape, strides, width, tensor, device=tensor.get_device())


def digests_of(tensors):
    return DeviceDigests(BufferTable.of([buffer_of(tensor) for tensor in tensors]))


def random_bytes(nbytes, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, device="cuda", dtype=torch.uint8)


def on_the_cpu(tensor):
    flat = tensor.cpu().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8))


def check(tensors):
    digests = digests_of(tensors)
    expected = [on_the_cpu(tensor) for tensor in tensors]
    assert digests.values(LIMIT).tolist() == expected
    assert digests.values(LIMIT).tolist() == expected  # sums start at zero each time


def test_odd_sizes_have_the_digest_of_the_cpu():
    sizes = [0, 1, 7, 8, 9, 255, 4096, 8184, 8191, 8192, 8193, 65535, 524288, 524289, 3_000_001]
    check([random_bytes(nbytes, nbytes) for nbytes in sizes])


def test_odd_addresses_have_the_digest_of_the_cpu():
    data = random_bytes(2_000_000)
    check([data[start : start + 1_234_560] for start in (0, 1, 2, 3, 4, 8, 16, 24, 8192)])


def test_strided_tensors_have_the_digest_of_their_row_major_bytes(monkeypatch):
    monkeypatch.setattr(cuda_digest, "SCRATCH_BYTES", 3 * 8192)
    data = random_bytes(1 << 20)
    words = data.view(torch.int64)
    check(
        [
            data.view(torch.bfloat16)[:100_000].view(250, 400).t(),
            data[:90_000].view(300, 300)[::2, 1::3],
            data.view(torch.float32)[:120_000].view(20, 60, 100).permute(2, 0, 1),
            words[:60_000].view(6, 10_000).t()[1::2],
            words.view(torch.complex128)[:60_000].view(300, 200)[:, 10:90],
            data[1:90_001].view(300, 300).t(),
            torch.zeros(4, 1, device="cuda").expand(4, 3000),
            torch.empty(0, 5, device="cuda").t(),
        ]
    )


def test_a_strided_tensor_larger_than_the_scratch_has_the_right_digest():
    check([random_bytes(48 << 20).view(torch.bfloat16).view(4096, -1).t()])


def test_very_many_blocks_of_all_alignments_have_their_own_digests():
    data = random_bytes(40 << 20)
    starts = range(0, 32 << 20, 8 << 10)
    check([data[at + at // 8192 % 17 :][: 1 + at % 70_001] for at in starts])


def test_all_dtypes_have_the_digest_of_their_bytes():
    data = random_bytes(80_008)
    names = "bool float16 bfloat16 float32 float64 int8 int64 float8_e4m3fn complex64"
    check([data.bool(), *(data.view(getattr(torch, name)) for name in names.split()[1:])])


def test_a_scalar_has_a_digest():
    check([torch.tensor(3.0, device="cuda"), torch.tensor(7, device="cuda")])


def test_a_flipped_bit_a_swapped_pair_and_a_shifted_row_are_seen():
    data = random_bytes(1 << 20)
    digests = digests_of([data])
    (before,) = digests.values(LIMIT).tolist()
    seen = {before}
    for at in (0, 8191, 8192, 700_001, (1 << 20) - 1):
        data[at] ^= 4
        seen.update(digests.values(LIMIT).tolist())
        data[at] ^= 4
    words = data.view(torch.int64)
    for one, other in ((0, 1), (5, 1029), (3, 100_000)):
        swap = torch.tensor([one, other], device="cuda")
        words[swap] = words[swap.flip(0)]
        seen.update(digests.values(LIMIT).tolist())
        words[swap] = words[swap.flip(0)]
    rows = data.view(-1, 8192)
    kept = rows.clone()
    rows.copy_(kept.roll(1, 0))
    seen.update(digests.values(LIMIT).tolist())
    rows.copy_(kept)
    assert len(seen) == 1 + 5 + 3 + 1
    assert digests.values(LIMIT).tolist() == [before]


def test_a_round_takes_no_memory_of_the_device():
    tensors = [random_bytes(100_003), random_bytes(1 << 20).view(1024, 1024).t()]
    digests = digests_of(tensors)
    digests.values(LIMIT)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    digests.values(LIMIT)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_work_queued_before_is_digested_and_a_deadline_is_kept():
    data = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    digests = digests_of([data])
    digests.values(LIMIT)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    data.fill_(7)
    with pytest.raises(TransferTimeout, match="0.01"):
        digests.values(0.01)
    assert digests.values(LIMIT).tolist() == [on_the_cpu(data)]


def test_memory_of_the_host_is_refused():
    data = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(SpecError, match="one"):
        DeviceDigests(BufferTable.of([Buffer.of(data.numpy())]))


def test_no_blocks_have_no_digests():
    assert digests_of([]).values(LIMIT).tolist() == []
