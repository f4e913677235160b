// Draws the curves of a page from its JSON, and lets a reader zoom, smooth, switch axes and read values.
// Plain JavaScript without a library. What it draws are the numbers of the JSON, no others; svg_line_charts.py draws them still.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  const several = data.runs.length > 1, LEFT = 66, RIGHT = 12, TOP = 8, BOTTOM = 22;
  const WORDS = { tokens: "tokens", step: "steps", seconds: "time" };
  const FORMS = { tokens: "count", step: "count", seconds: "seconds" };
  const NICE = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const most = Math.max(0, ...data.figures.flatMap((f) => f.curves.map((c) => c.value.length)));
  const state = { axis: data.axes[0], logx: false, fade: most > 60 ? 0.8 : 0, zoom: null, hidden: new Set() };
  const views = [];

  // words and round numbers ------------------------------------------------------------------------------------------
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  function written(value, form, few = 4) {
    const size = Math.abs(value);
    if (form === "bytes") {
      const at = [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
      const found = at.find(([unit]) => size >= unit);
      return found ? `${digits(value / found[0], few)} ${found[1]}` : `${digits(value, few)} B`;
    }
    if (form === "seconds") {
      if (size < 1) return value === 0 ? "0" : `${digits(value * 1000, 3)} ms`;
      if (size < 60) return `${digits(value, 3)}s`;
      const two = (number) => String(number).padStart(2, "0");
      const whole = Math.round(size), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
      if (hours >= 24) return `${Math.floor(hours / 24)}d${two(hours % 24)}h`;
      return hours ? `${hours}h${two(minutes % 60)}m` : `${minutes}m${two(whole % 60)}s`;
    }
    if (form === "percent") return `${digits(value * 100, few)}%`;
    if (form === "count" || size >= 1e4) {
      const found = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([unit]) => size >= unit);
      return found ? `${digits(value / found[0], few + 1)}${found[1]}` : digits(value, few + 1);
    }
    return value === 0 ? "0" : size < 1e-3 ? value.toExponential(few < 5 ? 1 : few - 3) : digits(value, few + 1);
  }
  function labels(values, form) { // as short as tells them apart
    for (let few = 4; few < 12; few++) {
      const found = values.map((value) => written(value, form, few));
      if (new Set(found).size === found.length) return found;
    }
    return values.map((value) => written(value, form));
  }
  function stepOf(rough, form) {
    if (form === "seconds" && rough >= 1 && rough <= 86400) return NICE.find((step) => step >= rough);
    let scale = form === "seconds" && rough > 86400 ? 86400 : 1;
    if (form === "bytes") scale = 1024 ** Math.max(Math.floor(Math.log(rough) / Math.log(1024)), 0);
    const power = 10 ** Math.floor(Math.log10(rough / scale));
    return scale * power * [1, 2, 5, 10].find((nice) => nice * power >= (rough / scale) * (1 - 1e-9));
  }
  function ticks(low, high, count, form) {
    if (!(high > low)) return [low];
    const step = stepOf((high - low) / count, form), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step);
    return found;
  }
  function logTicks(low, high, count, form) {
    if (high / low < 3) return ticks(low, high, count, form);
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.max(Math.ceil((last - first) / count), 1);
    const within = (...between) => {
      const found = [];
      for (let power = first; power <= last; power += every) for (const nice of between) found.push(nice * 10 ** power);
      return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    };
    let found = within(1);
    if (last - first <= Math.max(Math.floor(count / 3), 1) || (every === 1 && found.length < 3)) found = within(1, 2, 5);
    return found.length > 1 || every > 1 ? found : ticks(low, high, count, form);
  }
  const escaped = (said) => String(said).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  // data -------------------------------------------------------------------------------------------------------------
  const colour = (figure, curve) => `r${(several ? curve.run : figure.curves.indexOf(curve)) % 8}`;
  const dash = (figure, curve) => `d${several ? [...new Set(figure.curves.map((one) => one.name))].indexOf(curve.name) % 4 : 0}`;
  const nameOf = (curve) => (several ? `${data.runs[curve.run]}: ${curve.name}` : curve.name);
  const shown = (figure) => figure.curves.filter((curve) => !state.hidden.has(curve.run));
  const usable = (value, log) => value !== null && (!log || value > 0);
  function smoothed(points) {
    const found = [];
    let mean = 0, weight = 0;
    for (const value of points.value) {
      mean = state.fade * mean + value;
      weight = state.fade * weight + 1;
      found.push(mean / weight);
    }
    return found;
  }
  function full() {
    let low = Infinity, high = -Infinity;
    for (const figure of data.figures)
      for (const curve of shown(figure))
        for (const value of [curve[state.axis][0], curve[state.axis].at(-1)])
          if (usable(value, false)) (low = Math.min(low, value)), (high = Math.max(high, value));
    if (state.logx) {
      low = Math.max(low, Math.min(...firstPositive()));
      return low < high ? [low, high] : low === high ? [low / 2, low * 2] : [1, 10];
    }
    return low < high ? [low, high] : low === high ? [low - 0.5, low + 0.5] : [0, 1];
  }
  function firstPositive() {
    const found = data.figures.flatMap((f) => shown(f).map((c) => c[state.axis].find((value) => value > 0) ?? Infinity));
    return found.length ? found : [1];
  }
  function place(points, value) { // of the last point at or before it
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  // drawing ----------------------------------------------------------------------------------------------------------
  function draw(view) {
    const { figure, svg } = view, width = Math.max(svg.parentElement.clientWidth - 24, 240), height = figure.wide ? 340 : 220;
    const log = view.log, [x0, x1] = state.zoom ?? full();
    let low = Infinity, high = -Infinity;
    const lines = [];
    shown(figure).forEach((curve) => {
      const places = curve[state.axis], from = Math.max(place(places, x0), 0), to = Math.min(place(places, x1) + 2, places.length);
      lines.push({ curve, points: curve, values: curve.value, from, to, kind: "points" });
      for (let i = from; i < to; i++) {
        const inside = places[i] >= x0 && places[i] <= x1;
        if (inside && usable(curve.value[i], log)) (low = Math.min(low, curve.value[i])), (high = Math.max(high, curve.value[i]));
      }
      if (state.fade > 0 && !curve.dots && figure.smooth) {
        const points = curve.mean ?? curve, at = points[state.axis];
        lines.push({ curve, points, values: smoothed(points), from: Math.max(place(at, x0), 0), to: Math.min(place(at, x1) + 2, at.length), kind: "smooth" });
      }
    });
    if (low > high) (low = log ? 0.1 : 0), (high = 1);
    if (figure.zero && !log) low = Math.min(low, 0);
    const spare = log ? 0 : 0.05 * (high - low) || Math.abs(high) * 0.05 || 1;
    let y0 = log ? low / 1.1 : low >= 0 && low < 2 * spare ? 0 : low - spare, y1 = log ? high * 1.1 : high + spare;
    if (view.range) [y0, y1] = view.range;
    const right = width - RIGHT, bottom = height - BOTTOM;
    const share = (value, a, b, isLog) => (isLog ? Math.log(value / a) / Math.log(b / a) : (value - a) / (b - a));
    const X = (value) => LEFT + share(value, x0, x1, state.logx) * (right - LEFT);
    const Y = (value) => bottom - share(value, y0, y1, log) * (bottom - TOP);
    Object.assign(view, { X, Y, x0, x1, y0, y1, right, bottom, width, height });
    Object.assign(svg.dataset, { axis: state.axis, x0, x1, y0, y1, left: LEFT, right, top: TOP, bottom, logx: state.logx, logy: log });
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;

    const parts = [`<clipPath id="clip-${view.number}"><rect x="${LEFT - 4}" y="${TOP}" width="${right - LEFT + 8}" height="${bottom - TOP}"/></clipPath>`];
    const up = (log ? logTicks : ticks)(y0, y1, height / 45, figure.form), upward = labels(up, figure.form);
    for (const [i, value] of up.entries())
      parts.push(`<line class="grid" x1="${LEFT}" x2="${right}" y1="${Y(value)}" y2="${Y(value)}"/>`,
        `<text class="soft small y-tick" x="${LEFT - 6}" y="${Y(value) + 4}" text-anchor="end">${upward[i]}</text>`);
    const along = (state.logx ? logTicks : ticks)(x0, x1, width / 95, FORMS[state.axis]), across = labels(along, FORMS[state.axis]);
    for (const [i, value] of along.entries())
      parts.push(`<line class="grid" x1="${X(value)}" x2="${X(value)}" y1="${bottom}" y2="${bottom + 4}"/>`,
        `<text class="soft small x-tick" x="${Math.min(X(value), width - 3.6 * across[i].length)}" y="${bottom + 17}" text-anchor="middle">${across[i]}</text>`);
    parts.push(`<g clip-path="url(#clip-${view.number})">`, ...marks(view));
    for (const { curve, points, values, from, to, kind } of lines) {
      const drawn = [], thin = kind === "points" && lines.some((line) => line.curve === curve && line.kind === "smooth");
      for (let i = from; i < to; i++)
        if (usable(values[i], log) && usable(points[state.axis][i], state.logx))
          drawn.push(`${X(points[state.axis][i]).toFixed(2)},${Y(values[i]).toFixed(2)}`);
      const at = `data-curve="${figure.curves.indexOf(curve)}" data-from="${from}" data-kind="${kind}"`;
      parts.push(`<polyline class="curve ${thin ? "raw " : ""}${colour(figure, curve)} ${dash(figure, curve)}" ${at} points="${drawn.join(" ")}"/>`);
      if (drawn.length === 1 || (curve.dots && to - from <= width / 12)) // a line of one point is not seen
        parts.push(...drawn.map((xy) => `<circle class="${colour(figure, curve)}" r="2.6" cx="${xy.split(",")[0]}" cy="${xy.split(",")[1]}"/>`));
    }
    parts.push(`</g><rect class="frame" x="${LEFT}" y="${TOP}" width="${right - LEFT}" height="${bottom - TOP}"/><g class="over"></g>`);
    svg.innerHTML = parts.join("");
  }
  function marks(view) {
    const found = new Map();
    for (const [run, kind, step, tokens, seconds, said] of data.marks) {
      const value = { step, tokens, seconds }[state.axis];
      if (state.hidden.has(run) || !usable(value, state.logx) || value < view.x0 || value > view.x1) continue;
      const x = view.X(value).toFixed(1), top = kind === "save" ? view.bottom - 6 : TOP;
      found.set(`${x} ${kind}`, `<line class="k-${kind}" data-said="${escaped(said)}" x1="${x}" x2="${x}" y1="${top}" y2="${view.bottom}"/>`);
    }
    return [...found.values()];
  }
  const drawAll = () => (views.forEach(draw), tell());

  // reading values ---------------------------------------------------------------------------------------------------
  function read(view, x) {
    const over = view.svg.querySelector(".over"), inside = x >= LEFT && x <= view.right;
    view.said.hidden = !inside;
    if (!inside) return (over.innerHTML = "");
    const part = (x - LEFT) / (view.right - LEFT), { x0, x1 } = view;
    const at = state.logx ? x0 * (x1 / x0) ** part : x0 + part * (x1 - x0);
    const rows = [], spots = [];
    for (const curve of shown(view.figure)) {
      const places = curve[state.axis], before = place(places, at);
      const i = before < 0 ? 0 : before + 1 < places.length && places[before + 1] - at < at - places[before] ? before + 1 : before;
      if (!usable(curve.value[i], view.log) || !usable(places[i], state.logx)) continue;
      spots.push(`<circle class="${colour(view.figure, curve)} spot" r="3.6" cx="${view.X(places[i])}" cy="${view.Y(curve.value[i])}"/>`);
      const where = places[i] === null ? "" : `${WORDS[state.axis]} ${written(places[i], FORMS[state.axis])}`;
      const step = state.axis === "step" ? "" : `, step ${curve.step[i].toLocaleString("en")}`;
      rows.push(`<span class="key ${colour(view.figure, curve)} ${dash(view.figure, curve)}"></span>${escaped(nameOf(curve))} <b>${written(curve.value[i], view.figure.form)}</b> <span class="soft">at ${where}${step}</span>`);
    }
    const near = [...view.svg.querySelectorAll("[data-said]")].filter((one) => Math.abs(one.getAttribute("x1") - x) < 5);
    rows.push(...near.slice(0, 4).map((one) => `<span class="soft">${escaped(one.dataset.said)}</span>`));
    over.innerHTML = `<line class="rule" x1="${x}" x2="${x}" y1="${TOP}" y2="${view.bottom}"/>${spots.join("")}`;
    view.said.innerHTML = rows.join("<br>");
    const box = view.said.offsetWidth, edge = view.svg.offsetLeft + x;
    view.said.style.left = `${edge + 16 + box > view.element.clientWidth ? Math.max(edge - box - 12, 4) : edge + 14}px`;
    view.said.style.top = `${view.svg.offsetTop + 12}px`;
    view.cursor = x;
  }

  // zooming ----------------------------------------------------------------------------------------------------------
  function zoomTo(low, high) {
    const [first, last] = full(), least = (last - first) * 1e-6;
    if (state.logx) low = Math.max(low, first);
    state.zoom = high - low < least ? state.zoom : low <= first && high >= last ? null : [low, high];
    drawAll();
  }
  function zoomBy(factor) {
    const [low, high] = state.zoom ?? full(), middle = (low + high) / 2, half = ((high - low) / 2) * factor;
    const [first, last] = full();
    zoomTo(Math.max(middle - half, first), Math.min(middle + half, last));
  }
  function pan(share) {
    if (!state.zoom) return;
    const [first, last] = full(), [low, high] = state.zoom;
    const by = Math.min(Math.max((high - low) * share, first - low), last - high);
    zoomTo(low + by, high + by);
  }
  function reset() {
    state.zoom = null;
    views.forEach((view) => (view.range = null));
    drawAll();
  }
  function value(view, x, y) {
    const share = (x - LEFT) / (view.right - LEFT), up = (view.bottom - y) / (view.bottom - TOP);
    const on = (part, a, b, log) => (log ? a * (b / a) ** part : a + part * (b - a));
    return [on(share, view.x0, view.x1, state.logx), on(up, view.y0, view.y1, view.log)];
  }
  function listen(view) {
    const { svg } = view;
    let from = null;
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * view.width, y = ((event.clientY - box.top) / box.height) * view.height;
      return [Math.min(Math.max(x, LEFT), view.right), Math.min(Math.max(y, TOP), view.bottom), x >= LEFT && x <= view.right];
    };
    const upright = ([x, y], [a, b]) => Math.abs(x - a) < 12 && Math.abs(y - b) > 24;
    svg.addEventListener("pointerdown", (event) => {
      const [x, y, inside] = at(event);
      if (event.button !== 0 || !inside) return;
      from = [x, y];
      try { svg.setPointerCapture(event.pointerId); } catch { /* a pointer that a script made cannot be held */ }
      event.preventDefault();
      view.element.focus({ preventScroll: true });
    });
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!from) return read(view, x);
      const box = upright(from, [x, y])
        ? `x="${LEFT}" width="${view.right - LEFT}" y="${Math.min(y, from[1])}" height="${Math.abs(y - from[1])}"`
        : `x="${Math.min(x, from[0])}" width="${Math.abs(x - from[0])}" y="${TOP}" height="${view.bottom - TOP}"`;
      view.said.hidden = true;
      return (svg.querySelector(".over").innerHTML = `<rect class="zoom" ${box}/>`);
    });
    svg.addEventListener("pointerup", (event) => {
      if (!from) return;
      const [x, y] = at(event), [a, b] = value(view, ...from), [c, d] = value(view, x, y), tall = upright(from, [x, y]);
      const wide = Math.abs(x - from[0]) > 5;
      from = null;
      svg.querySelector(".over").innerHTML = "";
      if (tall) (view.range = [Math.min(b, d), Math.max(b, d)]), draw(view);
      else if (wide) zoomTo(Math.min(a, c), Math.max(a, c));
    });
    svg.addEventListener("pointercancel", () => (from = null));
    svg.addEventListener("pointerleave", () => from || ((view.said.hidden = true), (svg.querySelector(".over").innerHTML = "")));
    svg.addEventListener("dblclick", reset);
  }

  // switches ---------------------------------------------------------------------------------------------------------
  const tools = document.getElementById("tools");
  const make = (tag, properties = {}, ...inside) => {
    const found = Object.assign(document.createElement(tag), properties);
    found.append(...inside);
    return found;
  };
  const pressed = (button, on) => button.setAttribute("aria-pressed", String(on));
  const axes = data.axes.map((axis) => make("button", { type: "button", textContent: WORDS[axis], onclick: () => setAxis(axis) }));
  const logx = make("button", { type: "button", textContent: "log x", title: "k", onclick: () => setLogX() });
  const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.fade, oninput: () => setFade(Number(slider.value)) });
  slider.setAttribute("aria-label", "smoothing");
  const fade = make("output"), theme = make("button", { type: "button", textContent: "light / dark", title: "t", onclick: () => switchTheme() });
  const all = make("button", { type: "button", textContent: "show all", title: "0", onclick: reset });
  const runs = several ? data.runs.map((name, run) => {
    const button = make("button", { type: "button", title: "show or hide this run", onclick: () => {
      state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run);
      button.classList.toggle("off", state.hidden.has(run));
      drawAll();
    } }, make("span", { className: `key r${run % 8}` }), name);
    return button;
  }) : [];
  tools.append(make("span", { className: "group" }, ...axes), logx, make("label", {}, "smoothing", slider, fade), all, ...runs, theme);
  function setAxis(axis) {
    state.zoom = carried(axis);
    state.axis = axis;
    drawAll();
  }
  function carried(axis) { // the same stretch of training on another axis, by the longest curve
    if (!state.zoom) return null;
    const curves = data.figures.flatMap(shown);
    if (!curves.length) return null;
    const curve = curves.reduce((a, b) => (b.step.length > a.step.length ? b : a));
    const found = state.zoom.map((value) => curve[axis][Math.max(place(curve[state.axis], value), 0)]);
    return found[0] < found[1] ? found : null;
  }
  function setLogX() {
    state.logx = !state.logx;
    state.zoom = null;
    drawAll();
  }
  function setFade(value) {
    state.fade = Math.min(Math.max(Math.round(value * 100) / 100, 0), 0.99);
    drawAll();
  }
  function setLog(view) {
    view.log = !view.log;
    view.range = null;
    drawAll();
  }
  function switchTheme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  }
  function tell() {
    axes.forEach((button, i) => pressed(button, data.axes[i] === state.axis));
    pressed(logx, state.logx);
    slider.value = state.fade;
    fade.textContent = state.fade ? state.fade.toFixed(2) : "off";
    all.disabled = !state.zoom && !views.some((view) => view.range);
    views.forEach((view) => pressed(view.turn, view.log));
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === slider) return;
    const view = views.find((one) => one.element === document.activeElement), cursor = view && (view.cursor ?? LEFT);
    const keys = {
      ArrowLeft: () => (state.zoom ? pan(-0.25) : null), ArrowRight: () => (state.zoom ? pan(0.25) : null),
      "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: reset, Escape: reset,
      x: () => setAxis(data.axes[(data.axes.indexOf(state.axis) + 1) % data.axes.length]), k: setLogX,
      l: () => (view ? setLog(view) : views.forEach(setLog)), s: () => setFade(state.fade + 0.05), S: () => setFade(state.fade - 0.05),
      t: switchTheme, ",": () => view && read(view, Math.max(cursor - 4, LEFT)), ".": () => view && read(view, Math.min(cursor + 4, view.right)),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });

  // begin ------------------------------------------------------------------------------------------------------------
  for (const element of document.querySelectorAll("figure[data-key]")) {
    const figure = data.figures.find((one) => one.key === element.dataset.key), svg = element.querySelector("svg");
    if (!figure || !figure.curves.length) continue;
    const view = { element, figure, svg, number: views.length, log: figure.log, range: null };
    view.said = element.appendChild(make("div", { className: "said", hidden: true }));
    view.turn = element.appendChild(make("button", { className: "turn", type: "button", textContent: "log", title: "l", onclick: () => setLog(view) }));
    const names = make("div", { className: "names" });
    if (figure.curves.length > 1 || several)
      names.append(...figure.curves.map((curve) => make("span", {}, make("span", { className: `key ${colour(figure, curve)} ${dash(figure, curve)}` }), nameOf(curve))));
    svg.before(names);
    svg.classList.add("live");
    views.push(view);
    listen(view);
  }
  let due = 0;
  addEventListener("resize", () => (cancelAnimationFrame(due), (due = requestAnimationFrame(drawAll))));
  drawAll();
  document.documentElement.dataset.drawn = String(views.length);
})();
