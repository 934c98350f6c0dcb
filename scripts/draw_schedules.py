"""Draws the timelines of docs/schedules.md, or with --figure those of the paper's figures.

python scripts/draw_schedules.py [--out docs/schedules.png]
python scripts/draw_schedules.py --figure all [--out docs/paper]   docs/paper/figure1.png ..., and as text
"""

import argparse
from pathlib import Path

from megatron_2bw.schedules import SCHEDULES
from megatron_2bw.timelines.paper_figures import FIGURES, draw_figure, print_figure
from megatron_2bw.timelines.picture import draw

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the picture, or with --figure the folder")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--figure", choices=("1", "2", "3", "all"), help="of the paper")
    options = parser.parse_args()
    if options.figure:
        for number in FIGURES if options.figure == "all" else [int(options.figure)]:
            path = (options.out or Path("docs/paper")) / f"figure{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_figure(number, path)
            print_figure(number)
            print(f"wrote {path}")
    else:
        out = options.out or Path("docs/schedules.png")
        names = ("2bw", "pipedream-flush", "gpipe")
        draw([SCHEDULES[name] for name in names], options.stages, options.microbatches, 3, out)
        print(f"wrote {out}")
