"""What is said of FlashInfer's planner, held against the planner itself. Needs no GPU, but the compiled module.

Bugs these tests have been seen to catch: idle processors counted once; a workspace without the row that a tile
only begins, without the tiles of short sequences, of tiles of another size (as heads of 128 have them, for heads
of 512), or without the blocks that run at once.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.engine.execution.runner.graph_sizes import GraphSizes, StepSizes
from faser.kernels.cuda.flashinfer.graph_capture import num_planned, plan_extent
from faser.kernels.cuda.flashinfer.library import BLOCKS_PER_PROCESSOR
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind, PlanGrid, split_bytes, tile_rows
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.cuda.flashinfer import planned_wrappers
from tests.kernels.cuda.flashinfer.planner import MODULES, PAGE_SIZE, Layout, Plan, Planner, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
ROOT = Path(__file__).parents[4]
ALL, LANES = 132, (120, 96, 36, 20, 12)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HEAD_DIMS = (128, 256, 512)  # of which tiles have other widths


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("runtime"))


def idle_blocks(num_processors: int) -> int:
    return BLOCKS_PER_PROCESSOR * (ALL - num_processors)


def left_out_blocks(layout: Layout, num_processors: int) -> int:
    """Of a wrapper for graphs."""
    kind, rows = kind_of(layout), layout.most_rows or sum(layout.rows)
    grid = PlanGrid.of(kind, rows, len(layout.rows), layout.rows_each or None)
    pieces = grid.most_pieces(kind, num_processors, grid.tiles_of(kind, np.array(layout.rows)))
    return BLOCKS_PER_PROCESSOR * ALL - pieces * layout.num_kv_heads


def kind_of(layout: Layout) -> AttentionKind:
    shape = AttentionShape(
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        scale=1.0,
        window=None if layout.window_left < 0 else layout.window_left + 1,
    )
    return AttentionKind(shape, torch.bfloat16, torch.bfloat16, layout.decodes)


def drawn(draw: random.Random, num_sequences: int, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows, at least one for every sequence, and pages of sequences as long as they come."""
    rows = [1] * num_sequences
    some = draw.choice([1, 3, num_sequences])
    for _ in range(num_rows - num_sequences):
        rows[draw.randrange(min(some, num_sequences))] += 1
    lengths = [draw.choice([1, 3, 64, 256, draw.randint(1, 2048)]) for _ in rows]
    pages = tuple(max(each, -(-count // PAGE_SIZE)) for each, count in zip(lengths, rows, strict=True))
    return tuple(rows), pages


def blank(num_sequences: int, most_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first plan of a captured graph."""
    rows = tuple(most_rows // num_sequences + (s < most_rows % num_sequences) for s in range(num_sequences))
    return rows, tuple(-(-each // PAGE_SIZE) for each in rows)


@pytest.mark.parametrize("num_processors", LANES)
def test_blocks_that_are_left_out_are_processors_that_are_not_there(planner: Planner, num_processors: int) -> None:
    """Oracle: a device of that size."""
    draw = random.Random(num_processors)
    for _ in range(50):
        num_kv_heads, sequences = draw.choice([1, 2, 8, 16]), draw.choice([1, 2, 7, 33, 100])
        most_rows = draw.choice([sequences, sequences + 20, 5 * sequences])
        rows, pages = drawn(draw, sequences, draw.randint(sequences, most_rows))
        layout = Layout(
            rows=rows,
            pages=pages,
            num_heads=num_kv_heads * draw.choice(GROUPS),
            num_kv_heads=num_kv_heads,
            most_rows=draw.choice([most_rows, None]),
        )
        found = planner.plan(layout, colocated=idle_blocks(num_processors))
        assert found == planner.plan(layout, num_processors=num_processors)
        assert not found.splits or layout.most_rows or found.grid <= 2 * num_processors // num_kv_heads


def test_long_sequences_are_cut_for_the_lane_and_not_for_the_device(planner: Planner) -> None:
    """Four of 4,096 tokens, decoded by 20 processors: five pieces may run at once, so none is cut."""
    layout = Layout(rows=(1,) * 4, pages=(256,) * 4, num_heads=32, num_kv_heads=8)
    on_all, on_lane = planner.plan(layout), planner.plan(layout, colocated=idle_blocks(20))
    assert (on_all.splits, on_all.chunk_tokens, on_all.grid) == (True, 512, 32)
    assert (on_lane.splits, on_lane.chunk_tokens, on_lane.grid) == (False, 4096, 4)


@pytest.mark.parametrize("num_processors", [ALL, *LANES])
@pytest.mark.parametrize("one_row_each", [True, False])
def test_nothing_that_a_graph_captures_changes_from_plan_to_plan(
    planner: Planner, num_processors: int, one_row_each: bool
) -> None:
    """And all of them take a workspace that is hardly smaller than the one that there is."""
    draw = random.Random(num_processors)
    for _ in range(40):
        num_kv_heads, group = draw.choice([1, 2, 4, 8, 16, 32]), draw.choice(GROUPS)
        sequences = draw.choice([1, 2, 7, 33, 64, 256])
        most_rows = sequences + (0 if one_row_each else draw.choice([1, 20, sequences, 4 * sequences, 300]))
        window_left, head_dim = draw.choice([-1, 127]), draw.choice(HEAD_DIMS)
        launch_arguments = set()
        for number in range(4):
            num_rows = most_rows if one_row_each else draw.randint(sequences, most_rows)
            rows, pages = drawn(draw, sequences, num_rows) if number else blank(sequences, most_rows)
            layout = Layout(
                rows=rows,
                pages=pages,
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                most_rows=most_rows,
                window_left=window_left,
                head_dim=head_dim,
                decodes=one_row_each,
            )
            kind = kind_of(layout)
            left_out = left_out_blocks(layout, num_processors)
            plan = planner.plan(layout, colocated=left_out)
            launch_arguments.add(plan.launch_arguments)
            if kind.uses_tensor_cores:
                room = split_bytes(kind, num_processors, rows=most_rows, sequences=sequences)
                assert plan.bytes <= room <= 1.001 * plan.bytes
        assert len(launch_arguments) == 1


@pytest.mark.parametrize("rows_each", [1, 5])
@pytest.mark.parametrize("num_processors", [ALL, 96, 20])
def test_one_long_sequence_among_many_short_ones_is_cut(
    planner: Planner, num_processors: int, rows_each: int
) -> None:
    """64 of 1,024 tokens, one of them of 32,768; FlashInfer by itself cuts none of them."""
    equal = Layout(
        rows=(rows_each,) * 64,
        pages=(64,) * 64,
        num_heads=32,
        num_kv_heads=8,
        most_rows=64 * rows_each,
        rows_each=rows_each if rows_each > 1 else 0,
        decodes=rows_each == 1,
    )
    skewed = replace(equal, pages=(2048, *(64,) * 63))
    left_out = left_out_blocks(equal, num_processors)
    at_once = BLOCKS_PER_PROCESSOR * num_processors // 8
    assert len(planner.plan(skewed, colocated=idle_blocks(num_processors)).blocks()) == 64
    assert len(planner.plan(equal, colocated=left_out).blocks()) == 64
    assert 64 + at_once // 4 < len(planner.plan(skewed, colocated=left_out).blocks()) <= 64 + at_once


@pytest.mark.parametrize("num_processors", [ALL, 96, 20])
def test_sequences_of_one_length_are_cut_as_flashinfer_cuts_them(planner: Planner, num_processors: int) -> None:
    for sequences in range(1, 80):
        layout = Layout(
            rows=(1,) * sequences,
            pages=(64,) * sequences,
            num_heads=32,
            num_kv_heads=8,
            most_rows=sequences,
            decodes=True,
        )
        left_out = left_out_blocks(layout, num_processors)
        found, own = (planner.plan(layout, colocated=each) for each in (left_out, idle_blocks(num_processors)))
        assert found.blocks() == own.blocks(), sequences


def test_sequences_of_equal_rows_get_tiles_for_these_rows(planner: Planner) -> None:
    """64 sequences verify four drafted tokens each; 4 query heads a KV head."""
    rows, pages = (5,) * 64, (64,) * 64
    layout = Layout(rows=rows, pages=pages, num_heads=32, num_kv_heads=8, most_rows=320)
    tiles = {each: planner.plan(replace(layout, rows_each=each)).launch_arguments[3] for each in (0, 5)}
    assert tiles == {0: 128, 5: 64}


def padded(counts: list[int], group: int, *, max_sequences: int, max_drafts: int, pages: int = 1) -> Layout:
    """A step as the graph has it that it replays. counts: rows of each sequence. pages: of each."""
    shape = AttentionShape(num_heads=8 * group, num_kv_heads=8, head_dim=128, scale=1.0)
    sizes = GraphSizes.default(
        max_rows=8192,
        max_sequences=max_sequences,
        max_drafts=max_drafts,
        max_blocks_each=64,
        block_size=PAGE_SIZE,
        tile_rows=tile_rows(shape),
    )
    size = StepSizes(sizes).fitting(np.array(counts, dtype=np.int32))
    assert size is not None, "the step has no graph"
    missing = num_planned(size) - len(counts)
    return Layout(
        rows=(*counts, *(size.rows_each or 0,) * missing),
        pages=(*(pages,) * len(counts), *(1,) * missing),
        num_heads=8 * group,
        num_kv_heads=8,
        most_rows=size.rows,
        rows_each=size.rows_each or 0,
    )


@pytest.mark.parametrize(
    "counts, group, max_sequences, max_drafts, tile",
    [
        ([4, 7, 5, 6] * 16, 4, 64, 7, 64),
        ([7] * 64, 4, 64, 7, 64),
        ([4, 1, 2, 3] * 16, 4, 64, 7, 16),
        ([5] * 32, 4, 256, 7, 64),
        ([5] * 31, 4, 256, 7, 64),
        ([4] * 32, 4, 256, 7, 16),
        ([5, 5, *[1] * 100], 4, 256, 16, 64),
        ([5] * 128, 4, 128, 4, 64),
        ([4] * 256, 4, 256, 16, 16),
        ([1, 2, 2] * 42, 2, 128, 1, 16),
        ([1, 2] * 64, 2, 128, 1, 16),
        ([2] * 128, 2, 128, 1, 16),
        ([9, 1, 4], 8, 256, 16, 64),
        ([3, 1, 2], 3, 64, 7, 16),
        ([6, 1, 2], 3, 64, 7, 64),
    ],
)
def test_a_step_is_padded_to_a_size_whose_tiles_hold_the_rows_of_each_sequence(
    planner: Planner, counts: list[int], group: int, max_sequences: int, max_drafts: int, tile: int
) -> None:
    """And not more than that: a wider tile computes scores of rows that are not there."""
    layout = padded(counts, group, max_sequences=max_sequences, max_drafts=max_drafts)
    plan = planner.plan(layout, colocated=left_out_blocks(layout, ALL))
    assert plan.launch_arguments[3] == tile
    tiles = sum(-(-each * group // tile) for each in layout.rows)
    assert len(plan.blocks()) == tiles
    assert tiles == sum(each > 0 for each in layout.rows) or max(counts) * group > 64


@pytest.mark.parametrize("num_heads, max_sequences, max_drafts", [(32, 128, 7), (32, 256, 7), (16, 256, 1)])
def test_the_workspace_that_is_reserved_holds_the_plans_of_all_graphs(
    planner: Planner, num_heads: int, max_sequences: int, max_drafts: int
) -> None:
    """The shapes of Qwen3-8B and 0.6B, sequences of up to 8,192 tokens."""
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=8, head_dim=128, scale=1.0)
    sizes = GraphSizes.default(
        max_rows=8192,
        max_sequences=max_sequences,
        max_drafts=max_drafts,
        max_blocks_each=512,
        tile_rows=tile_rows(shape),
    )
    for size in sizes.batch_sizes:
        rows, _ = blank(num_planned(size), size.rows)
        for pages in (1, 64, 512):
            layout = Layout(
                rows=rows,
                pages=(pages,) * len(rows),
                num_heads=num_heads,
                num_kv_heads=8,
                most_rows=size.rows,
                rows_each=size.rows_each or 0,
            )
            plan = planner.plan(layout, colocated=left_out_blocks(layout, ALL))
            room = split_bytes(
                kind_of(layout),
                ALL,
                rows=size.rows,
                sequences=len(rows),
                rows_each=size.rows_each,
            )
            assert plan.bytes <= room, size


@pytest.mark.parametrize("counts", [[5] * 32, [4] * 20, [2, 3] * 6, [16] * 3])
@pytest.mark.parametrize("pages", [64, 500])
def test_sequences_in_a_graph_for_more_of_them_are_cut_as_by_themselves(
    planner: Planner, counts: list[int], pages: int
) -> None:
    """Padding sequences take no pieces, and leave none to others."""
    layout = padded(counts, 4, max_sequences=256, max_drafts=16, pages=pages)
    plan = planner.plan(layout, colocated=left_out_blocks(layout, ALL))
    eager = replace(layout, rows=tuple(counts), pages=(pages,) * len(counts), most_rows=None, rows_each=0)
    assert len(plan.blocks()) == planner.plan(eager).grid


@pytest.mark.parametrize("num_processors", [ALL, 96])
def test_nothing_that_a_uniform_graph_captures_changes_and_its_workspace_is_as_counted(
    planner: Planner, num_processors: int
) -> None:
    draw = random.Random(num_processors)
    for _ in range(30):
        num_kv_heads, group = draw.choice([1, 2, 4, 8]), draw.choice(GROUPS)
        sequences, each = draw.choice([2, 7, 33, 64, 100]), draw.choice([2, 3, 5, 6])
        head_dim = draw.choice(HEAD_DIMS)
        launch_arguments = set()
        for _ in range(3):
            layout = Layout(
                rows=(each,) * sequences,
                pages=tuple(draw.choice([1, 3, 64, draw.randint(1, 500)]) for _ in range(sequences)),
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                most_rows=each * sequences,
                rows_each=each,
                head_dim=head_dim,
            )
            kind = kind_of(layout)
            plan = planner.plan(layout, colocated=left_out_blocks(layout, num_processors))
            launch_arguments.add(plan.launch_arguments)
            room = split_bytes(kind, num_processors, rows=each * sequences, sequences=sequences, rows_each=each)
            assert plan.bytes <= room <= 1.001 * plan.bytes
        assert len(launch_arguments) == 1


@pytest.mark.parametrize("window_left", [-1, 199])
def test_a_plan_that_is_kept_computes_every_position_once(planner: Planner, window_left: int) -> None:
    """Sequences grow and shrink under a plan, as far as its extent says that it serves them.

    Oracle: what the kernel reads, block by block, as prefill.cuh computes it; each row has to meet each of its
    positions once, and to write its parts where its sequence has room for them.
    """
    draw, kept, cut = random.Random(window_left), 0, 0
    for _ in range(60):
        sequences = draw.choice([1, 2, 5, 12])
        rows = tuple(draw.choice([1, 1, 2, 5, 9]) for _ in range(sequences))
        lengths = [count + draw.choice([0, 5, draw.randint(0, 600)]) for count in rows]
        layout = Layout(
            rows=rows,
            pages=tuple(-(-each // PAGE_SIZE) for each in lengths),
            num_heads=32,
            num_kv_heads=8,
            most_rows=sum(rows),
            window_left=window_left,
        )
        plan = planner.plan(layout)
        window = None if window_left < 0 else window_left + 1
        extent = plan_extent([*plan.launch_arguments], plan.numbers.numpy(), window)
        pieces = extent.num_pieces(np.array(lengths, dtype=np.int32))
        for _ in range(5):
            grown = [
                max(each + draw.choice([0, 1, 4, 16, 40, -1, -16]), count)
                for each, count in zip(lengths, rows, strict=True)
            ]
            if extent.num_pieces(np.array(grown, dtype=np.int32)) != pieces:
                continue
            kept += 1
            cut += len(plan.blocks()) > sequences
            assert read_by_kernel(plan, rows, grown, window_left) == {
                (s, row, position): 1
                for s, (count, length) in enumerate(zip(rows, grown, strict=True))
                for row in range(count)
                for position in seen(row, count, length, window_left)
            }
    assert kept > 60
    assert cut > 20


def seen(row: int, count: int, length: int, window_left: int) -> range:
    """Positions that a row attends to."""
    end = length - count + row + 1
    return range(0 if window_left < 0 else max(end - 1 - window_left, 0), end)


def read_by_kernel(
    plan: Plan, rows: tuple[int, ...], lengths: list[int], window_left: int
) -> Counter[tuple[int, int, int]]:
    """How often each row of each sequence meets each position that it attends to."""
    found: Counter[tuple[int, int, int]] = Counter()
    tile, group, chunk = plan.launch_arguments[3], 4, plan.chunk_tokens
    written: Counter[tuple[int, int, int]] = Counter()
    for sequence, query_tile, piece in plan.blocks():
        count, length = rows[sequence], lengths[sequence]
        window = length if window_left < 0 else window_left
        start = max(length + query_tile * tile // group - count - window, 0)
        begin, end = (min(each * chunk + start, length) for each in (piece, piece + 1))
        num_pieces = -(-min(length, window + tile) // chunk)
        assert piece < num_pieces
        for packed in range(query_tile * tile, min((query_tile + 1) * tile, count * group), group):
            row = packed // group
            written[sequence, row, piece] += 1
            for position in seen(row, count, length, window_left):
                found[sequence, row, position] += begin <= position < end
    assert set(written.values()) == {1}
    assert len(written) == sum(
        count * -(-min(length, (length if window_left < 0 else window_left) + tile) // chunk)
        for count, length in zip(rows, lengths, strict=True)
    )
    return found


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_processors", [ALL, *LANES])
def test_plans_of_any_size_find_room_for_what_they_split(
    planner: Planner, num_processors: int, head_dim: int
) -> None:
    draw, fullest = random.Random(num_processors), 0.0
    for _ in range(150):
        num_kv_heads, sequences = draw.choice([1, 2, 4, 8, 16]), draw.choice([1, 1, 2, 7, 33])
        rows, pages = drawn(draw, sequences, sequences * draw.choice([1, 4, 40, 300]))
        heads = num_kv_heads * draw.choice(GROUPS)
        layout = Layout(rows=rows, pages=pages, num_heads=heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        taken = planner.plan(layout, colocated=idle_blocks(num_processors)).bytes
        room = split_bytes(kind_of(layout), num_processors)
        assert taken <= room
        fullest = max(fullest, taken / room)
    assert fullest > 0.75


@pytest.mark.slow
def test_wrappers_of_the_package_plan_for_their_places(planner: Planner, tmp_path: Path) -> None:
    """In a process of its own: importing the package takes seconds and makes a folder for its cache."""
    counts = (ALL, *LANES)
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_DISABLE_JIT": "1",
        "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
    }
    program = [
        sys.executable,
        "-m",
        "tests.kernels.cuda.flashinfer.planned_wrappers",
        str(MODULES),
        str(tmp_path),
        *map(str, counts),
    ]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for num_processors, (*plans, captured) in zip(counts, found, strict=True):
        for rows, launch_arguments in zip(planned_wrappers.ROWS, plans, strict=True):
            layout = Layout(
                rows=(rows,) * planned_wrappers.NUM_SEQUENCES,
                pages=(planned_wrappers.BLOCKS_EACH,) * planned_wrappers.NUM_SEQUENCES,
                num_heads=planned_wrappers.GROUP * planned_wrappers.NUM_KV_HEADS,
                num_kv_heads=planned_wrappers.NUM_KV_HEADS,
            )
            assert tuple(launch_arguments) == planner.plan(layout, num_processors=num_processors).launch_arguments
        sequences = planned_wrappers.NUM_CAPTURED
        layout = Layout(
            rows=(1,) * sequences,
            pages=(planned_wrappers.BLOCKS_EACH, *(planned_wrappers.SHORT_BLOCKS,) * (sequences - 1)),
            num_heads=planned_wrappers.GROUP * planned_wrappers.NUM_KV_HEADS,
            num_kv_heads=planned_wrappers.NUM_KV_HEADS,
            most_rows=sequences,
            decodes=True,
        )
        left_out = left_out_blocks(layout, num_processors)
        assert tuple(captured) == planner.plan(layout, colocated=left_out).launch_arguments
