"""Tables from outside the package: whatever sizes and flags one may have, results are right."""

import json
import random

import pytest

from minidl.runtime import launch, tile_tables
from minidl.tensors import default_device
from minidl.tools.tuning import classes, space
from minidl.tools.tuning.problem import Judge

# The interpreter's problems are in float32, and one family wants float16.
FAMILIES = [family for family in launch.families() if family != "conv_batch_narrow"]
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter's tables")


def drawn(draw: random.Random, family: str, present: launch.Tile) -> launch.Tile:
    """Blocks of other sizes, and flags of any value that a table may have."""
    sizes = {}
    for name, size in present.sizes.items():
        if name in space.FIXED.get(family, ()):
            sizes[name] = size
        elif name.startswith("BLOCK"):
            sizes[name] = max(min(size, 16), int(size * 2.0 ** draw.randint(-3, 1)))
        else:
            own = (tile[name] for tile in launch.tiles(family, "interpreted") if name in tile.sizes)
            sizes[name] = draw.choice(sorted({*tile_tables.FLAGS.get(name, ()), *own}))
    return launch.Tile(sizes, present.num_warps, present.num_stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_right_whatever_a_table_says(family, tmp_path):
    draw = random.Random(family)
    shapes = draw.choice([found for found in classes.of_family(family, "interpreted") if found.problems])
    judge = Judge(draw.choice(shapes.problems), default_device())
    for _ in range(5):
        tile = drawn(draw, family, shapes.tile)
        table = classes.with_tile(launch.table(family), "interpreted", shapes.index, tile)
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps(table))
        with launch.use_tables(**{family: tile_tables.load(path)}):
            assert judge.right(), tile
