"""`report.html`: a run on one page that needs nothing beside it, and `report.png`, its picture."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldline.tracking.figure import draw
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, read_evaluations, read_events, read_steps
from worldline.tracking.numbers import duration, number
from worldline.tracking.summary import Stretch, Summary, summarize

HTML, PNG = "report.html", "report.png"
MAX_ROWS = 200


def write_report(run_dir: Path) -> Path:
    """Write both from the run's logs, as far as they are; gives the path of the page."""
    steps = read_steps(run_dir / STEPS)
    events = read_events(run_dir / EVENTS)
    evaluations = read_evaluations(run_dir / EVALUATIONS)
    summary = summarize(steps, events, evaluations)
    identity = _identity(run_dir)
    name = str(identity.get("name") or identity.get("run") or run_dir.resolve().name)

    picture = run_dir / f".{PNG}.{os.getpid()}"
    draw(picture, name, steps, events, evaluations, summary)
    page = render(name, summary, identity, picture.read_bytes())
    os.replace(picture, run_dir / PNG)
    temporary = run_dir / f".{HTML}.{os.getpid()}"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, run_dir / HTML)
    return run_dir / HTML


def render(name: str, summary: Summary, identity: Mapping[str, Any], picture: bytes) -> str:
    image = base64.b64encode(picture).decode()
    sections = [
        f"<header><h1>{html.escape(name)}</h1><p class=sub>{html.escape(_headline(summary))}</p></header>",
        _cards(summary),
        f'<figure><img alt="Loss and world over the steps" src="data:image/png;base64,{image}"></figure>',
        _time_split(summary),
        _incident_section(summary),
        _stretch_section(summary.stretches),
        _epoch_section(summary),
        _evaluation_section(summary.evaluations),
        _identity_section(summary, identity),
    ]
    return _PAGE.format(title=html.escape(name), body="\n".join(filter(None, sections)))


def _headline(summary: Summary) -> str:
    parts = [summary.outcome, _count(summary.attempts, "attempt"), _count(summary.generations, "generation")]
    if summary.worlds:
        low, high = summary.worlds[0], summary.worlds[-1]
        parts.append(f"world {low}" if low == high else f"world {low} to {high}")
    if summary.elapsed_s is not None:
        parts.append(f"{duration(summary.elapsed_s)} from start to last step")
    return " · ".join(parts)


def _cards(summary: Summary) -> str:
    first, last = number(summary.first_loss), number(summary.last_loss)
    goodput = "-" if summary.goodput is None else f"{summary.goodput:.1%}"
    cards = [
        ("steps", f"{summary.num_steps:,}", f"{summary.num_skipped} skipped" if summary.num_skipped else ""),
        ("rows trained", f"{summary.rows:,}", ""),
        ("last loss", last, f"from {first}"),
        ("rows per second", number(summary.rows_per_s, 0), "while in steps"),
        ("goodput", goodput, "of the time in steps that count"),
        ("incidents", str(len(summary.incidents)), _recovery_note(summary)),
    ]
    inner = "".join(
        f"<div class=card><div class=label>{label}</div><div class=value>{value}</div>"
        f"<div class=note>{note}</div></div>"
        for label, value, note in cards
    )
    return f"<div class=cards>{inner}</div>"


def _recovery_note(summary: Summary) -> str:
    times = [seconds for seconds in summary.resumed_s if seconds is not None]
    return f"next step within {max(times):.2f} s" if times else ""


def _time_split(summary: Summary) -> str:
    if summary.step_s <= 0:
        return ""
    known = {"compute": summary.compute_s, "reduce": summary.reduce_s, "data": summary.data_s}
    known["other"] = max(summary.step_s - sum(known.values()), 0.0)
    whole = sum(known.values())
    known = {part: seconds for part, seconds in known.items() if seconds >= 0.0005 * whole}
    bar = "".join(
        f'<div class="part {part}" style="width:{seconds / whole:.3%}"></div>'
        for part, seconds in known.items()
    )
    legend = "".join(
        f'<span><i class="part {part}"></i>{part} {seconds / whole:.1%} ({seconds:.1f} s)</span>'
        for part, seconds in known.items()
    )
    return f"<h2>Where a step's time went</h2><div class=bar>{bar}</div><div class=legend>{legend}</div>"


def _incident_section(summary: Summary) -> str:
    if not summary.incidents:
        return "<h2>Incidents</h2><p>None.</p>"
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident.event.time)),
            incident.event.kind.value.replace("_", " "),
            incident.event.step,
            " ".join(incident.event.workers),
            "" if incident.recovery_s is None else f"{incident.recovery_s:.3f} s",
            "" if resumed_s is None else f"{resumed_s:.3f} s",
            incident.event.reason,
        )
        for incident, resumed_s in zip(summary.incidents, summary.resumed_s, strict=True)
    ]
    head = ("time (UTC)", "what", "#after step", "worker", "#regrouped in", "#next step done in", "reason")
    return "<h2>Incidents</h2>" + _table(head, rows)


def _stretch_section(stretches: Sequence[Stretch]) -> str:
    if not stretches:
        return ""
    rows = [
        (
            f"{s.attempt}.{s.generation}",
            f"{s.first:,} to {s.last:,}",
            s.world,
            f"{s.step_s:.3f} s",
            f"{s.rows_per_s:,.0f}",
        )
        for s in stretches
    ]
    head = ("attempt.generation", "#steps", "#workers", "#median step", "#rows/s")
    return "<h2>Generations</h2>" + _table(head, rows)


def _epoch_section(summary: Summary) -> str:
    if not summary.epochs:
        return ""
    rows = [(epoch.epoch, f"{epoch.steps:,}", f"{epoch.rows:,}") for epoch in summary.epochs]
    note = (
        "<p class=sub>Each row is trained exactly once an epoch. <code>worldline audit</code> proves it: it "
        "holds the digest of the rows that each step trained against the plan. The last epoch may be under "
        "way.</p>"
    )
    return "<h2>Rows</h2>" + note + _table(("#epoch", "#steps", "#rows"), rows)


def _evaluation_section(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return ""
    names = sorted({name for evaluation in evaluations for name in evaluation["metrics"]})
    rows = [
        (
            e["step"],
            f"{e['rows']:,}",
            *(_metric(e["metrics"].get(name)) for name in names),
            f"{e['seconds']:.2f}",
        )
        for e in evaluations
    ]
    head = ("#after step", "#rows", *(f"#{name}" for name in names), "#seconds")
    return "<h2>Validation</h2>" + _table(head, rows)


def _identity_section(summary: Summary, identity: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str]] = []
    if summary.final_digest is not None:
        step, digest = summary.final_digest
        rows.append((f"state digest after step {step}", digest))
    if "job_digest" in identity:
        rows.append(("job digest", str(identity["job_digest"])))
    settings = identity.get("identity")
    if isinstance(settings, Mapping):
        rows += [(str(key), str(value).strip('"')) for key, value in settings.items()]
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{html.escape(key)}</td><td><code>{html.escape(value)}</code></td></tr>"
        for key, value in rows
    )
    return (
        "<h2>Identity</h2><p class=sub>What decides the numbers, as far as the job differs from the defaults."
        f"</p><div class=scroll><table class=facts><tbody>{body}</tbody></table></div>"
    )


def _table(head: Sequence[str], rows: Sequence[Iterable[object]]) -> str:
    """A column whose name begins with # holds numbers."""
    numeric = [name.startswith("#") for name in head]
    cells = "".join(
        f"<th{' class=n' if right else ''}>{html.escape(name.lstrip('#'))}</th>"
        for name, right in zip(head, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if right else ''}>{html.escape(str(value))}</td>"
            for value, right in zip(row, numeric, strict=True)
        )
        + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    more = f"<p class=sub>and {len(rows) - MAX_ROWS:,} more in the log</p>" if len(rows) > MAX_ROWS else ""
    return (
        f"<div class=scroll><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>{more}"
    )


def _metric(value: float | None) -> str:
    return "" if value is None else str(value) if not math.isfinite(value) else f"{value:.5g}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _identity(run_dir: Path) -> dict[str, Any]:
    try:
        identity: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    except FileNotFoundError:
        return {}
    return identity


_PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ --ink: #1b1f24; --muted: #6a737d; --line: #e6e8eb; --soft: #f6f8fa; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1040px; padding: 40px 24px 64px; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }}
h2 {{ font-size: 17px; margin: 40px 0 10px; }}
p {{ margin: 0 0 10px; }}
.sub, .note, .label {{ color: var(--muted); }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 24px 0; }}
.card {{ background: var(--soft); border-radius: 10px; padding: 12px 14px; }}
.label, .note {{ font-size: 12.5px; min-height: 1.5em; }}
.value {{ font-size: 24px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }}
figure {{ margin: 0; }}
img {{ width: 100%; height: auto; display: block; }}
.bar {{ display: flex; height: 18px; border-radius: 6px; overflow: hidden; background: var(--soft); }}
.part {{ height: 100%; }}
.compute {{ background: #1f5fbf; }} .reduce {{ background: #7aa5e0; }}
.data {{ background: #e0a63f; }} .other {{ background: #c9ced6; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 22px; margin-top: 8px; font-size: 13.5px; }}
.legend i {{ display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; min-width: 320px; }}
th {{ text-align: left; font-weight: 600; color: var(--muted); font-size: 12.5px; }}
th, td {{ padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
table:not(.facts) td:nth-child(-n+2) {{ white-space: nowrap; }}
.n {{ text-align: right; white-space: nowrap; }}
.facts td:first-child {{ color: var(--muted); white-space: nowrap; }}
code {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }}
@media print {{ body {{ padding: 0; }} .card {{ border: 1px solid var(--line); }} }}
</style></head><body>
{body}
</body></html>
"""
