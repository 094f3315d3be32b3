# SPDX-License-Identifier: Apache-2.0
"""Draw a simulated step for the HTML report: the passes of each stage in time, and what it spends its time on."""

from __future__ import annotations

from html import escape
from typing import Any

from sporeloom.core.html_report import PALETTE, Series, bars, color, legend, ticks

ROW = 24
PASSES = {
    "forward": Series("forward", PALETTE[0]),
    "backward": Series("backward", PALETTE[1]),
    "weights": Series("gradients of weights", PALETTE[2]),
    "parameters": Series("parameters", PALETTE[4]),
}
"""First word of a pass's name -> how it is drawn."""
OTHER = Series("sums of gradients, update", PALETTE[7])
IDLE = Series("idle", "var(--line)")
KINDS = ("matmul", "attention", "memory", "launch")
"""Kinds of computation in the order of the bars; other kinds and exposed communication follow."""
ZOOM = """for(const box of document.querySelectorAll('.zoom')){const svg=box.querySelector('svg'),
scale=box.querySelector('.scale'),total=+box.dataset.ms,height=svg.viewBox.baseVal.height;let from=0,to=1000;
const draw=()=>{svg.setAttribute('viewBox',`${from} 0 ${to-from} ${height}`);
scale.replaceChildren(...[0,1,2,3,4].map(i=>{const s=document.createElement('span');s.style.left=25*i+'%';
s.textContent=((from+(to-from)*i/4)/1000*total).toPrecision(4)+' ms';return s}))},
zoom=(factor,at)=>{const width=Math.min(1000,Math.max(1,(to-from)*factor)),middle=from+(to-from)*at;
from=Math.min(1000-width,Math.max(0,middle-width*at));to=from+width;draw()},
move=part=>{const by=Math.max(-from,Math.min(1000-to,(to-from)*part));from+=by;to+=by;draw()};
const actions=[['+',()=>zoom(.5,.5)],['\\u2212',()=>zoom(2,.5)],['\\u2190',()=>move(-.25)],['\\u2192',()=>move(.25)],
['whole step',()=>zoom(1000,0)]],names=['zoom in','zoom out','earlier','later','whole step'];
box.prepend(...actions.map(([text,action],i)=>{const b=document.createElement('button');b.textContent=text;
b.setAttribute('aria-label',names[i]);b.onclick=action;return b}));
const at=e=>(e.clientX-svg.getBoundingClientRect().left)/svg.getBoundingClientRect().width;
svg.addEventListener('wheel',e=>{if(e.ctrlKey||e.shiftKey){e.preventDefault();zoom((e.deltaY||e.deltaX)>0?1.25:.8,at(e))}},
{passive:false});let grip=null;svg.onpointerdown=e=>{grip=at(e);svg.setPointerCapture(e.pointerId)};
svg.onpointermove=e=>{if(grip!==null){move(grip-at(e));grip=at(e)}};svg.onpointerup=svg.onpointercancel=()=>{grip=null}}"""


def drawing(time: dict[str, Any]) -> str:
    """Draw a bar for each pass, a row for each stage; a pass is as long as its computation and what it waits for."""
    drawn = []
    for row, stage in enumerate(time["stages"]):
        for name, start, end in stage["passes"]:
            x, width = (1000 * seconds / time["seconds"] for seconds in (start, end - start))
            color = PASSES.get(name.split()[0], OTHER).color
            tip = f"<title>{escape(name)}: {start * 1e3:.2f} to {end * 1e3:.2f} ms</title>"
            drawn.append(
                f"<rect x='{x:.3f}' y='{ROW * row + 2}' width='{width:.3f}' height='{ROW - 4}' fill='{color}'>{tip}</rect>"
            )
    height, milliseconds = ROW * len(time["stages"]), time["seconds"] * 1e3
    labels = "".join(f"<span style='height:{ROW}px'>stage {stage['stage']}</span>" for stage in time["stages"])
    scale = "".join(
        f"<span style='left:{100 * value / milliseconds:.2f}%'>{value:.4g} ms</span>" for value in ticks(milliseconds)
    )
    shown = [series for word, series in PASSES.items() if any(_has(stage, word) for stage in time["stages"])]
    return (
        f"{legend([*shown, OTHER])}<p class='note'>Zoom with the buttons, or the wheel with Ctrl; drag to move.</p>"
        f"<div class='zoom' data-ms='{milliseconds:.6g}'><div class='lanes'><div class='names'>{labels}</div>"
        f"<svg viewBox='0 0 1000 {height}' preserveAspectRatio='none' style='height:{height}px' class='step' role='img' "
        f"aria-label='passes of each stage over the step'>{''.join(drawn)}</svg><span></span>"
        f"<div class='scale'>{scale}</div></div></div>"
    )


def _has(stage: dict[str, Any], word: str) -> bool:
    return any(name.split()[0] == word for name, *_ in stage["passes"])


def breakdown(time: dict[str, Any]) -> str:
    """Draw what each stage spends the step on: computation by kind, communication that nothing hides, waiting."""
    others = sorted({kind for stage in time["stages"] for kind in stage["busy"]} - set(KINDS))
    exposed = sorted({kind for stage in time["stages"] for kind in stage["exposed"]})
    names = [*KINDS, *others, *(f"exposed {kind}" for kind in exposed)]
    series = {name: Series(name, color(number)) for number, name in enumerate(names)}
    rows = []
    for stage in time["stages"]:
        seconds = {**stage["busy"], **{f"exposed {kind}": part for kind, part in stage["exposed"].items()}}
        parts = [(series[name], seconds.get(name, 0.0) * 1e3) for name in names]
        parts.append((IDLE, stage["idle_s"] * 1e3))
        rows.append((f"stage {stage['stage']}", parts, f"{stage['idle_s'] / time['seconds']:.1%} idle"))
    used = [series[name] for name in names if any(name in _names(stage) for stage in time["stages"])]
    return legend([*used, IDLE]) + bars(rows, time["seconds"] * 1e3, lambda value: f"{value:.4g} ms")


def _names(stage: dict[str, Any]) -> set[str]:
    return {*stage["busy"], *(f"exposed {kind}" for kind in stage["exposed"])}
