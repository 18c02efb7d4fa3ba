"""A shard gives back what was written, or says what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from kvd.store.files import RealFiles
from kvd.store.shard import (
    Expected,
    ShardDamaged,
    ShardHeader,
    ShardReader,
    open_shard,
    read_shard,
    read_tensors,
    store_shard,
    write_shard,
)
from torments.blocks import empty_like, header, payload

FILES = RealFiles()
BLOCK = header([5, 6, 7, 0])


def expected(block: ShardHeader) -> Expected:
    return Expected(block.namespace, block.chain, block.parent, block.tokens, block.start, block.tensors)


def write(folder: Path, block: ShardHeader = BLOCK) -> str:
    path = str(folder / f"{block.chain.hex()}.safetensors")
    write_shard(FILES, path, block, payload(block))
    return path


def reason(path: str, block: ShardHeader = BLOCK) -> str:
    with pytest.raises(ShardDamaged) as caught:
        read_shard(FILES, path, None, expected(block), empty_like(block))
    return caught.value.reason


def test_bytes_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = write(tmp_path)
    into = empty_like(BLOCK)
    assert read_shard(FILES, path, None, expected(BLOCK), into) == BLOCK
    assert into == payload(BLOCK)


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    path = write(tmp_path)
    with safe_open(path, framework="numpy") as shard:
        metadata = shard.metadata()
        assert metadata["tokens"] == "5,6,7,0" and metadata["chain"] == BLOCK.chain.hex()
        assert list(shard.keys()) == sorted(spec.name for spec in BLOCK.tensors)
        for spec, data in zip(BLOCK.tensors, payload(BLOCK), strict=True):
            tensor = shard.get_tensor(spec.name)
            assert tensor.shape == spec.shape and tensor.tobytes() == data


def test_the_reserved_size_is_the_size_written(tmp_path: Path) -> None:
    from kvd.store.shard import file_bytes

    assert os.path.getsize(write(tmp_path)) == file_bytes(BLOCK)


def test_a_tensor_may_be_spread_over_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    block = header(list(range(1, 65)), layers=1)
    scattered = [view[i : i + 3] for view in payload(block) for i in range(0, len(view), 3)]
    assert len(scattered) > 2048
    path = str(tmp_path / "s")
    write_shard(FILES, path, block, scattered)
    backing = empty_like(block)
    read_shard(FILES, path, None, expected(block), [v[i : i + 5] for v in backing for i in range(0, len(v), 5)])
    assert backing == payload(block)


def test_layers_can_be_read_one_by_one(tmp_path: Path) -> None:
    into = empty_like(BLOCK)
    with ShardReader(FILES, write(tmp_path), expected(BLOCK)) as reader:
        assert [reader.read(into[:1]), reader.read(into[1:3]), reader.read(into[3:])] == [1, 2, 1]
    assert into == payload(BLOCK)


def test_buffers_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for wrong in (payload(BLOCK)[1:], [*payload(BLOCK), memoryview(b"x")]):
        with pytest.raises(ValueError):
            write_shard(FILES, str(tmp_path / "s"), BLOCK, wrong)
    assert not list(tmp_path.iterdir())


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    good = Path(path).read_bytes()
    length = int.from_bytes(good[:8], "little")
    text = len(good[8 : 8 + length].rstrip())
    for at in [*range(0, 8 + text + 2), 8 + length - 1, *range(8 + length, len(good), 37), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        Path(path).write_bytes(bad)
        assert reason(path), at


def test_every_truncation_and_extension_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    good = Path(path).read_bytes()
    for size in [*range(0, len(good), 61), len(good) - 1]:
        Path(path).write_bytes(good[:size])
        assert reason(path) in ("truncated", "bad_header"), size
    Path(path).write_bytes(good + b"\0")
    assert reason(path) == "truncated"


def test_a_header_that_claims_the_moon_allocates_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    good = Path(path).read_bytes()
    Path(path).write_bytes((1 << 50).to_bytes(8, "little") + good[8:])
    assert reason(path) == "bad_header"
    length = int.from_bytes(good[:8], "little")
    table = json.loads(good[8 : 8 + length])
    table["k.0"]["shape"] = [1 << 50]
    Path(path).write_bytes(good[:8] + json.dumps(table).encode().ljust(length) + good[8 + length :])
    assert reason(path) in ("bad_header", "header_checksum")


def test_another_blocks_file_under_this_name_is_noticed(tmp_path: Path) -> None:
    other = header([5, 6, 7, 1])
    os.rename(write(tmp_path, other), tmp_path / f"{BLOCK.chain.hex()}.safetensors")
    assert reason(str(tmp_path / f"{BLOCK.chain.hex()}.safetensors")) == "other_block"


def test_a_block_of_another_layout_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ShardDamaged, match="other_layout"):
        asked = Expected(BLOCK.namespace, BLOCK.chain, BLOCK.parent, BLOCK.tokens, 0, BLOCK.tensors[:2])
        read_shard(FILES, write(tmp_path), None, asked, empty_like(BLOCK))


def test_the_workers_half_leaves_only_the_final_name(tmp_path: Path) -> None:
    temp, final = str(tmp_path / "a.tmp"), str(tmp_path / "b.safetensors")
    size, _ = store_shard(FILES, temp, final, BLOCK, payload(BLOCK))
    assert os.listdir(tmp_path) == ["b.safetensors"] and os.path.getsize(final) == size
    assert os.stat(final).st_mode & 0o777 == 0o600


def test_no_worker_opens_the_index() -> None:
    """LMDB has one user, the owner: what workers import does not even load it."""
    script = "import sys, kvd.worker.assemble, kvd.worker.main\nassert 'lmdb' not in sys.modules, 'loaded'"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_data_starts_on_a_page(tmp_path: Path) -> None:
    raw = Path(write(tmp_path)).read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0


def test_tensors_are_read_from_any_on_without_an_open_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    into = empty_like(BLOCK)
    parsed = open_shard(FILES, path, expected(BLOCK))
    assert read_tensors(FILES, path, parsed, 2, into[2:]) == len(into) - 2
    assert read_tensors(FILES, path, parsed, 0, into[:2]) == 2
    assert into == payload(BLOCK)


def test_a_damaged_tensor_read_by_itself_is_found_and_others_are_not_blamed(tmp_path: Path) -> None:
    path = write(tmp_path)
    into = empty_like(BLOCK)
    parsed = open_shard(FILES, path, expected(BLOCK))
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert read_tensors(FILES, path, parsed, 0, into[:-1]) == len(into) - 1
    with pytest.raises(ShardDamaged, match="checksum"):
        read_tensors(FILES, path, parsed, len(into) - 1, into[-1:])


def test_another_file_in_a_shards_place_is_no_damage_but_a_shard_that_vanished(tmp_path: Path) -> None:
    path = write(tmp_path)
    parsed = open_shard(FILES, path, expected(BLOCK))
    other = [memoryview(bytes(view.nbytes)) for view in payload(BLOCK)]
    write_shard(FILES, path + "2", BLOCK, other)
    os.replace(path + "2", path)
    with pytest.raises(FileNotFoundError):
        read_tensors(FILES, path, parsed, 0, empty_like(BLOCK))


def test_what_is_opened_must_be_the_block_that_was_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ShardDamaged, match="other_version"):
        open_shard(FILES, path, expected(BLOCK), checksum=bytes(16))
