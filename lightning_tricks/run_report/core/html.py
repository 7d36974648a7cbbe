"""Pieces of an HTML page; every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from lightning_tricks.run_report.core.record import Finding
from lightning_tricks.run_report.core.record_file import PAGE_MARK
from lightning_tricks.run_report.core.svg import Line

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_MOST_FOLDED = 60
_MOST_PICTURE_BYTES = 200_000
_STYLE = """
:root{--ink:#1d2329;--soft:#5b6570;--line:#d9dee3;--back:#fff;--pale:#f5f7f9;--warm:#fdf3ec;color-scheme:light;
--bad:#a84300;--bar:#c9d1d8;--axis:#818a93;--right:#0072b2;--wrong:#d55e00;--cell:#000;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a3527f;--c4:#3d9bd1;--c5:#b07a00;--c6:#444b52}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#a3adb8;--line:#343c45;--back:#14181d;
--pale:#1d2329;--warm:#33241a;color-scheme:dark;
--bad:#ff9d63;--bar:#4a545e;--axis:#7a8591;--right:#0072b2;--wrong:#b54f00;--cell:#fff;
--c0:#5ab4ee;--c1:#f28e4a;--c2:#3ccb9c;--c3:#dc8fbb;--c4:#b7a6ff;--c5:#e3b341;--c6:#bcc4cc}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:1160px;margin:0 auto;padding:36px 32px 64px}
h1{font-size:27px;line-height:1.25;margin:0 0 2px;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:42px 0 12px;font-weight:650;letter-spacing:-.005em}
h3{font-size:14px;margin:0 0 6px;font-weight:600;overflow-wrap:anywhere}
p{margin:0 0 8px}.soft,small{color:var(--soft)}small{font-size:13px}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:22px 0 4px;padding:0;list-style:none}
.tiles li{flex:1 1 128px;background:var(--pale);border-radius:8px;padding:10px 14px;min-width:0}
.tiles b{display:block;font-size:21px;line-height:1.3;font-weight:620;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.findings{list-style:none;margin:0;padding:0}
.findings li{position:relative;padding:9px 14px 9px 40px;border-left:3px solid var(--line);background:var(--pale);
margin-bottom:6px;border-radius:0 8px 8px 0;break-inside:avoid}
.findings li::before{content:"i";position:absolute;left:13px;top:11px;width:17px;height:17px;border-radius:50%;
background:var(--soft);color:var(--back);font:700 11px/17px Georgia,serif;text-align:center}
.findings li.warning{border-color:var(--c1);background:var(--warm)}
.findings li.warning::before{content:"!";background:var(--c1);font-family:inherit}
.two{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:26px 34px}
.stack{display:grid;gap:26px;align-content:start;min-width:0}
figure{margin:0;min-width:0;break-inside:avoid}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;margin-bottom:4px}
figcaption h3{margin:0}.key{font-size:13px;color:var(--soft);white-space:nowrap}
.key i{display:inline-block;width:16px;height:0;border-top:3px solid;vertical-align:middle;margin-right:5px}
.key.faint i{opacity:.35}
.key.ring i{width:11px;height:11px;border:1.5px solid var(--soft);border-radius:50%;margin-right:4px}
.key.d1 i{border-top-style:dashed}.key.d2 i{border-top-style:dotted}.key.d3 i{border-top-style:double}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--soft)}
svg text.label,.at text{paint-order:stroke;stroke:var(--back);stroke-width:4px;stroke-linejoin:round}
svg text.light{fill:#fff}svg text.dark{fill:var(--cell)}
.at path{fill:transparent}.at text{visibility:hidden;pointer-events:none;fill:var(--ink);stroke-width:8px;
font-variant-numeric:tabular-nums}.at.end text{text-anchor:end}
.at:hover path{fill:var(--soft);fill-opacity:.2}.at:hover text{visibility:visible}
.grid{stroke:var(--line);stroke-width:.8}.axis{stroke:var(--axis);stroke-width:1}
.rule{stroke:var(--soft);stroke-width:1;stroke-dasharray:5 4}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.line.faint{stroke-width:1;opacity:.35}
.d1{stroke-dasharray:7 3}.d2{stroke-dasharray:2 3}.d3{stroke-dasharray:9 3 2 3}
.band{opacity:.16;stroke:none!important}.dot{stroke:var(--back)!important;stroke-width:.7;stroke-dasharray:none}
.best{fill:none!important;stroke-width:1.5;stroke-dasharray:none}.mark{fill:var(--c1)}
.weight{fill:var(--bar)}.cell{stroke:var(--line);stroke-width:.6}.right{fill:var(--right)}.cell.wrong{fill:var(--wrong)}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
th{font-weight:600;color:var(--soft);overflow-wrap:break-word}td.number,th.number{text-align:right;white-space:nowrap}
td:first-child{color:var(--soft);overflow-wrap:break-word}
table+*,details+table{margin-top:12px}details+.two{margin-top:18px}tr.differs td{background:var(--warm)}
details{margin-top:10px}summary{cursor:pointer;color:var(--c0)}
pre{background:var(--pale);border-radius:8px;padding:12px 14px;overflow-x:auto;font:12.5px/1.45 ui-monospace,
SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.gallery{display:flex;flex-wrap:wrap;gap:14px}.gallery figure{width:112px}
.gallery img{width:112px;height:112px;object-fit:contain;image-rendering:pixelated;background:var(--pale);
border-radius:6px;display:block}.gallery figcaption{font-size:12.5px;color:var(--soft);margin-top:4px}
.gallery .wrong figcaption{color:var(--bad)}
"""
_STYLE += "".join(
    f".c{n}{{stroke:var(--c{n})}}.dot.c{n},.band.c{n}{{fill:var(--c{n})}}.k{n} i{{border-color:var(--c{n})}}"
    for n in range(7)
)
_OTHER_SIZES = """
@media(max-width:600px){main{padding:20px 16px 48px}svg text{font-size:16px}table{display:block;overflow-x:auto}
td+td:not(.number){min-width:7em}.facts td+td:not(.number){min-width:12em}}
@page{margin:14mm}
@media print{.at{display:none}main{max-width:none;padding:0}body{font-size:12px}
.two{grid-template-columns:1fr 1fr;gap:16px 22px}
h2{margin-top:24px;break-after:avoid}pre{white-space:pre-wrap}tr{break-inside:avoid}}
"""


def page(title: str, body: Sequence[str], refresh: bool = False) -> str:
    """Return a whole page, which loads nothing, neither from a network nor from a disk."""
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta name="generator" content="{PAGE_MARK}">',
        # a second protection, beside the escaping of texts
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">',
        '<meta http-equiv="refresh" content="30">' * refresh,
        f"<title>{escape(title)}</title><style>{_STYLE}{_OTHER_SIZES}</style>",
    ]
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n<body><main>\n' + "\n".join(
        (*body, "</main></body></html>\n")
    )


def section(title: str, parts: Sequence[str]) -> str:
    """Return a section, or "" if it has no parts."""
    inside = _lines(parts)
    return f"<section><h2>{escape(title)}</h2>\n{inside}</section>" if inside else ""


def side_by_side(parts: Sequence[str], kind: str = "two") -> str:
    """Return parts in two columns, or "" if there are none."""
    inside = _lines(parts)
    return f'<div class="{kind}">{inside}</div>' if inside else ""


def stacked(parts: Sequence[str]) -> str:
    """Return parts below each other in one column."""
    return side_by_side(parts, "stack")


def _lines(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part)


def figure(title: str, picture: str, lines: Sequence[Line] = (), note: str = "") -> str:
    """Return a picture with its title and a legend of its lines, and of the ring around the best value."""
    keys = [
        f'<span class="key k{line.color}{" faint" * line.is_faint}{f" d{line.dash}" * bool(line.dash)}"><i></i>'
        f"{escape(line.label)}</span>"
        for line in lines
        if line.label
    ]
    if any(line.best is not None for line in lines):
        keys.append('<span class="key ring"><i></i>best</span>')
    below = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3>{''.join(keys)}</figcaption>{picture}{below}</figure>"


def facts_table(facts: Sequence[tuple[str, str]], title: str = "") -> str:
    """Return a table of names and texts, or "" if there are none."""
    if not facts:
        return ""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    names = (escape(name).replace("_", "_<wbr>") for name, _ in facts)  # where a narrow column may break them
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(text)}</td></tr>" for name, (_, text) in zip(names, facts, strict=True)
    )
    return f'<div>{heading}<table class="facts">{rows}</table></div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = (), texts: int = 1) -> str:
    """Return a table whose first `texts` columns are texts and the others numbers."""
    classes = [' class="number"' * (place >= texts) for place in range(len(columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(classes, columns, strict=True))
    lines = []
    for place, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{escape(text)}</td>" for kind, text in zip(classes, row, strict=True))
        lines.append(f"<tr{' class=differs' if marked and marked[place] else ''}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def folded(summary: str, inside: str) -> str:
    """Return content that is shown only when it is opened."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>" if inside else ""


def first_and_folded(pictures: Sequence[str], most: int) -> str:
    """Return the first pictures in two columns, and below them at most 60 more that are folded."""
    others = pictures[most : most + _MOST_FOLDED]
    left_out = len(pictures) - most - len(others)
    note = f", and {left_out:,} that are not shown" if left_out > 0 else ""
    summary = f"{len(others)} more curve{'s' * (len(others) > 1)}{note}"
    return side_by_side(pictures[:most]) + folded(summary, side_by_side(others))


def findings_list(findings: Sequence[Finding]) -> str:
    """Return findings as a list, or "" if there are none."""
    items = "".join(f'<li class="{finding.level}">{escape(finding.text)}</li>' for finding in findings)
    return f'<ul class="findings">{items}</ul>' if items else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def preformatted(text: str) -> str:
    """Return text with its line breaks and columns."""
    return f"<pre>{escape(text)}</pre>"


def gallery(pairs: Sequence[tuple[str, str]]) -> str:
    """Return pictures, given as a caption and the base64 of a PNG file each; a caption with "!" is a mistake."""
    shown = []
    for caption, picture in pairs:
        if (
            len(picture) > _MOST_PICTURE_BYTES
            or not _BASE64.fullmatch(picture)
            or not picture.startswith("iVBORw0KGgo")
        ):
            continue
        words = escape(caption.removeprefix("!"))
        kind = ' class="wrong"' if caption.startswith("!") else ""
        image = f'<img alt="{words}" src="data:image/png;base64,{picture}">'
        shown.append(f"<figure{kind}>{image}<figcaption>{words}</figcaption></figure>")
    return f'<div class="gallery">{"".join(shown)}</div>' if shown else ""
