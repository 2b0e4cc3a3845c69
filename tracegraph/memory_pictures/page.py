"""The HTML page around the charts: one file that needs no network, no server and no library."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from tracegraph.memory_pictures.chart import Chart, Shape
from tracegraph.memory_pictures.svg import draw_svg

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #20262e;
  font: 14px/1.45 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 24px 190px; }
h1 { font-size: 21px; margin: 4px 0 2px; }
h2 { font-size: 16px; margin: 26px 0 8px; }
p { margin: 2px 0 8px; color: #4a5260; }
select { font: inherit; padding: 3px 8px; margin-left: 10px; border: 1px solid #b4bac4;
  border-radius: 6px; background: #fff; max-width: 60ch; }
figure { margin: 0; padding: 14px 16px 8px; background: #fff; border: 1px solid #e1e5ea;
  border-radius: 8px; }
figcaption b { display: block; font-size: 15px; }
figcaption { color: #4a5260; }
ul { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 6px 0 2px;
  padding: 0; }
li i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px;
  border: 1px solid #0002; vertical-align: -1px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; pointer-events: none; }
svg text.in { paint-order: stroke; stroke: #0006; stroke-width: 2px; }
path[data-n]:hover, path.pinned { stroke: #111; stroke-width: 1.8; }
aside { position: fixed; left: 0; right: 0; bottom: 0; max-height: 170px; overflow: auto;
  background: #fffffff5; border-top: 1px solid #b4bac4; box-shadow: 0 -2px 10px #0001; }
aside pre { max-width: 1192px; margin: 0 auto; padding: 10px 24px; white-space: pre-wrap;
  font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("notes").textContent);
const panel = document.querySelector("aside pre");
const hint = panel.textContent;
let pinned = null;
function show(shape) {
  if (!shape) { panel.textContent = hint; return; }
  const [note, stack] = data.notes[shape.dataset.n];
  panel.textContent = [note, ...data.stacks[stack].map(line => "    " + line)].join("\\n");
}
document.addEventListener("mouseover", event => {
  const shape = event.target.closest("[data-n]");
  show(shape || pinned);
});
document.addEventListener("click", event => {
  if (!event.target.closest("svg")) return;
  if (pinned) pinned.classList.remove("pinned");
  pinned = event.target.closest("[data-n]");
  if (pinned) pinned.classList.add("pinned");
  show(pinned);
});
for (const select of document.querySelectorAll("select")) {
  const update = () => {
    for (const figure of select.closest("section").querySelectorAll("figure"))
      figure.hidden = figure.dataset.chart !== select.value;
  };
  select.addEventListener("change", update);
  update();
}
"""

_HINT = "Move the mouse over a block to see what it is; click to keep it here."


def draw_page(title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[Chart]]]) -> str:
    """Returns a whole HTML document.

    Args:
        title: heading of the page.
        subtitle: totals, below it.
        sections: headings with their charts; of several charts one is shown, by choice.
    """
    notes = _Notes()
    body = [_draw_section(heading, charts, notes) for heading, charts in sections if charts]
    # A text in the data must not be able to end the script element.
    data = json.dumps({"notes": notes.notes, "stacks": notes.stacks}).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(subtitle)}</p>",
            *body,
            f"</main>\n<aside><pre>{_HINT}</pre></aside>",
            f'<script type="application/json" id="notes">{data}</script>',
            f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


class _Notes:
    """Numbers the notes of shapes; equal call stacks are kept once."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self.stacks: list[tuple[str, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def add(self, shape: Shape) -> int:
        number = self._numbers.setdefault(shape.stack, len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(shape.stack)
        self.notes.append((shape.note, number))
        return len(self.notes) - 1


def _draw_section(heading: str, charts: Sequence[Chart], notes: _Notes) -> str:
    choice = ""
    if len(charts) > 1:
        options = "".join(
            f'<option value="{i}">{html.escape(chart.title)}</option>'
            for i, chart in enumerate(charts)
        )
        choice = f"<select>{options}</select>"
    figures = [_draw_figure(i, chart, notes) for i, chart in enumerate(charts)]
    return "\n".join(
        ["<section>", f"<h2>{html.escape(heading)}{choice}</h2>", *figures, "</section>"]
    )


def _draw_figure(index: int, chart: Chart, notes: _Notes) -> str:
    legend = "".join(
        f'<li><i style="background:{colour}"></i>{html.escape(text)}</li>'
        for text, colour in chart.legend
    )
    return (
        f'<figure data-chart="{index}">\n<figcaption><b>{html.escape(chart.title)}</b>'
        f"{html.escape(chart.subtitle)}<ul>{legend}</ul></figcaption>\n"
        f"{draw_svg(chart, notes.add)}\n</figure>"
    )
