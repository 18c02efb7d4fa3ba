// Plots as SVG, and the small parts that tables and bars are made of. No state but what a plot's own element keeps.

export const SERIES = [
  ["memory", "from memory"],
  ["ssd", "from SSD"],
  ["computed", "computed"],
];
const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 170, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export function count(value) {
  if (value >= 1e9) return (value / 1e9).toFixed(1) + " G";
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(value >= 1e5 ? 0 : 1) + " k";
  return Math.round(value).toLocaleString("en-US");
}

export function size(bytes) {
  if (bytes >= 1e9) return (bytes / 1e9).toFixed(1) + " GB";
  if (bytes >= 1e6) return (bytes / 1e6).toFixed(bytes >= 1e8 ? 0 : 1) + " MB";
  return Math.round(bytes / 1e3).toLocaleString("en-US") + " kB";
}

export function span(seconds) {
  if (seconds >= 5400) return (seconds / 3600).toFixed(1) + " h";
  if (seconds >= 100) return (seconds / 60).toFixed(1) + " min";
  if (seconds >= 10) return seconds.toFixed(0) + " s";
  return seconds >= 1 ? seconds.toFixed(1) + " s" : Math.round(seconds * 1000) + " ms";
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

function widthOf(host) {
  return Math.max(240, host.clientWidth);
}

// A round number at or above `value` that splits into `parts` round steps.
function ceiling(value, parts) {
  if (value <= 0) return parts;
  const step = value / parts, power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 2.5, 5, 10].find((m) => m * power >= step) * power * parts;
}

// As wide as its place, so that text has the same size on a phone.
function frame(width, from, to, top, format) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  for (let part = 0; part <= 2; part++) {
    const y = HEIGHT - BOTTOM - (part / 2) * (HEIGHT - TOP - BOTTOM);
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    svg.append(draw("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, format((part / 2) * top)));
  }
  for (const [at, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const x = LEFT + at * (width - LEFT - RIGHT);
    svg.append(draw("text", { x, y: HEIGHT - 6, "text-anchor": anchor }, clock(from + at * (to - from))));
  }
  return svg;
}

// The bin or point under the pointer, in a box beside it. `lines(index)` gives its rows.
function hover(host, svg, width, xs, lines) {
  const hair = draw("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(hair);
  const tip = make("div", { class: "tip", hidden: "" });
  host.replaceChildren(svg, tip);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    let nearest = 0;
    xs.forEach((at, index) => { if (Math.abs(at - x) < Math.abs(xs[nearest] - x)) nearest = index; });
    hair.setAttribute("x1", xs[nearest]);
    hair.setAttribute("x2", xs[nearest]);
    hair.setAttribute("visibility", "visible");
    tip.replaceChildren(...lines(nearest).map(([name, value]) => make("div", {}, make("span", {}, name), make("b", {}, value))));
    tip.hidden = false;
    const left = (xs[nearest] / width) * box.width;
    tip.style.left = (left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10) + "px";
  });
  svg.addEventListener("pointerleave", () => {
    hair.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}

// Stacked bars. `bins`: [{from, to, memory, ssd, computed}], tokens.
export function stacked(host, bins) {
  const full = widthOf(host), inner = full - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
  const totals = bins.map((bin) => SERIES.reduce((sum, [name]) => sum + bin[name], 0));
  const top = ceiling(Math.max(0, ...totals), 2);
  const svg = frame(full, bins[0].from, bins[bins.length - 1].to, top, count);
  svg.setAttribute("aria-label", "Prompt tokens over time: from memory, from SSD, computed");
  const width = inner / bins.length, xs = [];
  bins.forEach((bin, index) => {
    const x = LEFT + index * width;
    xs.push(x + width / 2);
    let y = HEIGHT - BOTTOM;
    for (const [name] of SERIES) {
      const tall = (bin[name] / top) * height;
      if (tall <= 0) continue;
      y -= tall;
      svg.append(draw("rect", { class: name, x: x + 1, y, width: Math.max(1, width - 2), height: Math.max(0.5, tall - 1) }));
    }
  });
  hover(host, svg, full, xs, (index) => [
    [clock(bins[index].from), ""],
    ...SERIES.map(([name, label]) => [label, count(bins[index][name])]),
  ]);
}

// One line that only grows. `points`: [{t, value}], values in seconds.
export function trace(host, points, format, label) {
  const from = points[0].t, to = Math.max(points[points.length - 1].t, from + 1);
  const full = widthOf(host), most = Math.max(...points.map((p) => p.value));
  const unit = most >= 5400 ? 3600 : most >= 100 ? 60 : 1; // so that steps are round in what is written
  const top = ceiling(most / unit, 2) * unit;
  const svg = frame(full, from, to, top, format);
  svg.setAttribute("aria-label", label);
  const xs = points.map((p) => LEFT + ((p.t - from) / (to - from)) * (full - LEFT - RIGHT));
  const ys = points.map((p) => HEIGHT - BOTTOM - (p.value / top) * (HEIGHT - TOP - BOTTOM));
  svg.append(draw("polyline", { class: "trace", points: xs.map((x, i) => `${x.toFixed(1)},${ys[i].toFixed(1)}`).join(" ") }));
  hover(host, svg, full, xs, (index) => [[clock(points[index].t), format(points[index].value)]]);
}

// A horizontal bar of parts: [[class, share 0..1]].
export function bar(parts) {
  const host = make("div", { class: "bar" });
  for (const [name, share] of parts) {
    if (share <= 0) continue;
    const part = make("i", { class: name });
    part.style.width = Math.min(100, 100 * share) + "%";
    host.append(part);
  }
  return host;
}

// Rows of name, bar, figure: [[name, [[class, share]], text]].
export function bars(host, rows, empty) {
  host.replaceChildren(
    ...(rows.length
      ? rows.map(([name, parts, text]) =>
          make("div", { class: "row" }, make("span", { title: name }, name), bar(parts), make("span", {}, text)))
      : [make("p", { class: "quiet" }, empty)]),
  );
}

// `columns`: [[title, kind]] with kind "number", "words" or "". Cells are text or elements.
export function table(host, columns, rows, empty) {
  if (!rows.length) {
    host.replaceChildren(make("p", { class: "quiet" }, empty));
    return;
  }
  const cell = (kind, content, name) => make(name, kind ? { class: kind } : {}, content);
  const head = make("tr", {}, ...columns.map(([title, kind]) => cell(kind, title, "th")));
  const body = rows.map((row) => make("tr", {}, ...row.map((content, index) => cell(columns[index][1], content, "td"))));
  host.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}
