"use strict";
// What a test of the page asks the browser.

// The labels of the scatter chart that overlap another label or a mark.
function collisions() {
  const parts = [...document.querySelectorAll("#cost text.label, #cost .dot")].map((e) => [e, e.getBoundingClientRect()]);
  const hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return parts.filter(([a, x]) => a.matches("text") && parts.some(([b, y]) => a !== b && hit(x, y))).map(([a]) => a.textContent);
}

// The texts of pictures that lie outside their picture.
function clipped() {
  return [...document.querySelectorAll("svg")].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map((text) => text.textContent);
  });
}

// Everything whose contrast to its background is below the limits of WCAG 2.2: 4.5 for text (1.4.3), 3 for marks (1.4.11).
function poorContrast() {
  const weights = [0.2126, 0.7152, 0.0722];
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (colour) => colour.match(/[\d.]+/g).slice(0, 3)
    .reduce((sum, v, k) => sum + linear(v / 255) * weights[k], 0);
  const clear = (colour) => /, 0\)$/.test(colour);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!clear(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = [];
  const all = "p, h1, h2, th, td, button, label, select, figcaption, caption, li, svg text, svg .dot";
  for (const e of document.querySelectorAll(all)) {
    const style = getComputedStyle(e), colour = e.closest("svg") ? style.fill : style.color;
    if (e.offsetParent === null && !e.closest("svg")) continue; // not shown
    if (ratio(colour, behind(e)) < (e.matches(".dot") ? 3 : 4.5)) found.push([e.tagName, e.textContent.slice(0, 30), colour]);
  }
  return found;
}
