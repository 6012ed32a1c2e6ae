"""Line plots as SVG, for the folder of results; made by hand, so no library is needed."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 340  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 40, 46
LEGEND = 26
STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}"
    ".grid{stroke:#ddd}.axis{stroke:#333}.line{fill:none;stroke-width:2}"
    ".guide{stroke:#999;stroke-dasharray:2 4;fill:none}"
)


@dataclass(frozen=True)
class Series:
    """A line: its name in the legend, its look, its points."""

    text: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. The horizontal one is logarithmic."""

    title: str
    x_text: str
    y_text: str
    series: Sequence[Series]
    has_log_y: bool = False
    has_guide: bool = False  # a line of slope 1: twice the x, twice the y


def draw(panels: Sequence[Panel]) -> str:
    """Panels beside each other, over the legend of the first, as the text of an SVG."""
    width, height = WIDTH * len(panels), HEIGHT + LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        lines.append(f'<g transform="translate({number * WIDTH} 0)">')
        lines += _draw_panel(panel)
        lines.append("</g>")
    lines += _draw_legend(panels[0].series, width)
    return "\n".join([*lines, "</svg>", ""])


def _draw_panel(panel: Panel) -> list[str]:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points]
    x_ticks = _powers_of_ten(min(xs), max(xs))
    y_ticks = _powers_of_ten(min(ys), max(ys)) if panel.has_log_y else _steps(max(ys))

    def place_x(x: float) -> float:
        return LEFT + _part(x, x_ticks, True) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        part = _part(y, y_ticks, panel.has_log_y)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    lines = [_text(LEFT, TOP - 16, panel.title, 'class="title"')]
    for x in x_ticks:
        at = place_x(x)
        lines.append(_line(at, TOP, at, bottom, "grid"))
        lines.append(_text(at, bottom + 17, f"{x:g}", 'text-anchor="middle"'))
    for y in y_ticks:
        at = place_y(y)
        lines.append(_line(LEFT, at, right, at, "grid"))
        lines.append(_text(LEFT - 7, at + 4, f"{y:g}", 'text-anchor="end"'))
    lines.append(_line(LEFT, bottom, right, bottom, "axis"))
    lines.append(_line(LEFT, TOP, LEFT, bottom, "axis"))
    middle = (LEFT + right) / 2
    lines.append(_text(middle, bottom + 36, panel.x_text, 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 16 {(TOP + bottom) / 2:.0f})"'
    lines.append(_text(16, (TOP + bottom) / 2, panel.y_text, turned))
    if panel.has_guide:
        x_end, y_end = panel.series[0].points[-1]
        x_begin = max(x_ticks[0], x_end * y_ticks[0] / y_end)
        lines.append(
            _line(
                place_x(x_begin),
                place_y(y_end * x_begin / x_end),
                place_x(x_end),
                place_y(y_end),
                "guide",
            )
        )
    for series in panel.series:
        places = [(place_x(x), place_y(y)) for x, y in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" {_look(series)}/>')
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"/>'
            for x, y in places
        ]
    return lines


def _draw_legend(all_series: Sequence[Series], width: int) -> list[str]:
    lines = []
    space = (width - LEFT) / len(all_series)
    for number, series in enumerate(all_series):
        x, y = LEFT + number * space, HEIGHT + LEGEND / 2
        lines.append(
            f'<line x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 26:.1f}" y2="{y - 4:.1f}" '
            f"{_look(series)}/>"
        )
        lines.append(_text(x + 33, y, series.text))
    return lines


def _look(series: Series) -> str:
    dashes = ' stroke-dasharray="6 4"' if series.is_dashed else ""
    return f'class="line" stroke="{series.colour}"{dashes}'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(text)}</text>'


def _part(value: float, ticks: Sequence[float], is_log: bool) -> float:
    """Where a value lies between the first tick (0) and the last one (1)."""
    low, high = ticks[0], ticks[-1]
    if is_log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _powers_of_ten(low: float, high: float) -> list[float]:
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    return [10.0**exponent for exponent in range(first, last + 1)]


def _steps(high: float) -> list[float]:
    """Round numbers from zero to beyond a value."""
    rough = high / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]
