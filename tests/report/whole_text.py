"""Which text of a page a reader cannot read: cut off, beside the window, or under something else."""

import time
from typing import Literal

from playwright.sync_api import Page

SIZES = (400, 800, 1400)
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
# What a chart is given to follow its window, which it does a moment after it.
SETTLES_S = 5.0

# Every run of text must lie within the window and within all that clips it, and be what is found at its middle.
UNREADABLE = """() => {
  const told = [], boxes = [], slack = 1.5, svg = (one) => one.namespaceURI.endsWith("svg");
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const holder = node.parentElement, text = node.textContent.trim();
    if (!text || holder.closest("script, style, noscript, option, .skip, .hoverlayer")) continue;
    if (!holder.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width && box.height)
        boxes.push({ holder, text: text.slice(0, 60), box, y: box.top + box.height / 2 + scrollY });
  }
  const frames = new Map();
  const clipsOf = (one) => {
    if (!one || one === document.body) return [];
    if (!frames.has(one)) {
      const style = getComputedStyle(one), clip = { frame: one.getBoundingClientRect() };
      clip.x = style.overflowX !== "visible";
      clip.y = style.overflowY !== "visible";
      const none = style.display === "inline" || (svg(one) && one.tagName !== "svg") || !(clip.x || clip.y);
      frames.set(one, [...(none ? [] : [clip]), ...clipsOf(one.parentElement)]);
    }
    return frames.get(one);
  };
  for (const { holder, text, box } of boxes) {
    if (box.left < -slack || box.right > innerWidth + slack) told.push(`outside the window: ${text}`);
    for (const { frame, x, y } of clipsOf(holder)) {
      if (x && (box.left < frame.left - slack || box.right > frame.right + slack)) told.push(`cut at a side: ${text}`);
      // of a line box the letters fill the middle
      if (y && (box.top < frame.top - 4 || box.bottom > frame.bottom + 4)) told.push(`cut above or below: ${text}`);
    }
  }
  // a chart catches the pointer above its own text
  const page = boxes.filter(({ holder }) => !svg(holder)).sort((a, b) => a.y - b.y);
  for (let next = 0; next < page.length; ) {
    scrollTo(0, page[next].y - 2);
    const first = next;
    for (; next < page.length && page[next].y - scrollY < innerHeight - 1; next++) {
      const { holder, text, box, y } = page[next];
      const found = document.elementFromPoint((box.left + box.right) / 2, y - scrollY);
      if (!found || !(found.contains(holder) || holder.contains(found)))
        told.push(`under ${found?.tagName}.${found?.className}: ${text}`);
    }
    if (next === first) throw new Error(`cannot be scrolled to: ${page[next].text}`);
  }
  scrollTo(0, 0);
  for (const one of document.querySelectorAll("input, button, select"))
    if (one.checkVisibility() && one.scrollWidth > one.clientWidth + slack)
      told.push(`cut: ${one.id || one.textContent}`);
  for (const plot of document.querySelectorAll(".plot:has(.main-svg)")) {
    const place = plot.getBoundingClientRect(), drawn = plot.querySelector(".main-svg").getBoundingClientRect();
    if (plot.checkVisibility() && (drawn.right > place.right + slack || drawn.bottom > place.bottom + slack))
      told.push(`a chart that goes beyond its place: ${plot.id}`);
  }
  const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
  for (const chart of document.querySelectorAll(".main-svg")) {
    const texts = [...chart.querySelectorAll(".ytick text, .xtitle, .ytitle")];
    const placed = texts.map((one) => [one.textContent, one.getBoundingClientRect()]);
    for (const [i, [name, box]] of placed.entries())
      for (const [other, beside] of placed.slice(i + 1))
        if (shared(box, beside, "left", "right") > 3 && shared(box, beside, "top", "bottom") > 4)
          told.push(`over one another: ${name} and ${other}`);
  }
  return told;
}"""


def unreadable(page: Page, width: int, scheme: Scheme) -> list[str]:
    """What cannot be read of the whole page in a window of this width, in light or dark; empty as it should be."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    until = time.monotonic() + SETTLES_S
    while (told := list(page.evaluate(UNREADABLE))) and time.monotonic() < until:
        time.sleep(0.1)
    return [f"{width} px, {scheme}: {one}" for one in told]
