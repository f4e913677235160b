"""A plan as one HTML file that needs no other: facts, tables and pictures, in light and in dark. Called by the verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from lmtrain.cli import plan_drawings as draw
from lmtrain.cli import plan_view as view
from lmtrain.cli.pipeline_picture import timeline
from lmtrain.cli.planned_run import Found
from lmtrain.plan.answers import why_slower

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6776; --paper: #fff; --line: #d9dee6; --fits: #2f6fb5;
  --best: #12805c; --unfit: #eef0f3; --idle: #eef0f3; --limit: #c22f2f; --band: #2f6fb533; --plain: #b3650b;
  --c1: #2f6fb5; --c2: #6aa5dd; --c3: #a9cbea; --c4: #12805c; --c5: #66b894; --c6: #d9a514; --c7: #8d62b8;
  --c8: #8b95a3; --c9: #c3c9d2; --c10: #d6e6f5; --c11: #c46f9f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf1; --soft: #9aa5b5; --paper: #14181e; --line: #303844;
  --fits: #5b9be0; --best: #35b98a; --unfit: #20262e; --idle: #20262e; --limit: #ff7066; --band: #5b9be033;
  --plain: #e59a45; --c1: #5b9be0; --c2: #3c6ea6; --c3: #284a70; --c4: #35b98a; --c5: #237a5c; --c6: #d9b13b;
  --c7: #a884d0; --c8: #76818f; --c9: #4a5360; --c10: #1b2f47;
  --c11: #d58ab3; } }
body { margin: 2rem auto; max-width: 1080px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; } p { margin: .3rem 0 .8rem; }
.soft, th, dt { color: var(--soft); }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .15rem 1rem; } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: .2rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th.word, td.word { text-align: left; } th { font-weight: 500; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; } svg text { fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .small { font-size: 11.5px; }
.fits { fill: var(--fits); } .best { fill: var(--best); }
.unfit { fill: var(--unfit); } .idle { fill: var(--idle); } .grid { stroke: var(--line); }
.limit { stroke: var(--limit); stroke-width: 2; stroke-dasharray: 5 3; } .band { fill: var(--band); }
polyline { fill: none; stroke: var(--fits); stroke-width: 2.5; } circle { fill: var(--fits); }
polyline.plain { stroke: var(--plain); } circle.plain { fill: var(--plain); }
.p-F { fill: var(--c1); } .p-B, .p-I { fill: var(--c4); } .p-W { fill: var(--c6); }
.m-weights { fill: var(--c1); } .m-gradients { fill: var(--c2); } .m-masters { fill: var(--c3); }
.m-moments { fill: var(--c10); } .m-messages { fill: var(--c11); }
.m-activations { fill: var(--c4); } .m-working { fill: var(--c5); } .m-logits { fill: var(--c6); }
.m-gathered { fill: var(--c7); } .m-communicators { fill: var(--c8); } .m-slack { fill: var(--c9); }
"""
_MOST_BARS = 5


def page(found: Found) -> str:
    parts = "\n".join(_parts(found))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width">\n<title>{escape(view.title(found))}</title>\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{parts}\n</body>\n</html>\n"
    )


def _parts(found: Found) -> Iterator[str]:
    first = found.first
    yield f"<h1>{escape(view.title(found))}</h1>"
    yield _facts(view.facts(found))
    if first is not None:
        yield _section("The best", "")
        yield _facts(view.of_best(found, first))
        yield _section(
            "Layouts, fastest first", "80%: four runs of five take so long. Bare: time in which ranks only communicate."
        )
        yield _table([view.row(found, at, one, True) for at, one in enumerate(found.best, 1)])
        for at, one in enumerate(found.best[1:3], 2):
            yield f"<p>{at} is {one.seconds / first.seconds - 1:.1%} slower: {escape(why_slower(one, first))}.</p>"
    yield _section(
        "Map",
        "The fastest step for each number of stages (pp) and cuts (tp), and its MFU; grey: what the smallest needs.",
    )
    yield draw.layouts_map(found.cells, first, view.step_time)
    yield _section(
        "Memory of the fullest rank", "The best layouts, and below them what would be faster or misses by least."
    )
    yield draw.memory_bars(found.best[:_MOST_BARS], found.too_large, view.layout_of)
    if first is not None and first.run.parallel.pp > 1:
        parallel, count = first.run.parallel, timeline(first)[1]
        few = f", shown with {count} of {first.run.num_microbatches} microbatches" * (
            count < first.run.num_microbatches
        )
        yield _section("Pipeline", f"{parallel.schedule}, {parallel.pp} ranks with {parallel.vp} stages each{few}.")
        yield draw.pipeline(first)
    if sum(point.best is not None for point in found.points) > 1:
        yield _section("More GPUs", "Tokens a second and GPU. The band holds four runs of five.")
        yield draw.scaling(found.points)
        yield _table([*map(view.row_of, found.points)])
        yield from (f"<p>{escape(line)}.</p>" for line in view.takeovers(found.points))
    yield '<p class="soft">Predicted by lmtrain plan. Joules are unverified, and of GPUs alone.</p>'


def _section(title: str, said: str) -> str:
    return f"<h2>{escape(title)}</h2>" + (f'<p class="soft">{escape(said)}</p>' if said else "")


def _facts(lines: Iterator[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"


def _table(rows: Sequence[view.Cells]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row))
    kinds = {title: ' class="word"' if title.startswith("<") else "" for title in titles}
    head = "".join(f"<th{kinds[title]}>{escape(title.lstrip('<'))}</th>" for title in titles)
    lines = ["".join(f"<td{kinds[title]}>{escape(row.get(title, ''))}</td>" for title in titles) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
