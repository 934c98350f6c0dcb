"""Draws the timelines of docs/schedules.md: python scripts/draw_schedules.py [--out docs/schedules.png]"""

import argparse
from pathlib import Path

from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.timelines.picture import draw_shapes

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/schedules.png"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    names = ("2bw", "pipedream-flush", "gpipe")
    shape = Shape(options.stages, options.microbatches, 0, 3)
    draw_shapes([(SCHEDULES[name], shape) for name in names], options.out)
    print(f"wrote {options.out}")
