"""The shell of every page: one HTML file with its style and script in it, for light and dark, wide and narrow screens.

What models and data wrote is a stranger's text: it reaches a page through `escape` alone, and a browser runs no other
script than `SCRIPT`, whose hash the page's own policy names, and loads nothing.
"""

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control codes, halves of surrogate pairs, and what turns the direction of the text that follows."""
MAX_TEXT = 3000  # characters of a text on a page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5d6675; --paper: #fff; --card: #f6f7f9; --rule: #d9dde3;
  --c0: #2563c9; --c1: #c2570c; --c2: #12805c; --c3: #b02a7b; --c4: #6d4fc4; --c5: #8a6a00; --c6: #087f9c;
  --c7: #b3261e; --low: #fff0c2; --lower: #ffd9a0; --lowest: #ffb59e; --good: #12805c; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #9aa4b2; --paper: #14171c; --card: #1d2128;
  --rule: #353c47; --c0: #7aa8ff; --c1: #f2a65a; --c2: #5fd0a5; --c3: #ef8ac6; --c4: #b7a3ff; --c5: #dcc15a;
  --c6: #5fc9e4; --c7: #ff8f85; --low: #3b3414; --lower: #53390f; --lowest: #662b1c; --good: #5fd0a5; --bad: #ff8f85 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 84rem; padding: 1.2rem 1rem 4rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } p { margin: .3rem 0 } .note, small { color: var(--soft) }
pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; margin: .3rem 0;
  padding: .5rem .6rem; background: var(--card); border-radius: 6px; max-height: 24rem; overflow-y: auto }
.wide { overflow-x: auto } table { border-collapse: collapse } td, th { padding: .2rem .7rem; text-align: right;
  border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; vertical-align: top }
td { white-space: nowrap } .words td, td:first-child { white-space: normal; min-width: 8rem }
td:first-child, th:first-child, .words td, .words th { text-align: left; padding-left: 0 }
th { font-weight: 600; color: var(--soft) } td, th { overflow-wrap: normal } .words td { overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0 } dt { color: var(--soft) }
dd { margin: 0 } details { margin: .4rem 0 } summary { cursor: pointer }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
figure { margin: 0; padding: .7rem .8rem; background: var(--card); border-radius: 8px; min-width: 0 }
figcaption { font-weight: 600 } figcaption small { display: block; font-weight: 400 }
svg { display: block; width: 100%; height: auto; touch-action: pan-y } svg text { font: 11px system-ui, sans-serif;
  fill: var(--soft) } .grid { stroke: var(--rule) } .cursor { stroke: var(--soft); stroke-dasharray: 2 2 }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round } .dot, .area, .bar { fill: var(--c) }
.range { fill: var(--c); opacity: .15 } .area { opacity: .85 } .bar { --c: var(--c0) }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; list-style: none; margin: .3rem 0 0; padding: 0;
  font-size: 13px } .legend svg { display: inline-block; width: 28px; height: 8px; margin-right: .4rem }
.s0 { --c: var(--c0) } .s1 { --c: var(--c1) } .s2 { --c: var(--c2) } .s3 { --c: var(--c3) } .s4 { --c: var(--c4) }
.s5 { --c: var(--c5) } .s6 { --c: var(--c6) } .s7 { --c: var(--c7) }
.s1 .line { stroke-dasharray: 7 4 } .s2 .line { stroke-dasharray: 2 3 } .s3 .line { stroke-dasharray: 9 3 2 3 }
.s4 .line { stroke-dasharray: 4 4 } .s5 .line { stroke-dasharray: 12 5 } .s6 .line { stroke-dasharray: 1 4 }
.s7 .line { stroke-dasharray: 9 3 2 3 2 3 }
.row { display: flex; gap: .7rem; overflow-x: auto; padding-bottom: .4rem }
.row > section { flex: 1 0 12rem; max-width: 34rem; min-width: 0 } b { font-weight: 600 }
.good { color: var(--good) } .bad { color: var(--bad) }
@media (max-width: 40rem) { .row > section { flex-basis: 15rem } }
i { font-style: normal } i:hover { outline: 1px solid var(--c0) } .p1 { background: var(--low) }
.p2 { background: var(--lower) } .p3 { background: var(--lowest) }
#tip { position: fixed; z-index: 9; pointer-events: none; white-space: pre; max-width: 94vw; overflow: hidden;
  padding: .3rem .5rem; font: 12px/1.45 system-ui, sans-serif; border-radius: 6px; background: var(--ink);
  color: var(--paper) }
"""

SCRIPT = """
const tip = document.createElement('div');
tip.id = 'tip'; tip.hidden = true; document.body.append(tip);
function show(event, lines) {
  tip.textContent = lines.join('\\n'); tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.left = Math.max(4, left) + 'px'; tip.style.top = Math.max(4, top) + 'px';
}
function hide() { tip.hidden = true; document.querySelectorAll('.cursor').forEach(line => line.setAttribute('x1', -9)
  || line.setAttribute('x2', -9)); }
const nearest = (steps, step) => steps.reduce((best, s, i) => Math.abs(s - step) < Math.abs(steps[best] - step) ? i
  : best, 0);
document.querySelectorAll('svg[data-first]').forEach(svg => {
  const {first, last, left, right} = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
  const lines = [...svg.querySelectorAll('g[data-steps]')].map(g => ({name: g.dataset.name,
    steps: g.dataset.steps.split(',').map(Number), values: g.dataset.values.split(',')}));
  const all = [...new Set(lines.flatMap(line => line.steps))];
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = all[nearest(all, first + (at - left) / (right - left) * (last - first))];
    const x = left + (last > first ? (step - first) / (last - first) : .5) * (right - left);
    svg.querySelector('.cursor').setAttribute('x1', x); svg.querySelector('.cursor').setAttribute('x2', x);
    show(event, ['step ' + step].concat(lines.flatMap(line => { const i = line.steps.indexOf(step);
      return i < 0 ? [] : [line.name + '  ' + line.values[i]]; })));
  });
  svg.addEventListener('pointerleave', hide);
});
document.querySelectorAll('.tokens').forEach(box => {
  const read = text => text ? text.split(',') : [];
  const logProbs = read(box.dataset.logProbs), advantages = read(box.dataset.advantages);
  box.addEventListener('pointerover', event => {
    const token = event.target.closest('i');
    if (!token) return;
    const i = [...box.children].indexOf(token), logProb = logProbs[i];
    const advantage = advantages.length == 1 ? advantages[0] : advantages[i];
    show(event, ['token ' + (Number(box.dataset.first) + i) + ': ' + JSON.stringify(token.textContent)]
      .concat(logProb ? ['log-prob ' + logProb + ', probability ' + Number(Math.exp(logProb).toPrecision(3))] : [])
      .concat(advantage ? ['advantage ' + advantage] : []));
  });
  box.addEventListener('pointerleave', event => event.pointerType == 'mouse' && hide());
});
addEventListener('scroll', hide, {passive: true});
"""


def render(title: str, body: Sequence[str], *, style: str = "") -> str:
    """The page as text: its parts, which are HTML already, below the title, which is not. `style`: what they need
    beside what all pages have."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        f"<script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def escape(text: object) -> str:
    """The text as HTML shows it; what cannot be seen, or misleads the eye, as escapes (\\x1b)."""
    return html.escape(UNSEEN.sub(lambda found: repr(found[0])[1:-1], str(text)))


def cut(text: str, most: int = MAX_TEXT) -> str:
    """The text, without its middle where it is longer. Blank secrets first: of half a one nothing is known."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}\n... {left_out} characters left out ...\n{text[-(most // 2) :]}"


def facts(found: Mapping[str, object]) -> str:
    """Names and what they are, a line each."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in found.items())
    return f"<dl>{rows}</dl>"


def table(header: Sequence[object], rows: Sequence[Sequence[object]], *, words: bool = False) -> str:
    """A table that scrolls where the screen is narrow; numbers stand to the right, `words` to the left."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="wide"><table{kind}><tr>{head}</tr>\n{body}</table></div>'
