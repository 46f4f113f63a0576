// Texts that lie over each other, or leave the page or their figure at the side: the text nodes of HTML and SVG, by the boxes of
// their lines. Boxes are those of the font, higher than its letters, so that a third of a line may overlap.
const boxes = [], problems = [], wide = innerWidth;
const words = node => node.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
document.querySelectorAll("details").forEach(one => { one.removeAttribute("name"); one.open = true; });
if (document.scrollingElement.scrollWidth > wide) problems.push(`the page is ${document.scrollingElement.scrollWidth} wide`);
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walk.nextNode());) {
  const parent = node.parentElement, drawing = parent.ownerSVGElement, range = document.createRange();
  if (!node.textContent.trim() || parent.closest("script, style, title") || !parent.checkVisibility({ visibilityProperty: true })) continue;
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    let { left, right, top, bottom } = rect;
    for (let up = drawing?.parentElement ?? parent; up !== document.documentElement; up = up.parentElement) {
      if (up === document.body || getComputedStyle(up).overflowX === "visible") continue;
      const edge = up.getBoundingClientRect();  // what has been scrolled away is not seen
      [left, right, top, bottom] = [Math.max(left, edge.left), Math.min(right, edge.right), Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
    }
    if (right - left < 1 || bottom - top < 1) continue;
    boxes.push({ node, left, right, top, bottom });
    if (left < -1 || right > wide + 1) problems.push(`leaves the page: ${words(node)}`);
    const frame = drawing && getComputedStyle(drawing).overflowX !== "visible" && drawing.getBoundingClientRect();
    if (frame && (left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 3 || bottom > frame.bottom + 3))
      problems.push(`leaves its figure: ${words(node)}`);
  }
}
boxes.sort((one, other) => one.top - other.top);
boxes.forEach((one, number) => {
  for (let next = number + 1; next < boxes.length && boxes[next].top < one.bottom; next++) {
    const other = boxes[next], lower = Math.min(one.bottom - one.top, other.bottom - other.top);
    const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    if (one.node !== other.node && across > 2 && Math.min(one.bottom, other.bottom) - other.top > lower / 3)
      problems.push(`over each other: ${words(one.node)} | ${words(other.node)}`);
  }
});
return problems;
