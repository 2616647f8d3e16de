#!/usr/bin/env python3
"""Loss curves of one or more runs.

    python3 dev/plot.py out/a/log.tsv out/b/log.tsv --out loss.png      needs matplotlib
    python3 dev/plot.py out/a/log.tsv --text                            needs nothing

A log is what training writes beside its checkpoints: tab-separated, the first line names the columns. Validation loss,
where it was measured, is drawn as a line with dots over the training loss. Any other column: --column accuracy.
"""
import argparse
import math
import os
import sys


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def read_log(path, columns):
    """{column: [(step, value), ...]}. Empty cells are left out, and so is a last line that a killed run cut short."""
    if os.path.isdir(path):
        path = os.path.join(path, "log.tsv")
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        fail(f"cannot read log '{path}': {getattr(e, 'strerror', None) or 'not a text file'}")
    if not lines[0]:
        fail(f"log '{path}' is empty: the run has not finished its first step yet")
    header = lines[0].rstrip("\r").split("\t")
    if "step" not in header:
        fail(f"'{path}' is not a training log: its first line names no column 'step'")
    missing = [c for c in columns if c not in header]
    if len(missing) == len(columns):
        fail(f"log '{path}' has no column '{missing[0]}'; it has: {', '.join(header)}")
    curves = {c: [] for c in columns}
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(header):
            if line and number < len(lines):
                fail(f"log '{path}', line {number}: {len(cells)} cells, but the header has {len(header)}")
            continue
        row = dict(zip(header, cells))
        for c in columns:
            if row.get(c):
                try:
                    curves[c].append((int(row["step"]), float(row[c])))
                except ValueError:
                    fail(f"log '{path}', line {number}: '{row['step']}', '{row[c]}' are not numbers")
    return curves


def name_runs(paths):
    """The folders' names, or the whole paths where these are not distinct."""
    names = [os.path.basename(os.path.dirname(p) if p.endswith("log.tsv") else p.rstrip("/")) or p for p in paths]
    return names if len(set(names)) == len(names) else list(paths)


def finite(points):
    return [(x, y) for x, y in points if math.isfinite(y)]


def draw_text(curves, width=78, height=18):
    """curves: [(label, points)]. A character per curve; each column of the picture shows the mean of its steps."""
    points = [p for _, ps in curves for p in finite(ps)]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    rows = [[" "] * width for _ in range(height)]
    marks = "*o+x#@%&"
    for i, (_, ps) in enumerate(curves):
        cells = {}
        for x, y in finite(ps):
            cells.setdefault(round((x - x0) / (x1 - x0 or 1) * (width - 1)), []).append(y)
        for column, ys in cells.items():
            row = round((y1 - sum(ys) / len(ys)) / (y1 - y0 or 1) * (height - 1))
            rows[row][column] = marks[i % len(marks)]
    for i, row in enumerate(rows):
        label = f"{y1 - (y1 - y0) * i / (height - 1):9.4g}" if i % 4 == 0 or i == height - 1 else " " * 9
        print(f"{label} |{''.join(row).rstrip()}")
    print(" " * 10 + "+" + "-" * width)
    print(" " * 11 + f"{x0:<{width - 12}}{x1:>12}")
    for i, (label, ps) in enumerate(curves):
        lowest = min(y for _, y in finite(ps))
        print(f"  {marks[i % len(marks)]} {label}: {ps[-1][1]:.4f} at step {ps[-1][0]}, lowest {lowest:.4f}")


def draw_image(curves, ylabel, path):
    try:
        import matplotlib
    except ImportError:
        fail("matplotlib is not installed: pip install matplotlib, or use --text, which needs nothing")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(8, 5))
    for label, ps in curves:
        val = label.endswith("val_loss")
        ax.plot(*zip(*ps), label=label, linewidth=1.6 if val else 0.8, marker="." if val else None,
                alpha=1 if val else 0.6)
    ax.set_xlabel("step")
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.3)
    ax.legend()
    try:
        fig.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as e:
        fail(f"cannot write '{path}': {e}")
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a run's log.tsv, or its folder")
    parser.add_argument("--out", default="loss.png", help="the picture to write (default: loss.png; also .svg, .pdf)")
    parser.add_argument("--column", help="what to draw instead of train_loss and val_loss")
    parser.add_argument("--text", action="store_true", help="draw in the terminal, without matplotlib")
    args = parser.parse_args()
    columns = [args.column] if args.column else ["train_loss", "val_loss"]
    curves = []
    for path, name in zip(args.logs, name_runs(args.logs)):
        log = read_log(path, columns)
        found = [(f"{name} {c}", ps) for c, ps in log.items() if finite(ps)]
        if not found:
            fail(f"log '{path}' holds no value of {' or '.join(columns)} yet")
        curves += found
    if args.text:
        draw_text(curves)
    else:
        draw_image(curves, args.column or "loss, nats per token", args.out)


if __name__ == "__main__":
    main()
