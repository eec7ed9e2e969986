"""The chart of `chatpage bench`: one panel per headline number, one bar per engine, as SVG that needs no script and no font.

Invariant: in every panel the longest bar is the best engine, and the bars are as long as the engines are good: half as long is
half as fast, or twice as large. It is legible on light and on dark pages.

    W1 decode, tokens/s                    W2 prefill, tokens/s
    chatpage     =================== 164   chatpage     =================== 1,755
    llama.cpp    =============== 147       openvino     ============== 1,339
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from chatpage.bench.measuring import START, Results

PANELS = (
    ("W1", "decode tok/s", "Decode, one stream", "tokens/s"),
    ("W2", "prefill tok/s", "Prefill of 1,500 tokens", "tokens/s"),
    ("W3", "first token ms", "Next turn, 1,500 cached: first token", "ms"),
    ("W4", "cold s", "8 samples of one 1,500-token prompt", "s"),
    ("W4", "warm s", "The same, prompt already cached", "s"),
    ("W5", "cold s", "8 chats on one system prompt, unseen", "s"),
    ("W5", "warm s", "8 chats on one system prompt, cached", "s"),
    ("STEP", "8 rows ms", "A decode step of 8 rows, 1,500 shared", "ms"),
    ("W6", "first token ms", "Regenerate at 1,500 tokens: first token", "ms"),
    ("W8", "first token ms", "Restart, go on at 4,000 tokens", "ms"),
    ("W4", "peak MiB", "Peak memory of the 8 samples", "MiB"),
    (START, "ready s", "From start until ready", "s"),
)
_COLUMNS, _WIDTH, _GAP = 2, 430, 40
_LABEL, _VALUE, _ROW, _HEAD, _FOOT = 104, 74, 20, 26, 18
_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #59636e; }
  .title { font-weight: 600; fill: #1f2328; }
  .ours { font-weight: 600; fill: #1f2328; }
  .bar { fill: #afb8c1; }
  .bar.ours { fill: #3b82f6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }
    .title, text.ours { fill: #f0f6fc; }
    .bar { fill: #59636e; }
    .bar.ours { fill: #4493f8; }
  }
"""


def draw(results: Results, engines: Sequence[str]) -> str:
    """Return the chart as an SVG document; the first engine is ours, and panels without numbers are left out."""
    panels = [
        (f"{title}, {unit}", values, number.endswith("tok/s"))
        for workload, number, title, unit in PANELS
        if (values := _medians(results, workload, number, engines))
    ]
    height = _HEAD + _ROW * len(engines) + _FOOT
    num_rows = -(-len(panels) // _COLUMNS)
    size = (_COLUMNS * _WIDTH + (_COLUMNS - 1) * _GAP, num_rows * height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" '
        'role="img" aria-label="chatpage and other engines on the same workloads; longer bars are better">',
        f"<style>{_STYLE}</style>",
    ]
    for index, (title, values, is_rate) in enumerate(panels):
        left, top = index % _COLUMNS * (_WIDTH + _GAP), index // _COLUMNS * height
        parts += [f'<g transform="translate({left} {top})">', *_panel(title, values, engines, is_rate=is_rate), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, values: dict[str, float], engines: Sequence[str], *, is_rate: bool) -> list[str]:
    lines = [f'<text class="title" x="0" y="14">{escape(title)}</text>']
    best = (max if is_rate else min)(values.values())
    room = _WIDTH - _LABEL - _VALUE
    for row, name in enumerate(engines):
        top = _HEAD + row * _ROW
        own = " ours" if row == 0 else ""
        lines.append(f'<text class="label{own}" x="{_LABEL - 8}" y="{top + 11}" text-anchor="end">{escape(name)}</text>')
        if name not in values:
            lines.append(f'<text x="{_LABEL}" y="{top + 11}">-</text>')
            continue
        goodness = values[name] / best if is_rate else best / values[name]
        width = max(2.0, room * goodness)
        lines.append(f'<rect class="bar{own}" x="{_LABEL}" y="{top}" width="{width:.1f}" height="14" rx="2"/>')
        lines.append(f'<text class="value{own}" x="{_LABEL + width + 6:.1f}" y="{top + 11}">{_format(values[name])}</text>')
    return lines


def _medians(results: Results, workload: str, number: str, engines: Sequence[str]) -> dict[str, float]:
    spreads = {name: results.spread(workload, name, number) for name in engines}
    return {name: spread.median for name, spread in spreads.items() if spread is not None and spread.median > 0}


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
