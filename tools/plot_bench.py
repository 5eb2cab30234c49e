"""Draws the sweeps that bench_embed has recorded: throughput over text length, and latency over batch size.

    python -m tools.plot_bench RECORDS.jsonl DEST_DIR

RECORDS.jsonl is what one run of `python -m tools.bench_embed MODEL --sweep --json RECORDS.jsonl` has written; its
records of the table are passed over. DEST_DIR gets an SVG for each sweep, on no background and in colours that stand
out from a light page and from a dark one. Equal records give equal files.
"""

import argparse
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from tools.sweeps import SWEEPS

TEXT_COLOR = "#6e7b87"
COLORS = {"f32": "#2f81f7", "tf32": "#a855f7", "f16": "#c2410c", "bf16": "#12925f"}
MARKERS = {"f32": "o", "tf32": "D", "f16": "s", "bf16": "^"}
LINE_STYLES = {"ours": "-", "torch": "--"}

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "gkd-engines",  # ids of elements are random without it
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": TEXT_COLOR,
    "axes.titlecolor": TEXT_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "text.color": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
    "grid.color": TEXT_COLOR,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.transparent": True,
}

Positive = Annotated[float, msgspec.Meta(gt=0)]


class AnyRecord(msgspec.Struct):
    """A line of the file; one of the table belongs to no sweep."""

    sweep: str | None = None


class Record(msgspec.Struct):
    """One row at one point of a sweep."""

    sweep: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SWEEPS)})$")]
    x: Annotated[int, msgspec.Meta(gt=0)]
    row: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(LINE_STYLES)}) ({'|'.join(COLORS)})$")]
    median_ms: Positive
    fastest_ms: Positive
    slowest_ms: Positive
    tokens_per_s: Positive
    """At the median."""
    model: str
    card: str
    date: str

    @property
    def caption(self) -> str:
        """What was measured where and when."""
        return f"{self.model} on {self.card} · {self.date}"

    @property
    def y(self) -> tuple[float, float, float]:
        """In the unit of its sweep: at the median, the fastest and the slowest call."""
        times_ms = self.median_ms, self.fastest_ms, self.slowest_ms
        if self.sweep == "latency":
            return times_ms
        median, fastest, slowest = (self.tokens_per_s * self.median_ms / time_ms for time_ms in times_ms)
        return median, fastest, slowest


def read_records(path: Path) -> list[Record]:
    """Those of the sweeps. OSError; ValueError names the line that is no record or does not fit the ones before it."""
    records: dict[tuple[str, int, str], Record] = {}
    caption = ""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if msgspec.json.decode(line, type=AnyRecord).sweep is None:
                continue
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{number}: not a record of bench_embed: {error}") from None
        caption = caption or record.caption
        if record.caption != caption:
            raise ValueError(f"{path}:{number}: expected one run, of `{caption}`, got `{record.caption}`")
        key = (record.sweep, record.x, record.row)
        if key in records:
            raise ValueError(f"{path}:{number}: `{record.row}` is there twice at {record.x} of `{record.sweep}`")
        records[key] = record
    if not records:
        raise ValueError(f"{path}: no record of a sweep: write some with `bench_embed --sweep --json`")
    return list(records.values())


def plot(dest: Path, records: list[Record]) -> None:
    """Draws the records of one sweep as the SVG file `dest`."""
    sweep = SWEEPS[records[0].sweep]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own file says
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for row in dict.fromkeys(record.row for record in records):
            draw_row(axes, row, sorted((r for r in records if r.row == row), key=lambda record: record.x))
        axes.set_title(sweep.title)
        axes.set_xlabel(sweep.x_label)
        axes.set_ylabel(sweep.y_label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({record.x for record in records}))
        axes.xaxis.set_major_formatter("{x:,.9g}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.9g}")
        axes.minorticks_off()
        axes.grid()
        axes.legend(ncols=len({record.row.rpartition(" ")[2] for record in records}))
        figure.supxlabel(
            f"{records[0].caption}\nlines: medians; bands: from the fastest call to the slowest", fontsize=9
        )
        figure.savefig(dest, format="svg", metadata={"Title": sweep.title, "Date": None})


def draw_row(axes: Axes, row: str, records: list[Record]) -> None:
    """A line through the medians, and a band from the fastest to the slowest."""
    engine, dtype = row.split()
    x = [record.x for record in records]
    median, fastest, slowest = zip(*(record.y for record in records), strict=True)
    axes.plot(x, median, LINE_STYLES[engine], color=COLORS[dtype], marker=MARKERS[dtype], markersize=5, label=row)
    axes.fill_between(x, fastest, slowest, color=COLORS[dtype], alpha=0.2, linewidth=0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path, metavar="RECORDS.jsonl")
    parser.add_argument("dest", type=Path, metavar="DEST_DIR", help="made if it is not there; plots in it are replaced")
    arguments = parser.parse_args(argv)
    try:
        records = read_records(arguments.records)
        arguments.dest.mkdir(parents=True, exist_ok=True)
        for name in SWEEPS:
            if of_sweep := [record for record in records if record.sweep == name]:
                path = arguments.dest / f"{name}.svg"
                plot(path, of_sweep)
                print(path)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
