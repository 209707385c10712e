"""Explore: a local page on which a question to the planner is changed and its ranking follows."""

from __future__ import annotations

import hmac
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from trimaran.api import DEFAULT_STACK, plan, usual_stack
from trimaran.cost.effects.time_effects import TIME_PARTS
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model
from trimaran.layout.axes import DEGREES
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.plan import Plan
from trimaran.planner.search.settings import fixed_choices
from trimaran.report import appearance
from trimaran.report.planned import FIELDS, explanation, records
from trimaran.report.tables import Field

if TYPE_CHECKING:
    from dash import Dash

HOST = "127.0.0.1"
TOP = 20
# Characters of a layout in a line beside its bar.
LINE = 38
# Plans kept, so that going back to an earlier question costs nothing.
KEPT = 64
# Seconds without another change after which a question is asked: an arrow key that is held down makes one question.
SETTLED = 0.03
# Dash takes a quarter of a second to make a component of every cell, the browser a few milliseconds to read a table.
SHOW = """told => {
    document.getElementById("answer").innerHTML = told.answer;
    fitAnswer();
    drawLegend(told.parts);
    const look = chartLook(cssColor), ours = told.parts.layout;
    const axes = { xaxis: { ...look.xaxis, ...ours.xaxis }, yaxis: { ...look.yaxis, ...ours.yaxis } };
    return { ...told.parts, layout: { ...look, ...ours, ...axes } };
}"""
# What is shown of the plan's columns: those that decide first.
FIRST = ("rank", "sec_per_it", "between", "mem_gib", "tflops", "mfu")
# Those that are shown though all rows agree; what else is the same in every row says nothing.
ALWAYS = (*FIRST, *DEGREES, "mbs", "notes")


class Question(NamedTuple):
    """What the page asks the planner; hashable, so that an answer can be kept."""

    model: str
    cluster: str
    stack: str
    gbs: int
    devices: int | None
    seq: int | None
    fix: str
    mem_margin: float


# The chart before the first answer: Plotly's own has axes without bars on white paper, in the dark too.
CLEAR = "rgba(0,0,0,0)"
BLANK = {
    "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}, "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR}
}


@lru_cache(maxsize=KEPT)
def answer(question: Question) -> Plan:
    """The plan for a question. Raises TrimaranError, one line, where there is none."""
    return plan(
        question.model,
        question.cluster,
        question.gbs,
        devices=question.devices,
        seq=question.seq,
        stack=question.stack,
        fix=fixed_choices(question.fix.split()),
        mem_margin=question.mem_margin,
        top=TOP,
    )


def explore_app(model: str, cluster: str, gbs: int, token: str) -> Dash:
    """The page's server, opening with this model on this cluster, for who has the token.

    It plans with the catalogue's nouns and with the two that it opens with, which may be files, and reads no other.
    Raises TrimaranError where Dash is missing.
    """
    try:
        from dash import Dash, Input, Output
    except ImportError:
        raise TrimaranError("explore needs Dash, which is not installed: pip install 'trimaran[explore]'") from None
    load_model(model)
    load_cluster(cluster)
    app = Dash("trimaran", title="Trimaran explore", update_title="", serve_locally=True)
    app.index_string = app.index_string.replace("{%css%}", f"{{%css%}}{_look()}").replace("<html>", '<html lang="en">')
    _only_for_who_has(app, token)
    known = {"model": model, "cluster": cluster}
    app.layout = _controls(model, cluster, gbs)
    ids = Question._fields

    @app.callback(Output("told", "data"), [Input(name, "value") for name in ids])
    def follow(*values: Any) -> dict[str, Any]:
        try:
            plan = answer(question_of(dict(zip(ids, values, strict=True)), known))
        except TrimaranError as error:
            return {"answer": f'<p role="alert" class="refused">{escape(str(error))}</p>', "parts": _chart([])}
        return {"answer": _answered(plan), "parts": _parts(plan)}

    app.clientside_callback(SHOW, Output("parts", "figure"), Input("told", "data"), prevent_initial_call=True)
    return app


def _look() -> str:
    """Style and script of the page's head."""
    here = files("trimaran.report")
    own_style, own_script = (here.joinpath(f"explore.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return f"<style>{appearance.style()}{own_style}</style><script>{appearance.script()}{own_script}</script>"


def _only_for_who_has(app: Dash, token: str) -> None:
    """Refuse requests without the token: every user of this machine reaches its loopback.

    The address that is opened first has it; from then on the browser keeps it in a cookie. Requests under another name
    are refused too: a page elsewhere may point its own name at the loopback.
    """
    from flask import Response, abort, request

    def cookie() -> str:
        return f"trimaran-{request.host.rpartition(':')[2]}"

    def check() -> None:
        if request.host.rsplit(":", 1)[0] not in (HOST, "localhost"):
            abort(403)
        given = request.args.get("token") or request.cookies.get(cookie()) or ""
        if not hmac.compare_digest(given.encode(), token.encode()):
            abort(403, "open the address that `trimaran explore` printed: its token is missing or of another run")

    def keep(response: Response) -> Response:
        if request.args.get("token") and response.status_code < 400:
            response.set_cookie(cookie(), token, httponly=True, samesite="Strict")
        return response

    app.server.before_request(check)
    app.server.after_request(keep)


def question_of(values: dict[str, Any], known: Mapping[str, str]) -> Question:
    """The question that the page's fields state, of the catalogue's nouns and those `known` by their field.

    Raises TrimaranError for another noun, and for a field that is empty or no number.
    """
    for name in ("model", "cluster", "stack"):
        if values.get(name) not in (*catalogue_names(f"{name}s"), known.get(name, DEFAULT_STACK)):
            raise TrimaranError(
                f"{name} {quoted(values.get(name))} is neither of the catalogue nor what explore was started with: "
                f"choose another"
            )
    if not isinstance(values.get("fix") or "", str):
        raise TrimaranError(f"fixed choices are {quoted(values['fix'])}, expected text such as tp=8")
    if not values.get("gbs"):
        raise TrimaranError("global batch is empty: state how many sequences a step has")
    try:
        return Question(
            model=values["model"],
            cluster=values["cluster"],
            stack=values["stack"],
            gbs=_whole(values["gbs"]),
            devices=_whole(values["devices"]) if values["devices"] else None,
            seq=_whole(values["seq"]) if values["seq"] else None,
            fix=values["fix"] or "",
            mem_margin=float(values["mem_margin"] or 0) / 100,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise TrimaranError(f"a field holds no number ({error}): correct it") from None


def _whole(value: Any) -> int:
    """A field's number. Raises ValueError where it has a fraction, which would be dropped."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value:g} is not whole")
    return int(value)


def _controls(model: str, cluster: str, gbs: int) -> Any:
    from dash import dcc, html

    def choice(name: str, title: str, kind: str, chosen: str) -> Any:
        names = sorted({*catalogue_names(kind), chosen})
        field = dcc.Dropdown(names, chosen, id=name, clearable=False)
        return html.Div([html.Label(title, htmlFor=name), field], className="field")

    def entry(name: str, title: str, value: Any, **more: Any) -> Any:
        field = dcc.Input(value=value, id=name, debounce=SETTLED, **more)
        return html.Div([html.Label(title, htmlFor=name), field], className="field")

    fields = [
        choice("model", "Model", "models", model),
        choice("cluster", "Cluster", "clusters", cluster),
        choice("stack", "Software", "stacks", usual_stack(load_cluster(cluster))),
        entry("gbs", "Global batch, sequences", gbs, type="number", min=1),
        entry("devices", "Devices at most", None, type="number", min=1, placeholder="all"),
        entry("seq", "Sequence length, tokens", None, type="number", min=1, placeholder="the model's"),
        entry("fix", "Hold fixed", "", type="text", placeholder="tp=8 recompute=full"),
        entry("mem_margin", "Memory left free, %", 5, type="number", min=0, max=90),
    ]
    return html.Div(
        [
            html.H1("Trimaran explore"),
            html.Div(fields, className="fields"),
            dcc.Store(id="told"),
            html.Main(
                [
                    html.Section("Planning ...", id="answer"),
                    html.H2("Where the time goes"),
                    html.Ul(id="legend", className="legend"),
                    dcc.Graph(id="parts", figure=BLANK, config={"displayModeBar": False}, responsive=True),
                ]
            ),
        ]
    )


def _answered(plan: Plan) -> str:
    """The ranking and what is to be said about it, as HTML."""
    rows = records(plan)
    first = [field for key in FIRST for field in FIELDS if field.key == key]
    fields = [*first, *(field for field in FIELDS if field.key not in FIRST)]
    shown = [field for field in fields if _tells(field, rows)]
    head = "".join(f'<th scope="col"{_kind(field)}>{escape(field.title)}</th>' for field in shown)
    body = "".join(f"<tr>{''.join(_cell(field, row) for field in shown)}</tr>" for row in rows)
    sentences = "".join(f"<li>{_breakable(line)}</li>" for line in explanation(plan).splitlines())
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"{table}<ul>{sentences}</ul>"


def _tells(field: Field, rows: Sequence[Mapping[str, Any]]) -> bool:
    texts = {field.show(row) for row in rows}
    return bool(texts - {""}) and (len(texts) > 1 or field.key in ALWAYS)


def _cell(field: Field, row: Mapping[str, Any]) -> str:
    return f'<td data-title="{escape(field.title)}"{_kind(field)}>{escape(field.show(row))}</td>'


def _kind(field: Field) -> str:
    return ' class="left text"' if field.key == "notes" else ' class="left"' if field.left else ""


def _breakable(text: str) -> str:
    """Text that goes on in the next line behind a comma, where a layout is too long for one."""
    return escape(text).replace(",", ",<wbr>")


def _bar_name(rank: int, layout: str) -> str:
    """A rank and its layout in two lines, since it would take the chart's width; a long stage split loses its end."""
    lines = textwrap.wrap(f"{rank}. {layout}".replace(",", ", "), LINE, max_lines=2, placeholder="\u2026")
    return "<br>".join(line.replace(", ", ",") for line in lines)


def _parts(plan: Plan) -> dict[str, Any]:
    """Predicted seconds of the ranked layouts, by part."""
    labels = [_bar_name(entry.rank, str(entry.layout)) for entry in plan.entries]
    bars = []
    for part in TIME_PARTS:
        seconds = [getattr(entry.estimate.time, part) for entry in plan.entries]
        if any(seconds):
            bars.append(
                {"type": "bar", "name": part, "y": labels, "x": seconds, "orientation": "h"}
                | {"marker": {"color": appearance.color_of_part(part)}}
            )
    return _chart(bars, height=60 + 32 * len(labels))


def _chart(bars: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A Plotly figure as the browser reads it; Plotly's own objects take 0.1 s to check it."""
    return {
        "data": bars,
        "layout": {
            "barmode": "stack",
            "showlegend": False,
            "margin": {"l": 8, "r": 12, "t": 10, "b": 44},
            "xaxis": {"title": {"text": "predicted s/it"}},
            "yaxis": {"autorange": "reversed", "tickfont": {"size": 9}},
            **more,
        },
    }
