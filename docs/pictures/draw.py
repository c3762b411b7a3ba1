"""Draws the pictures of docs/how-it-works.md: python docs/pictures/draw.py

`step.json` is a step as trainstream recorded it (bench/step_phases.py --record): 7.62 B parameters,
stock fused AdamW, a budget of 18 GiB, on an H200 at commit 3940a14.
"""

import bisect
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 56, 16, 30, 80
BUDGET_GB = 18 * 2**30 / 1e9
INK, SOFT, FRAMES, BESIDE, MOVE = "#222222", "#666666", "#4477aa", "#ddaa33", "#117733"


def text(x, y, words, anchor="start", color=INK, size=13):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
        f'font-size="{size}">{words}</text>'
    )


def box(x, y, width, height, fill, stroke="none", opacity=1):
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{fill}" stroke="{stroke}" fill-opacity="{opacity}"/>'
    )


def arrow(x0, y0, x1, y1, color=MOVE, dashed=False):
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{color}" stroke-width="2"'
        f'{dash} marker-end="url(#head)"/>'
    )


def area(edges, heights, floor, color):
    """Under steps: `heights[i]` from `edges[i]` to the next."""
    path = [f"M{edges[0]:.1f} {floor:.1f}"]
    for begin, end, height in zip(edges, edges[1:], heights, strict=False):
        path.append(f"L{begin:.1f} {height:.1f} L{end:.1f} {height:.1f}")
    return f'<path d="{" ".join(path)} L{edges[-1]:.1f} {floor:.1f} z" fill="{color}"/>'


def save(name, title, parts, height=HEIGHT):
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{MOVE}"/></marker></defs>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" role="img">',
        f"<title>{title}</title>",
        head,
        box(0, 0, WIDTH, height, "#ffffff"),
        *parts,
        "</svg>",
    ]
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def where_bytes_are():
    device, host = (20, 50, 350, 250), (490, 50, 350, 250)
    parts = [
        box(*device, "#eef3f8", INK),
        box(*host, "#faf4e4", INK),
        text(195, 38, "device memory, within the budget", "middle"),
        text(665, 38, "page-locked host memory", "middle"),
    ]
    for i, words in enumerate(("weights of layers 6 and 7", "activations", "a gradient")):
        parts += [box(40, 70 + 52 * i, 310, 40, FRAMES, opacity=0.85)]
        parts += [text(195, 95 + 52 * i, words, "middle", "#ffffff")]
    parts += [box(40, 226, 310, 56, "#ffffff", FRAMES)]
    parts += [text(195, 250, "a frame, empty: layer 8 is on its way", "middle", SOFT)]
    parts += [text(195, 270, "before an operator asks for it", "middle", SOFT)]
    for i, words in enumerate(("weights of the other layers", "Adam's moments", "layer 8")):
        parts += [box(510, 70 + 52 * i, 310, 40, BESIDE, opacity=0.9)]
        parts += [text(665, 95 + 52 * i, words, "middle")]
    parts += [
        arrow(505, 200, 356, 250),
        text(430, 256, "loaded ahead", "middle", MOVE, 12),
        arrow(354, 88, 505, 88),
        text(430, 80, "coldest leave", "middle", MOVE, 12),
        text(665, 250, "still tensors on cuda: the GPU reads and", "middle", SOFT),
        text(665, 270, "writes here itself, over the link, when", "middle", SOFT),
        text(665, 290, "an operator touches each byte just once", "middle", SOFT),
        arrow(505, 140, 356, 140, dashed=True),
        text(430, 132, "in place", "middle", MOVE, 12),
    ]
    save("where-bytes-are.svg", "Where the bytes of a training step are", parts, 320)


def a_step():
    step = json.loads((FOLDER / "step.json").read_text(encoding="utf-8"))[0]
    points = step["points"]
    places = [point[0] for point in points]
    waited_ns = [point[1] + sum(point[2]) for point in points]
    total = waited_ns[-1] / 1e9

    def seconds(place):
        """When the operator of that number began: computing and waiting up to it."""
        right = min(max(bisect.bisect_left(places, place), 1), len(places) - 1)
        left = right - 1
        part = (place - places[left]) / max(1, places[right] - places[left])
        return (waited_ns[left] + part * (waited_ns[right] - waited_ns[left])) / 1e9

    def x(time):
        return LEFT + time / total * (WIDTH - LEFT - RIGHT)

    def y(gigabytes):
        return HEIGHT - BOTTOM - gigabytes / 22 * (HEIGHT - BOTTOM - TOP)

    times = [seconds(place) for place in step["places"]] + [total]
    beside = [each / 1e9 for each in step["beside_bytes"]]
    frames = [
        (step["arena_bytes"] + count * step["segment_bytes"]) / 1e9 for count in step["segments"]
    ]
    tops = [min(low + high, BUDGET_GB) for low, high in zip(beside, frames, strict=True)]
    parts = [
        area([x(time) for time in times], [y(top) for top in tops], y(0), FRAMES),
        area([x(time) for time in times], [y(low) for low in beside], y(0), BESIDE),
    ]
    for gigabytes in (0, 5, 10, 15, 20):
        parts.append(text(LEFT - 8, y(gigabytes) + 4, gigabytes, "end", SOFT, 12))
    ends = x(0), x(total)
    parts += [
        f'<line x1="{ends[0]}" x2="{ends[1]}" y1="{y(BUDGET_GB):.1f}" y2="{y(BUDGET_GB):.1f}" '
        f'stroke="{INK}" stroke-dasharray="6 4"/>',
        text(ends[1], y(BUDGET_GB) - 6, "budget: 18 GiB", "end"),
        text(LEFT - 40, TOP - 12, "GB of device memory", "start", SOFT, 12),
    ]
    loss = max(range(len(beside) // 2), key=lambda i: beside[i] if i > 8 else 0)
    last_backward = max(i for i, place in enumerate(step["places"]) if place <= places[-2] - 60)
    phases = (("forward", 0, times[loss]), ("backward", times[loss], times[last_backward]))
    phases += (("optimizer", times[last_backward], total),)
    for name, begin, end in phases:
        parts += [
            f'<line x1="{x(begin) + 2:.1f}" x2="{x(end) - 2:.1f}" y1="{y(0) + 10:.1f}" '
            f'y2="{y(0) + 10:.1f}" stroke="{INK}" stroke-width="2"/>',
            text((x(begin) + x(end)) / 2, y(0) + 28, name, "middle"),
        ]
    legend = y(0) + 58
    parts += [
        box(LEFT, legend - 11, 14, 14, FRAMES),
        text(LEFT + 20, legend, "frames: what is loaded ahead passes through them, or stays"),
        box(LEFT + 420, legend - 11, 14, 14, BESIDE),
        text(LEFT + 440, legend, "activations, gradients, temporaries"),
        text(x(times[loss]) + 6, y(21), "logits and loss", "start", SOFT, 12),
    ]
    save("a-step.svg", "Device memory over one step of training", parts)


if __name__ == "__main__":
    where_bytes_are()
    a_step()
