"use strict";
const PAGE = 100; // rows shown at first
const SHAPES = { // a family has a colour and a shape, so that colour is never the only sign
  search: "circle", learned: "square", exact: "diamond", list: "triangle", cluster: "circle", partition: "square",
  expert: "diamond", single: "triangle", spread: "circle", planner: "diamond", other: "square",
};
const PARTS = { "open": "mark", "beyond the bound": "soft", "better known": "bad" }; // colours of the parts of a gap
const FILTERS = ["workload", "topology", "family"];
const SORTS = { ranking: ["place", 1], rows: ["ratio", 1] };
const BASELINES = ["single-gpu", "expert", "megatron", "fsdp", "heft"]; // the first one that ran is what others are set against
const SVG = new Set(["svg", "g", "rect", "circle", "line", "text", "title", "path"]);

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const trackNames = data.tracks.map((track) => track.name);
const state = { track: trackNames[0], shown: PAGE, sort: structuredClone(SORTS), open: null };
const loaded = new Map(); // pictures and placements of cases, by the number of their file
function simdevCase(number, more) { // called by the files beside the page
  loaded.set(number, more);
  showDetails();
}
const rows = data.rows.map((row) => {
  const of = data.cases[row.case];
  return {
    ...row, workload: of.workload, topology: of.topology, track: of.track, family: data.placers[row.placer].family,
    gap: row.step === null || !of.bound ? null : row.step / of.bound - 1,
    least: row.best === null || !of.bound ? null : row.best / of.bound - 1, // the gap of the best seed
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
const who = () => state.track === "plan" ? "planner" : "placer";
const timed = () => state.track.startsWith("pace") ? "microbatch, ms" : "step, ms"; // what the times of the track are of
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
  if (state.track !== trackNames[0]) parts.set("track", state.track);
  if ($("budget").value !== $("budget").options[0]?.value) parts.set("budget", $("budget").value);
  if ($("baseline").value !== $("baseline").options[0]?.value) parts.set("baseline", $("baseline").value);
  if ($("axis").value !== "evaluations") parts.set("axis", $("axis").value);
  if (!$("grouped").checked) parts.set("grouped", "0");
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
  state.track = trackNames.includes(parts.get("track")) ? parts.get("track") : trackNames[0];
  fillFilters();
  for (const id of ["budget", "baseline", "axis"]) {
    $(id).value = [...$(id).options].some((option) => option.value === parts.get(id)) ? parts.get(id) : $(id).options[0].value;
  }
  $("grouped").checked = parts.get("grouped") !== "0";
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
  fillChoices();
}
function fillChoices() { // budgets and baselines of the track: the budget of most runs, and the usual baseline, come first
  const mine = rows.filter((row) => row.track === state.track);
  const budgets = [...Map.groupBy(mine, (row) => row.budget)].sort((a, b) => b[1].length - a[1].length).map(([name]) => name);
  $("budget").replaceChildren(...budgets.map((name) => make("option", { value: name }, name.replace("evaluations=", "evaluations "))));
  $("budget").parentElement.hidden = budgets.length < 2;
  const names = new Set(mine.map((row) => row.placer));
  const usual = BASELINES.filter((name) => names.has(name));
  const others = [...names].filter((name) => !usual.includes(name)).sort();
  const cost = $("axis").value;
  const costs = Object.keys(AXES).filter((name) => name === "evaluations" || mine.some((row) => row[name] !== null)); // older rows lack processor seconds
  $("axis").replaceChildren(...costs.map((name) => make("option", { value: name, selected: name === cost }, AXES[name][0])));
  $("baseline").replaceChildren(...[...usual, ...others].map((name) => make("option", { value: name }, name)));
}
function chosen() {
  const find = $("find").value.trim().toLowerCase();
  return rows.filter((row) => row.track === state.track && row.budget === $("budget").value && FILTERS.every((id) => !$(id).value || row[id] === $(id).value)
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
  if (id === "ranking" && $("grouped").checked) { // families in the order of their first line
    const families = Map.groupBy(sorted, (line) => line.family);
    const grouped = [...families].flatMap(([family, mine]) => [
      make("tr", { class: "family" }, make("th", { scope: "rowgroup", colspan: columns.length, class: "text" }, family)),
      ...mine.map((line) => body[sorted.indexOf(line)]),
    ]);
    body.splice(0, body.length, ...grouped);
  }
  $(id).replaceChildren(make("caption", {}, caption), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}
function middle(values) {
  const found = values.filter((value) => value !== null).sort((a, b) => a - b);
  return found.length ? found[(found.length - 1) >> 1] : null;
}
const geomean = (logs) => logs.length ? Math.exp(logs.reduce((sum, log) => sum + log, 0) / logs.length) : null;

// As the pages of the site round it: from the four digits of ranking.csv.
const ratio = (line) => Number(line.mean.toFixed(4)).toFixed(3);

// As simdev.bench.score.ranking, over the runs that are shown: placers that ran all common cases are ranked over these; the
// others are compared with the first one over the cases that both ran.
function ranking(found) {
  const groups = [...Map.groupBy(found, (row) => row.placer)].map(([placer, mine]) => [placer, new Map(mine.map((row) => [row.case, row]))]);
  const sets = [...new Set(groups.map(([, mine]) => JSON.stringify([...mine.keys()].sort())))].map((text) => [text, JSON.parse(text)]);
  const held = (names) => groups.filter(([, mine]) => names.every((name) => mine.has(name))).length;
  const common = sets.map(([text, names]) => [Number(held(names) > 1), held(names) * names.length, names.length, text, names])
    .sort((a, b) => b[0] - a[0] || b[1] - a[1] || b[2] - a[2] || (a[3] < b[3] ? 1 : -1))[0]?.[4] ?? [];
  const base = groups.find(([placer]) => placer === $("baseline").value)?.[1];
  const all = new Set(found.map((row) => row.case)).size;
  const lines = groups.map(([placer, mine]) => {
    const ranked = common.every((name) => mine.has(name));
    const runs = ranked ? common.map((name) => mine.get(name)) : [...mine.values()];
    const against = base ? runs.filter((row) => row.step !== null && base.get(row.case)?.step) : [];
    return {
      placer, family: data.placers[placer].family, year: data.placers[placer].year, date: data.placers[placer].date, mine,
      mean: geomean(runs.map((row) => row.log)), cases: runs.length, all, ranked,
      fit: runs.filter((row) => row.step !== null).length, wins: runs.filter((row) => row.rank === 1).length,
      faster: geomean(against.map((row) => Math.log(base.get(row.case).step / row.step))), against: against.length,
      ...Object.fromEntries(Object.keys(AXES).map((name) => [name, middle(runs.map((row) => row[name]))])),
    };
  });
  const ranked = lines.filter((line) => line.ranked).sort((a, b) => a.mean.toFixed(4) - b.mean.toFixed(4) || (a.placer < b.placer ? -1 : 1));
  ranked.forEach((line, number) => { line.place = number + 1; });
  const rest = lines.filter((line) => !line.ranked);
  for (const line of rest) {
    const both = [...line.mine].filter(([name]) => ranked[0].mine.has(name));
    line.place = null;
    line.common = both.length;
    line.first = geomean(both.map(([name, row]) => row.log - ranked[0].mine.get(name).log));
  }
  rest.sort((a, b) => (a.first ?? Infinity) - (b.first ?? Infinity) || (a.placer < b.placer ? -1 : 1));
  return [...ranked, ...rest];
}
function csv(found) {
  const names = ["workload", "topology", "track", "budget", "placer", "family", "status", "step", "best", "runs", "gap", "evaluations", "seconds", "cpu", "peak", "plan"];
  const time = state.track.startsWith("pace") ? "microbatch_time_ns" : "step_time_ns";
  const heads = { topology: "machine", step: time, best: "best_time_ns", gap: "gap_to_bound", seconds: "place_seconds", cpu: "cpu_seconds", peak: "peak_bytes" };
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
const AXES = { // what a run costs: the choice, the title, the least value, the ticks
  evaluations: ["simulations", "simulations that a run spent (median)", 0.7, [1, 10, 100, 1000, 10000, 100000, 1e6]],
  cpu: ["processor seconds", "processor seconds that a run took (median; compare them on one machine)", 0.001, [0.001, 0.01, 0.1, 1, 10, 100, 1000]],
  seconds: ["seconds", "seconds that a run took (median; not comparable between machines)", 0.001, [0.001, 0.01, 0.1, 1, 10, 100, 1000]],
};
function drawCost(lines) {
  const name = $("axis").value, value = (line) => line[name];
  const [unit, title, least, ticks] = AXES[name];
  const points = lines.filter((line) => value(line) !== null && line.ranked).sort((a, b) => a.mean - b.mean);
  const figure = $("cost"), height = 460, bottom = height - 40;
  const [svg, width] = canvas(figure, height, `Ratio to the best against ${title}, by placer`);
  const x = scale(least, Math.max(least * 10, ...points.map((line) => value(line))), 46, width - 16, true);
  const y = scale(1, Math.max(1.1, ...points.map((line) => line.mean)), 26, bottom - 6, true);
  svg.append(make("path", { class: "axis", d: `M42 20V${bottom}H${width}` }));
  for (const tick of ticks) {
    const name = tick.toLocaleString("en");
    if (x(tick) < width - 4 * name.length - 4) svg.append(make("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, name));
  }
  for (const tick of [1, 1.5, 2, 3, 5, 10]) if (y(tick) <= bottom && y(tick) >= 24) svg.append(make("text", { x: 36, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  const below = make("text", { x: (42 + width) / 2, y: bottom + 34, "text-anchor": "middle" }, title);
  svg.append(below, make("text", { x: 4, y: 12 }, "ratio to best (1 = best)"));
  shorten(below, width - 46);
  const dots = points.map((line) => [x(Math.max(least, value(line))), y(line.mean)]);
  const taken = dots.map(([px, py]) => [px - 7, py - 7, px + 7, py + 7]);
  points.forEach((line, number) => {
    const [px, py] = dots[number];
    const text = make("text", { class: "label", "aria-hidden": true }, line.placer);
    svg.append(press({ "data-placer": line.placer }, `${line.placer}: ${ratio(line)} times the best, ${value(line).toLocaleString("en")} ${unit}`,
      () => open("placer", line.placer), mark(line.family, px, py), text)); // a mark may cover another one, a label does not
    const place = freePlace(px, py, text.getComputedTextLength(), taken, width, bottom);
    if (!place) return text.remove(); // the ranking and the dot's own title still name it
    text.setAttribute("x", place[0]);
    text.setAttribute("y", place[1] + 11);
    if (place[2]) svg.prepend(make("path", { class: "axis", d: `M${px} ${py}L${place[2]} ${place[1] + 7}` }));
  });
  figure.append(make("figcaption", {}, "How good, and for how much work: further up is better, further left is cheaper. Placers that simulate nothing stand at the left edge. Press a mark to see the runs of its placer."));
}
function shorten(text, room) { // a label that has no room loses its end, and keeps it as its title
  const whole = text.textContent;
  for (let length = whole.length - 1; length > 3 && text.getComputedTextLength() > room; length--) text.textContent = whole.slice(0, length) + "…";
  if (text.textContent !== whole) text.append(make("title", {}, whole));
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
  for (const row of found) if (row.least !== null && (!best.has(row.case) || row.least < best.get(row.case).least)) best.set(row.case, row);
  const lines = [...best.values()].sort((a, b) => a.least - b.least);
  const figure = $("gap");
  const [svg, width] = canvas(figure, 18 * Math.max(1, lines.length) + 8, "Gap of the best run to the lower bound, by case");
  const names = lines.map((row, number) => make("text", { y: 4 + 18 * number + 11, "text-anchor": "end" }, caseName(data.cases[row.case])));
  svg.append(...names);
  const left = Math.min(width * 0.58, Math.max(0, ...names.map((name) => name.getComputedTextLength())) + 4);
  names.forEach((name) => { name.setAttribute("x", left); shorten(name, left - 2); });
  const x = scale(0, Math.max(0.01, ...lines.map((row) => row.least)), left + 8, width - 58, false);
  lines.forEach((row, number) => {
    const y = 4 + 18 * number, of = data.cases[row.case];
    const parts = gapParts(of, row.least);
    const label = `${caseName(of)}: ${percent(row.least)} above the bound (${of.method})` + parts.map(([name, from, to]) => `; ${name} ${percent(to - from)}`).join("");
    svg.append(press({ "data-case": row.case }, label, () => open("case", row.case), names[number],
      ...parts.map(([name, from, to]) => make("rect", { class: "dot", fill: `var(--${PARTS[name]})`, x: x(from), y, width: Math.max(0.5, x(to) - x(from)), height: 13 })),
      make("text", { x: x(row.least) + 6, y: y + 11 }, percent(row.least))));
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
  const more = kind === "case" && loaded.get(data.cases[name].file);
  if (more) {
    const longest = Math.max(...more.gantts.map((found) => found.step));
    for (const figure of dialog.querySelectorAll("figure")) gantt(figure, more.gantts[figure.dataset.number], longest);
  }
  dialog.scrollTop = 0;
  close.focus();
}
function list(label, columns, lines) {
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)))),
    make("tbody", {}, ...lines.map((line) => make("tr", {}, ...columns.map(([, kind, show]) => make("td", { class: kind }, show(line))))))));
}
const figures = () => [
  [timed(), "", (row) => row.step === null ? row.status : ms(row.step)], ["ratio", "", (row) => fixed(row.ratio, 3)],
  ["gap", "", (row) => percent(row.gap)], ["evaluations", "", (row) => String(row.evaluations ?? "")],
  ["seconds", "", (row) => String(row.seconds ?? "")], ["peak GiB", "", (row) => gib(row.peak)], ["seeds", "", (row) => String(row.runs)],
];
function more(of) { // the pictures and the best placement of a case, which are loaded when it is opened
  if (of.file === null || loaded.has(of.file)) return loaded.get(of.file) || null;
  const script = make("script", { src: `${data.beside}/${of.file}.js` });
  script.addEventListener("error", () => {
    loaded.set(of.file, null);
    showDetails();
  });
  document.head.append(script);
  return null;
}
const inOrder = (a, b) => (a.step ?? Infinity) - (b.step ?? Infinity) || a.placer.localeCompare(b.placer) || a.case.localeCompare(b.case);

function aboutCase(name) {
  const of = data.cases[name];
  const found = rows.filter((row) => row.case === name).sort(inOrder);
  const ops = of.ops === null ? "" : of.ops.toLocaleString("en") + " ops. ";
  const bound = of.bound ? `${ms(of.bound)} ms (${of.method})` : "none";
  const beside = more(of), missing = of.file !== null && loaded.has(of.file) && !beside;
  const best = beside?.placement && make("button", { class: "plain", type: "button", onclick: () => savePlacement(beside.placement) }, `Download the best placement (${beside.gantts[0].placer})`);
  const table = make("button", { class: "plain", type: "button", onclick: () => save("runs.csv", csv(found), "text/csv") }, "Download these runs as CSV");
  const folder = quoted(of.board), which = `-w ${quoted(of.workload)} -t ${quoted(of.topology)}`;
  return [caseName(of),
    make("p", {}, (boards > 1 ? `Board ${of.board}. ` : "") + `${ops}Best: ${of.best === null ? "none fits" : ms(of.best) + " ms"}. Proven lower bound: ${bound}. Rules ${of.rules}.`),
    of.note ? make("p", { class: "soft" }, `No picture: ${of.note}`) : null,
    missing ? make("p", { class: "soft" }, `No picture: the folder ${decodeURIComponent(data.beside)} is not beside this page.`) : null,
    ...(beside?.gantts || []).map((_, number) => make("figure", { "data-number": number })),
    list("Runs of this case", [[who(), "text", (row) => row.placer], ["budget", "text", (row) => row.budget], ...figures(),
      ...(of.track === "plan" ? [["plan", "text", (row) => row.plan]] : [])], found),
    make("p", { class: "actions" }, best || null, table),
    make("h2", {}, "Verify a row"), make("p", {}, `Every row can be recomputed from its stored ${of.track === "plan" ? "plan" : "placement"}:`),
    make("pre", { tabindex: 0, "aria-label": "Commands" },
      `simdev verify ${folder}` + (of.track === "plan" ? "" : `\nsimdev explain ${folder} ${which}`)),
  ].filter((part) => part !== null);
}
function aboutPlacer(name) {
  const found = rows.filter((row) => row.placer === name && row.track === state.track).sort((a, b) => (a.ratio ?? Infinity) - (b.ratio ?? Infinity) || inOrder(a, b));
  const link = (row) => make("button", { class: "open", type: "button", onclick: () => open("case", row.case) }, caseName(row));
  const about = data.placers[name];
  const facts = [["family", about.family], ["paper", about.paper || "none: no published method"], ["year", about.year], ["code", about.code], ["newest run", about.date]];
  return [name, make("dl", {}, ...facts.filter(([, text]) => text).flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)])),
    make("p", {}, "The runs stand in the order of their ratio to the best run of the case."),
    list("Runs of this placer", [["case", "text", link], ["budget", "text", (row) => row.budget], ...figures()], found)];
}
function gantt(figure, found, longest) { // all pictures of a case have the time axis of the longest one
  const lanes = found.lanes, row = 20;
  const label = `${found.placer}, ${ms(found.step)} ms: ` + lanes.map(([name, , busy]) => `${name} busy ${Math.round(100 * busy)} %`).join(", ");
  const [svg, all] = canvas(figure, row * lanes.length + 24, label);
  svg.setAttribute("role", "img");
  const names = lanes.map(([name], number) => make("text", { y: number * row + 15, "text-anchor": "end" }, name));
  svg.append(...names);
  const left = Math.min(all * 0.45, Math.max(...names.map((name) => name.getComputedTextLength())) + 8);
  const width = (all - left - 44) * found.step / longest;
  names.forEach((name) => shorten(name, left - 8));
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
  svg.append(make("text", { x: left, y: end }, "0"), make("text", { x: Math.max(left + width, left + 90), y: end, "text-anchor": "end" }, ms(found.step) + " ms"));
  figure.append(make("figcaption", {}, `${found.placer}: the height of the bars shows how busy each device (blue) and each of the busiest links (grey) is during the step.`));
}

// ---- the whole page

function drawTracks() {
  $("tracks").hidden = data.tracks.length < 2;
  $("tracks").replaceChildren(...data.tracks.map(({ name, label }) => make("button", {
    type: "button", role: "tab", "aria-selected": String(name === state.track), tabindex: name === state.track ? 0 : -1,
    onclick: () => { state.track = name; fillFilters(); draw(); document.querySelector("[role=tab][aria-selected=true]").focus(); },
  }, label)));
  $("question").textContent = data.tracks.find(({ name }) => name === state.track).question;
}
function draw() {
  const found = chosen();
  const places = ranking(found);
  drawTracks();
  const partial = places.filter((line) => !line.ranked).length;
  const note = partial ? ` ${partial} without a place did not run all of these, and "against the first" is over the cases that both ran.` : "";
  const all = places[0]?.all ?? 0, common = places[0]?.cases ?? 0;
  const over = common < all ? `${common} of ${all} cases` : `${all} cases`;
  $("note").textContent = `Ranked over ${over}.${note} The column "vs ${$("baseline").value}" says how many times as fast, over how many cases in which both fit.`;
  table("ranking", "Press a heading to sort.", [
    ["place", "place", "", (line) => String(line.place ?? "")],
    ["placer", who(), "text", (line) => make("button", { class: "open", type: "button", onclick: () => open("placer", line.placer) }, line.placer)],
    ["year", "year", "rare"], ["mean", "ratio to best", "", ratio],
    ["cases", "cases", "", (line) => `${line.cases}/${line.all}`],
    ...(partial ? [["first", "against the first", "", (line) => line.ranked ? "" : line.first ? `${line.first.toFixed(3)} (${line.common})` : "no common case"]] : []),
    ["fit", "fit", "", (line) => `${line.fit}/${line.cases}`], ["wins", "wins"],
    ["faster", `vs ${$("baseline").value}`, "", (line) => line.faster ? `${line.faster.toFixed(2)} (${line.against})` : ""],
    ["evaluations", "evaluations", "rare"], ["seconds", "seconds", "rare", (line) => fixed(line.seconds, 2)], ["date", "newest run", "rare"]], places);
  drawLegend(found);
  drawCharts(found, places);
  table("rows", "Press a case to see its schedules.", [
    ["case", "case", "text", (row) => make("button", { class: "open", type: "button", onclick: () => open("case", row.case) }, caseName(row))],
    ["placer", who(), "text"], ["step", timed(), "", (row) => row.step === null ? row.status : ms(row.step)],
    ["ratio", "ratio to best", "", (row) => fixed(row.ratio, 3)], ["gap", "gap to bound", "", (row) => percent(row.gap)],
    ["evaluations", "evaluations", "rare"], ["seconds", "seconds", "rare"], ["peak", "peak GiB", "rare", (row) => gib(row.peak)], ["runs", "seeds", "rare"]], found);
  $("count").textContent = `${found.length} of ${rows.length} lines, one for each ${who()} and case; of several seeds, the median` + (found.length > state.shown ? `, the first ${state.shown} shown` : "");
  $("more").hidden = found.length <= state.shown;
  remember(false);
}
function drawCharts(found, places) {
  drawCost(places);
  drawGap(found);
}

for (const id of [...FILTERS, "budget", "baseline", "axis", "grouped"]) $(id).addEventListener("change", draw);
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
