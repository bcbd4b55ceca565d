"use strict";
const CAP = 10; // what a run without a score counts, in times the best of its case
const PAGE = 100; // rows shown at first
const SHAPES = { // a family has a colour and a shape, so that colour is never the only sign
  search: "circle", learned: "square", exact: "diamond", list: "triangle", cluster: "circle", partition: "square",
  expert: "diamond", single: "triangle", spread: "circle", planner: "diamond", other: "square",
};
const PARTS = { "open": "mark", "beyond the bound": "soft", "better known": "bad" }; // colours of the parts of a gap
const FILTERS = ["workload", "topology", "family"];
const SORTS = { ranking: ["mean", 1], rows: ["ratio", 1] };
const SVG = new Set(["svg", "g", "rect", "circle", "line", "text", "title", "path"]);

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { track: data.tracks[0], shown: PAGE, sort: structuredClone(SORTS), open: null };
const rows = data.rows.map((row) => {
  const of = data.cases[row.case];
  return {
    ...row, workload: of.workload, topology: of.topology, track: of.track,
    gap: row.step === null || !of.bound ? null : row.step / of.bound - 1,
    ratio: row.step === null ? null : row.step / of.best,
  };
});

// ---- elements and texts

function make(tag, attributes = {}, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const ms = (ns) => ns === null ? "" : (ns / 1e6).toLocaleString("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
const percent = (part) => part === null ? "" : (100 * part).toFixed(1) + " %";
const gib = (bytes) => bytes === null ? "" : (bytes / 2 ** 30).toFixed(2);
const fixed = (value, digits) => value === null ? "" : value.toFixed(digits);
const boards = new Set(Object.values(data.cases).map((of) => of.board)).size;
const who = () => state.track === "plans" ? "planner" : "placer";
const quoted = (name) => /^[\w@%+=:,./-]+$/.test(name) ? name : "'" + name.replaceAll("'", "'\\''") + "'"; // for a shell
const caseName = (of) => `${of.workload}, ${of.topology}`;

function press(attributes, label, action, ...children) { // a part of a chart that can be pressed
  const element = make("g", { ...attributes, class: "press", role: "button", tabindex: 0, "aria-label": label, onclick: action },
    make("title", {}, label), ...children);
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); action(); }
  });
  return element;
}

function mark(family, x, y, r = 5) {
  const attributes = { class: "dot", fill: `var(--${SHAPES[family] ? family : "other"})` };
  switch (SHAPES[family] || SHAPES.other) {
    case "square": return make("rect", { ...attributes, x: x - r + 0.5, y: y - r + 0.5, width: 2 * r - 1, height: 2 * r - 1 });
    case "diamond": return make("path", { ...attributes, d: `M${x} ${y - r - 1}L${x + r + 1} ${y}L${x} ${y + r + 1}L${x - r - 1} ${y}z` });
    case "triangle": return make("path", { ...attributes, d: `M${x} ${y - r}L${x + r} ${y + r - 1}L${x - r} ${y + r - 1}z` });
    default: return make("circle", { ...attributes, cx: x, cy: y, r });
  }
}

function save(name, content, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function savePlacement({ name, content }) {
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  save(name, await new Response(plain).text(), "application/json");
}

// ---- the address holds what is shown

function address() {
  const parts = new URLSearchParams();
  if (state.track !== data.tracks[0]) parts.set("track", state.track);
  for (const id of FILTERS) if ($(id).value) parts.set(id, $(id).value);
  if ($("find").value) parts.set("find", $("find").value);
  if ($("fits").checked) parts.set("fits", "1");
  for (const [id, [key, direction]] of Object.entries(state.sort)) {
    if (key !== SORTS[id][0] || direction !== SORTS[id][1]) parts.set("sort-" + id, (direction < 0 ? "-" : "") + key);
  }
  if (state.open) parts.set(...state.open);
  return "#" + parts;
}
function remember(step) { // a step back in the browser's history returns from an opened case
  if (address() !== (location.hash || "#")) history[step ? "pushState" : "replaceState"](null, "", address());
}
function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  state.track = data.tracks.includes(parts.get("track")) ? parts.get("track") : data.tracks[0];
  fillFilters();
  for (const id of FILTERS) $(id).value = [...$(id).options].some((option) => option.value === parts.get(id)) ? parts.get(id) : "";
  $("find").value = parts.get("find") || "";
  $("fits").checked = parts.get("fits") === "1";
  for (const id of Object.keys(SORTS)) {
    const found = parts.get("sort-" + id);
    state.sort[id] = found ? [found.replace(/^-/, ""), found.startsWith("-") ? -1 : 1] : [...SORTS[id]];
  }
  state.open = null;
  if (data.cases[parts.get("case")]) state.open = ["case", parts.get("case")];
  else if (rows.some((row) => row.placer === parts.get("placer"))) state.open = ["placer", parts.get("placer")];
  draw();
  showDetails();
}

// ---- filters and tables

function fillFilters() {
  const mine = rows.filter((row) => row.track === state.track);
  for (const [id, all] of [["workload", "all workloads"], ["topology", "all machines"], ["family", "all families"]]) {
    const names = [...new Set(mine.map((row) => row[id]))].sort();
    $(id).replaceChildren(make("option", { value: "" }, all), ...names.map((name) => make("option", { value: name }, name)));
  }
}
function chosen() {
  const find = $("find").value.trim().toLowerCase();
  return rows.filter((row) => row.track === state.track && FILTERS.every((id) => !$(id).value || row[id] === $(id).value)
    && (!$("fits").checked || row.step !== null)
    && (!find || `${row.placer} ${row.workload} ${row.topology}`.toLowerCase().includes(find)));
}
function compare(key, direction) {
  return (a, b) => {
    const [x, y] = [a[key] ?? null, b[key] ?? null];
    if (x === y) return a.order - b.order;
    if (x === null) return 1;
    if (y === null) return -1;
    return (typeof x === "string" ? x.localeCompare(y) : x - y) * direction;
  };
}
function table(id, caption, columns, lines) {
  const [key, direction] = state.sort[id];
  lines.forEach((line, number) => { line.order = number; });
  const sorted = [...lines].sort(compare(key, direction));
  const head = columns.map(([name, label, kind]) => {
    const sort = name === key ? (direction > 0 ? "ascending" : "descending") : "none";
    const turn = () => {
      state.sort[id] = [name, name === key ? -direction : 1];
      draw();
      document.querySelector(`#${id} th[data-key="${name}"] button`).focus();
    };
    return make("th", { scope: "col", "aria-sort": sort, "data-key": name, class: kind || "" }, make("button", { type: "button", onclick: turn }, label));
  });
  const body = sorted.slice(0, id === "rows" ? state.shown : Infinity).map((line) => make("tr", {}, ...columns.map(([name, , kind, show]) => {
    const good = name !== "step" ? "" : line.step === null ? " none" : line.ratio === 1 ? " best" : "";
    return make("td", { class: (kind || "") + good }, show ? show(line) : String(line[name] ?? ""));
  })));
  $(id).replaceChildren(make("caption", {}, caption), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}
function middle(values) {
  const found = values.filter((value) => value !== null).sort((a, b) => a - b);
  return found.length ? found[(found.length - 1) >> 1] : null;
}
function ranking(found) {
  const cases = [...new Set(found.map((row) => row.case))];
  return [...Map.groupBy(found, (row) => row.placer)].map(([placer, mine]) => {
    const runs = Map.groupBy(mine, (row) => row.case);
    const medians = cases.map((name) => {
      const ratios = (runs.get(name) || []).map((row) => row.ratio ?? Infinity).sort((a, b) => a - b);
      return ratios.length ? ratios[(ratios.length - 1) >> 1] : Infinity;
    });
    const logs = cases.map((name) => {  // over the seeds, as in ranking.csv
      const own = runs.get(name) || [{}];
      return own.reduce((sum, row) => sum + Math.log(Math.min(CAP, row.ratio ?? CAP)), 0) / own.length;
    });
    const mean = Math.exp(logs.reduce((sum, log) => sum + log, 0) / Math.max(1, cases.length));
    return {
      placer, family: mine[0].family, mean, cases: cases.length, fit: medians.filter((ratio) => ratio < Infinity).length,
      wins: medians.filter((ratio) => ratio === 1).length,
      evaluations: middle(mine.map((row) => row.evaluations)), seconds: middle(mine.map((row) => row.seconds)),
    };
  });
}
function csv(found) {
  const names = ["workload", "topology", "track", "placer", "family", "status", "step", "gap", "evaluations", "seconds", "peak", "seed", "plan"];
  const heads = { topology: "machine", step: "step_ns", gap: "gap_to_bound", seconds: "place_seconds", peak: "peak_bytes" };
  const cell = (value) => {
    let text = String(value ?? "");
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = "'" + text; // a spreadsheet must not see a formula
    return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return [names.map((name) => heads[name] || name), ...found.map((row) => names.map((name) => row[name]))]
    .map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

// ---- charts: one unit of a chart is one pixel, so that texts keep their size on every screen

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (x) => x;
  const span = f(high) - f(low) || 1;
  return (x) => from + (f(x) - f(low)) / span * (to - from);
}
function canvas(figure, height, label) {
  const width = Math.max(280, figure.clientWidth - 22);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  figure.replaceChildren(svg);
  return [svg, width];
}
function drawCost(lines) {
  const points = lines.filter((line) => line.seconds !== null).sort((a, b) => a.mean - b.mean);
  const figure = $("cost"), height = 460, bottom = height - 40;
  const [svg, width] = canvas(figure, height, "Mean ratio to the best against the seconds of a run, by placer");
  const x = scale(0.001, Math.max(1, ...points.map((line) => line.seconds)), 42, width - 14, true);
  const y = scale(1, Math.max(1.1, ...points.map((line) => line.mean)), 26, bottom - 6, true);
  svg.append(make("path", { class: "axis", d: `M42 20V${bottom}H${width}` }));
  for (const value of [0.001, 0.01, 0.1, 1, 10, 100, 1000]) {
    if (x(value) < width - 8) svg.append(make("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, String(value)));
  }
  for (const value of [1, 1.5, 2, 3, 5, 10]) if (y(value) <= bottom) svg.append(make("text", { x: 36, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  svg.append(make("text", { x: (42 + width) / 2, y: bottom + 34, "text-anchor": "middle" }, "seconds of a run (median)"),
    make("text", { x: 4, y: 12 }, "ratio to best"));
  const dots = points.map((line) => [x(Math.max(0.001, line.seconds)), y(line.mean)]);
  const taken = dots.map(([px, py]) => [px - 7, py - 7, px + 7, py + 7]);
  points.forEach((line, number) => {
    const [px, py] = dots[number];
    const text = make("text", { class: "label", "aria-hidden": true }, line.placer);
    svg.append(press({ "data-placer": line.placer }, `${line.placer}: ${line.mean.toFixed(3)} times the best, ${line.seconds.toFixed(2)} s`,
      () => open("placer", line.placer), mark(line.family, px, py)), text);
    const place = freePlace(px, py, text.getComputedTextLength(), taken, width, bottom);
    if (!place) return text.remove(); // the ranking and the dot's own title still name it
    text.setAttribute("x", place[0]);
    text.setAttribute("y", place[1] + 11);
    if (place[2]) svg.prepend(make("path", { class: "axis", d: `M${px} ${py}L${place[2]} ${place[1] + 7}` }));
  });
  figure.append(make("figcaption", {}, "Geometric mean of the ratio to the best (lower is better; 1 is the best of every case) against the time of a run. Press a mark to see the runs of its placer."));
}
function freePlace(px, py, length, taken, width, bottom) {
  for (const far of [9, 22, 36, 52, 70]) {
    for (const [dx, dy] of [[1, 0], [-1, 0], [1, -1], [1, 1], [-1, -1], [-1, 1], [0, -1], [0, 1]]) {
      const left = dx > 0 ? px + (dy ? far * 0.8 : far) : dx < 0 ? px - (dy ? far * 0.8 : far) - length : px - length / 2;
      const top = py - 7 + dy * (far + 3);
      const box = [left - 1, top, left + length + 1, top + 14];
      if (box[0] < 44 || box[2] > width || box[1] < 14 || box[3] > bottom) continue;
      if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      return [left, top, far > 9 ? Math.min(Math.max(px, left), left + length) : null];
    }
  }
  return null;
}
function drawGap(found) {
  const best = new Map();
  for (const row of found) if (row.gap !== null && (!best.has(row.case) || row.gap < best.get(row.case).gap)) best.set(row.case, row);
  const lines = [...best.values()].sort((a, b) => a.gap - b.gap);
  const figure = $("gap");
  const [svg, width] = canvas(figure, 18 * Math.max(1, lines.length) + 8, "Gap of the best run to the lower bound, by case");
  const left = Math.min(210, width * 0.5);
  const x = scale(0, Math.max(0.01, ...lines.map((row) => row.gap)), left + 8, width - 54, false);
  lines.forEach((row, number) => {
    const y = 4 + 18 * number, of = data.cases[row.case];
    const parts = gapParts(of, row.gap);
    const label = `${caseName(of)}: ${percent(row.gap)} above the bound (${of.method})` + parts.map(([name, from, to]) => `; ${name} ${percent(to - from)}`).join("");
    svg.append(press({ "data-case": row.case }, label, () => open("case", row.case),
      make("text", { x: left, y: y + 11, "text-anchor": "end" }, caseName(of)),
      ...parts.map(([name, from, to]) => make("rect", { class: "dot", fill: `var(--${PARTS[name]})`, x: x(from), y, width: Math.max(0.5, x(to) - x(from)), height: 13 })),
      make("text", { x: x(row.gap) + 6, y: y + 11 }, percent(row.gap))));
  });
  figure.prepend(make("ul", { class: "legend" }, ...Object.entries(PARTS).map(([name, colour]) =>
    make("li", {}, make("svg", { viewBox: "0 0 12 12", "aria-hidden": true }, make("rect", { width: 12, height: 12, fill: `var(--${colour})` })), name))));
  figure.append(make("figcaption", {}, "Gap of the best run of each case to the proven lower bound; the optimum lies between them. Beyond the bound: no bound of this kind can close it, since the best known placement takes that much less without queues at links. Better known: another board holds a faster placement. Press a bar to open its case."));
}
function gapParts(of, gap) { // parts of a gap that are certain, and the open rest: name, from, to
  if (!of.known) return [["open", 0, gap]];
  const [relaxed, best] = of.known.map((ns) => Math.min(gap, ns / of.bound - 1));
  return [["open", 0, relaxed], ["beyond the bound", relaxed, best], ["better known", best, gap]].filter(([, from, to]) => to > from);
}
function drawLegend(found) {
  const families = [...new Set(found.map((row) => row.family))].sort();
  $("legend").replaceChildren(...families.map((family) => make("li", {}, make("svg", { viewBox: "0 0 12 12", "aria-hidden": true }, mark(family, 6, 6)), family)));
}

// ---- an opened case or placer

function open(kind, name) {
  state.open = [kind, name];
  remember(true);
  showDetails();
}
function showDetails() {
  const dialog = $("details");
  if (!state.open) { if (dialog.open) dialog.close(); return; }
  const [kind, name] = state.open;
  if (!dialog.open) dialog.showModal();
  const [title, ...content] = kind === "case" ? aboutCase(name) : aboutPlacer(name);
  const close = make("button", { class: "plain", type: "button", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(make("header", {}, make("h2", { id: "details-title" }, title), close), ...content);
  for (const figure of dialog.querySelectorAll("figure")) gantt(figure, data.cases[name].gantts[figure.dataset.number]);
  dialog.scrollTop = 0;
  close.focus();
}
function list(label, columns, lines) {
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)))),
    make("tbody", {}, ...lines.map((line) => make("tr", {}, ...columns.map(([, kind, show]) => make("td", { class: kind }, show(line))))))));
}
const FIGURES = [
  ["step, ms", "", (row) => row.step === null ? row.status : ms(row.step)], ["ratio", "", (row) => fixed(row.ratio, 3)],
  ["gap", "", (row) => percent(row.gap)], ["evaluations", "", (row) => String(row.evaluations ?? "")],
  ["seconds", "", (row) => String(row.seconds ?? "")], ["peak GiB", "", (row) => gib(row.peak)],
];
const inOrder = (a, b) => (a.step ?? Infinity) - (b.step ?? Infinity) || a.placer.localeCompare(b.placer) || a.case.localeCompare(b.case);

function aboutCase(name) {
  const of = data.cases[name];
  const found = rows.filter((row) => row.case === name).sort(inOrder);
  const ops = of.ops === null ? "" : of.ops.toLocaleString("en") + " ops. ";
  const bound = of.bound ? `${ms(of.bound)} ms (${of.method})` : "none";
  const best = of.placement && make("button", { class: "plain", type: "button", onclick: () => savePlacement(of.placement) }, `Download the best placement (${found[0].placer})`);
  const table = make("button", { class: "plain", type: "button", onclick: () => save("runs.csv", csv(found), "text/csv") }, "Download these runs as CSV");
  const folder = quoted(of.board), which = `-w ${quoted(of.workload)} -t ${quoted(of.topology)}`;
  return [caseName(of),
    make("p", {}, (boards > 1 ? `Board ${of.board}. ` : "") + `${ops}Best: ${of.best === null ? "none fits" : ms(of.best) + " ms"}. Proven lower bound: ${bound}. Rules ${of.rules}.`),
    of.note ? make("p", { class: "soft" }, `No picture: ${of.note}`) : null,
    ...of.gantts.map((_, number) => make("figure", { "data-number": number })),
    list("Runs of this case", [[who(), "text", (row) => row.placer], ...FIGURES,
      ...(of.track === "plans" ? [["plan", "text", (row) => row.plan]] : [])], found),
    make("p", { class: "actions" }, best || null, table),
    make("h2", {}, "Verify a row"), make("p", {}, `Every row can be recomputed from its stored ${of.track === "plans" ? "plan" : "placement"}:`),
    make("pre", { tabindex: 0, "aria-label": "Commands" },
      `simdev verify ${folder}` + (of.track === "plans" ? "" : `\nsimdev explain ${folder} ${which}`)),
  ].filter((part) => part !== null);
}
function aboutPlacer(name) {
  const found = rows.filter((row) => row.placer === name && row.track === state.track).sort((a, b) => (a.ratio ?? Infinity) - (b.ratio ?? Infinity) || inOrder(a, b));
  const link = (row) => make("button", { class: "open", type: "button", onclick: () => open("case", row.case) }, caseName(row));
  return [name, make("p", {}, `Family: ${found.length ? found[0].family : "other"}. The runs stand in the order of their ratio to the best run of the case.`),
    list("Runs of this placer", [["case", "text", link], ...FIGURES, ["seed", "", (row) => String(row.seed ?? "")]], found)];
}
function gantt(figure, found) {
  const lanes = found.lanes, row = 20;
  const label = `${found.placer}, ${ms(found.step)} ms: ` + lanes.map(([name, , busy]) => `${name} busy ${Math.round(100 * busy)} %`).join(", ");
  const [svg, all] = canvas(figure, row * lanes.length + 24, label);
  svg.setAttribute("role", "img");
  const names = lanes.map(([name], number) => make("text", { y: number * row + 15, "text-anchor": "end" }, name));
  svg.append(...names);
  const left = Math.min(all * 0.45, Math.max(...names.map((name) => name.getComputedTextLength())) + 8), width = all - left - 44;
  lanes.forEach(([, bins, busy, link], number) => {
    const y = number * row + 19;
    names[number].setAttribute("x", left - 6);
    let path = "";
    for (let k = 0; k < bins.length; k++) {
      const level = bins.charCodeAt(k) - 48;
      if (level) path += `M${(left + k * width / bins.length).toFixed(1)} ${y}h${(width / bins.length + 0.2).toFixed(2)}v${-1.6 * level}h${(-width / bins.length - 0.2).toFixed(2)}z`;
    }
    svg.append(make("line", { class: "axis", x1: left, x2: left + width, y1: y, y2: y }), make("path", { d: path, class: link ? "link" : "", fill: "var(--mark)" }),
      make("text", { x: left + width + 6, y: y - 4 }, Math.round(100 * busy) + " %"));
  });
  const end = row * lanes.length + 18;
  svg.append(make("text", { x: left, y: end }, "0"), make("text", { x: left + width, y: end, "text-anchor": "end" }, ms(found.step) + " ms"));
  figure.append(make("figcaption", {}, `${found.placer}: the height of the bars shows how busy each device (blue) and each of the busiest links (grey) is during the step.`));
}

// ---- the whole page

function drawTracks() {
  $("tracks").hidden = data.tracks.length < 2;
  $("tracks").replaceChildren(...data.tracks.map((track) => make("button", {
    type: "button", role: "tab", "aria-selected": String(track === state.track), tabindex: track === state.track ? 0 : -1,
    onclick: () => { state.track = track; fillFilters(); draw(); document.querySelector("[role=tab][aria-selected=true]").focus(); },
  }, track)));
}
function draw() {
  const found = chosen();
  const places = ranking(found);
  drawTracks();
  table("ranking", "Placers over the chosen runs. Press a heading to sort.", [
    ["placer", who(), "text", (line) => make("button", { class: "open", type: "button", onclick: () => open("placer", line.placer) }, line.placer)],
    ["family", "family", "text rare"], ["mean", "ratio to best", "", (line) => line.mean.toFixed(3)],
    ["fit", "fit", "", (line) => `${line.fit}/${line.cases}`], ["wins", "wins"], ["evaluations", "evaluations", "rare"],
    ["seconds", "seconds", "", (line) => fixed(line.seconds, 2)]], places);
  drawLegend(found);
  drawCharts(found, places);
  table("rows", "Press a case to see its schedules.", [
    ["case", "case", "text", (row) => make("button", { class: "open", type: "button", onclick: () => open("case", row.case) }, caseName(row))],
    ["placer", who(), "text"], ["step", "step, ms", "", (row) => row.step === null ? row.status : ms(row.step)],
    ["ratio", "ratio to best", "", (row) => fixed(row.ratio, 3)], ["gap", "gap to bound", "", (row) => percent(row.gap)],
    ["evaluations", "evaluations", "rare"], ["seconds", "seconds", "rare"], ["peak", "peak GiB", "rare", (row) => gib(row.peak)], ["seed", "seed", "rare"]], found);
  $("count").textContent = `${found.length} of ${rows.length} runs` + (found.length > state.shown ? `, the first ${state.shown} shown` : "");
  $("more").hidden = found.length <= state.shown;
  remember(false);
}
function drawCharts(found, places) {
  drawCost(places);
  drawGap(found);
}

for (const id of FILTERS) $(id).addEventListener("change", draw);
$("find").addEventListener("input", draw);
$("fits").addEventListener("change", draw);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("reset").addEventListener("click", () => { for (const id of [...FILTERS, "find"]) $(id).value = ""; $("fits").checked = false; draw(); });
$("more").addEventListener("click", () => { state.shown = Infinity; draw(); });
$("csv").addEventListener("click", () => save("runs.csv", csv(chosen()), "text/csv"));
$("details").addEventListener("close", () => { if (state.open) { state.open = null; remember(true); } });
$("tracks").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = [...$("tracks").children];
  if (step) all[(all.indexOf(document.activeElement) + step + all.length) % all.length].click();
});
addEventListener("popstate", restore);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  const found = chosen();
  drawCharts(found, ranking(found));
  showDetails();
});
$("summary").textContent = data.summary;
restore();
